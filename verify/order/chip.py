"""The kernels of one device and what orders them: who comes before whom, the heaviest unordered set."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.order.queues import Orders

Kind = tuple[int, int]
"""Where an instance stands on all of its members (its shape), and its weight. One kind has one order everywhere."""


class Spent(Exception):
    """A search has used up its budget."""


class Steps:
    """A budget shared by several searches."""

    def __init__(self, budget: int) -> None:
        self.budget = self.left = budget

    def take(self, count: int = 1) -> None:
        """Raise Spent when there is no more."""
        self.left -= count
        if self.left < 0:
            raise Spent


class Device:
    """The partial order of a device's kernels, from its queues and edges.

    Queues are chains, so that what precedes x is a prefix of each queue: `before[x][q]` calls of local queue q.
    """

    def __init__(self, orders: Orders, rank: int, queues: Sequence[int], steps: Steps) -> None:
        self.orders, self.rank, self.steps = orders, rank, steps
        steps.take(len(orders.issued.get(rank, ())))
        self.lines = [orders.queues[queue].calls for queue in queues]
        local = {queue: number for number, queue in enumerate(queues)}
        self.before: dict[int, list[int]] = {}
        self.at: dict[int, list[tuple[int, int]]] = {}
        """Instance -> (local queue, position); the first one is its own queue."""
        self._order({shape: [local[p] for p in places if p in local] for shape, places in enumerate(orders.shapes)})
        self.kinds: list[dict[Kind, list[int]]] = [{} for _ in self.lines]
        """Local queue -> kind -> positions."""
        for number, line in enumerate(self.lines):
            for position, instance in enumerate(line):
                self.kinds[number].setdefault(self.kind(instance), []).append(position)
        self.own = [
            [orders.weight(each) if self.at[each][0][0] == number else 0 for each in line]
            for number, line in enumerate(self.lines)
        ]
        """Local queue -> weights of the kernels whose own queue it is, 0 for guests and those of hosts."""
        self._counts = [
            {w: [0, *accumulate(each == w for each in mine)] for w in sorted(set(mine) - {0})} for mine in self.own
        ]

    def _order(self, local: dict[int, list[int]]) -> None:
        orders = self.orders
        edges: dict[int, list[int]] = {}
        for edge in orders.edges:
            if edge.rank == self.rank and not edge.soft:
                edges.setdefault(edge.after, []).append(edge.before)
        upto: dict[int, list[int]] = {}
        ends: list[int | None] = [None] * len(self.lines)
        counts = [0] * len(self.lines)
        for instance in orders.issued.get(self.rank, ()):
            queues = local[orders.shape[instance]]
            behind = [upto[last] for queue in queues if (last := ends[queue]) is not None]
            behind += [upto[each] for each in edges.get(instance, ())]
            reach = list(map(max, *behind)) if len(behind) > 1 else [*behind[0]] if behind else [0] * len(counts)
            self.before[instance] = reach
            self.at[instance] = [(queue, counts[queue]) for queue in queues]
            upto[instance] = mine = [*reach]
            for queue in queues:
                counts[queue] += 1
                mine[queue] = counts[queue]
                ends[queue] = instance

    def kind(self, instance: int) -> Kind:
        """Instances of one kind stand in the same queues everywhere, with equal weights."""
        return (self.orders.shape[instance], self.orders.weight(instance))

    def precedes(self, one: int, other: int) -> bool:
        """one < other here."""
        queue, position = self.at[one][0]
        return position < self.before[other][queue]

    def first_after(self, instance: int, queue: int) -> int:
        """The first position of a local queue that `instance` precedes."""
        mine, position = self.at[instance][0]
        if any(each == queue for each, _ in self.at[instance]):
            return next(at for each, at in self.at[instance] if each == queue) + 1
        before = self.before
        return bisect_right(self.lines[queue], position, key=lambda other: before[other][mine])

    def window(self, instance: int, queue: int) -> tuple[int, int]:
        """The positions of a local queue that nothing orders with `instance`."""
        if any(each == queue for each, _ in self.at[instance]):
            return (0, 0)
        return self.before[instance][queue], self.first_after(instance, queue)

    def from_on(self, queue: int, start: int) -> list[int]:
        """The first instance of each kind at or after a position of a local queue."""
        line = self.lines[queue]
        found = []
        for positions in self.kinds[queue].values():
            at = bisect_left(positions, start)
            if at < len(positions):
                found.append(line[positions[at]])
        return found

    def heaviest(self, queue: int, low: int, high: int) -> int:
        """Of the kernels whose own queue it is, between two positions; 0 where there are none."""
        return next((w for w, n in reversed(self._counts[queue].items()) if n[high] > n[low]), 0) if low < high else 0

    def lightest(self, queue: int, low: int, high: int) -> int:
        """As `heaviest`."""
        return next((w for w, n in self._counts[queue].items() if n[high] > n[low]), 0) if low < high else 0

    def solo(self, room: int) -> bool:
        """Whether no two kernels that nothing orders fit at once."""
        mine = [number for number, weights in enumerate(self.own) if any(weights)]
        if room < 2 * min((min(self._counts[number]) for number in mine), default=room):
            return True
        for number in mine:
            for position, weight in enumerate(self.own[number]):
                for other in mine if weight else ():
                    light = self.lightest(other, *self.window(self.lines[number][position], other))
                    if light and weight + light <= room:
                        return False
        return True

    def chain(self) -> bool:
        """Whether its kernels are totally ordered."""
        mine = [number for number, weights in enumerate(self.own) if any(weights)]
        for number in mine:
            for position, weight in enumerate(self.own[number]):
                instance = self.lines[number][position]
                if weight and any(self.heaviest(other, *self.window(instance, other)) for other in mine):
                    return False
        return True

    def width(self, enough: int) -> int:
        """The weight of the heaviest set of kernels that are pairwise unordered; `enough`: it cannot be more.

        Branch and bound, one kernel at most from each queue. Raises Spent.
        """
        mine = [number for number, weights in enumerate(self.own) if any(weights)]
        best = 0

        def search(depth: int, windows: dict[int, tuple[int, int]], total: int) -> None:
            nonlocal best
            rest = mine[depth:]
            if best == enough or total + sum(self.heaviest(q, *windows[q]) for q in rest) <= best:
                return
            if len(rest) <= 1:
                best = max(best, total + sum(self.heaviest(q, *windows[q]) for q in rest))
                return
            low, high = windows[rest[0]]
            for position in range(low, high):
                weight = self.own[rest[0]][position]
                if not weight:
                    continue
                self.steps.take()
                instance = self.lines[rest[0]][position]
                inner = dict(windows)
                for queue in rest[1:]:
                    one, other = self.window(instance, queue)
                    inner[queue] = (max(one, windows[queue][0]), min(other, windows[queue][1]))
                search(depth + 1, inner, total + weight)
            search(depth + 1, windows, total)

        search(0, {number: (0, len(self.lines[number])) for number in mine}, 0)
        return best
