"""The shortest ring of 'before' among queues that have no common order, told hop by hop, with the reason of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verify.blame import Certainty, Class, Verdict, minority
from verify.words import FIXES, ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.order.queues import Edge, Orders, Queue


@dataclass(frozen=True)
class Hop:
    """On `rank`, instance `before` comes before `after`, for this reason; where they are called, if known."""

    rank: int
    before: int
    after: int
    reason: str
    sites: tuple[str, str] = ("", "")

    def told(self, orders: Orders) -> str:
        """In words."""
        before, after = orders.name(self.before), orders.name(self.after)
        places = " before ".join(filter(None, self.sites))
        return f"rank {self.rank} has {before} before {after} ({self.reason}{f': {places}' if places else ''})"


class _Core:
    """The part of the queues that Kahn's algorithm could not take, where every element is before some other."""

    def __init__(self, orders: Orders, left: Sequence[int], extra: Sequence[Queue], soft: bool) -> None:
        self.orders = orders
        self.queues = [*orders.queues, *extra]
        self.lines = [[each for each in queue.calls if left[each]] for queue in self.queues]
        self.edges = [e for e in orders.edges if left[e.before] and left[e.after] and (soft or not e.soft)]
        self._trim()
        self.places: dict[int, list[tuple[int, int]]] = {}
        """Instance -> (queue, position) of each time that it stands there, for those that may be in a ring."""
        for number, line in enumerate(self.lines):
            for position, instance in enumerate(line):
                self.places.setdefault(instance, []).append((number, position))
        self.after: dict[int, list[Edge]] = {}
        for edge in self.edges:
            self.after.setdefault(edge.before, []).append(edge)

    def _trim(self) -> None:
        """Drop what only comes behind a ring: what is last in all of its queues."""
        behind: dict[int, int] = {}
        holders: dict[int, list[int]] = {}
        sources: dict[int, list[int]] = {}
        for number, line in enumerate(self.lines):
            for position, instance in enumerate(line):
                behind[instance] = behind.get(instance, 0) + (position + 1 < len(line))
                holders.setdefault(instance, []).append(number)
        for edge in self.edges:
            behind[edge.before] = behind.get(edge.before, 0) + 1
            sources.setdefault(edge.after, []).append(edge.before)
        todo = [instance for instance, count in behind.items() if not count]
        gone: set[int] = set()
        while todo:
            instance = todo.pop()
            gone.add(instance)
            for number in holders[instance]:
                line = self.lines[number]
                while line and line[-1] in gone:
                    line.pop()
                    if line:
                        behind[line[-1]] -= 1
                        if not behind[line[-1]]:
                            todo.append(line[-1])
            for before in sources.get(instance, ()):
                behind[before] -= 1
                if not behind[before]:
                    todo.append(before)
        self.edges = [edge for edge in self.edges if edge.before not in gone and edge.after not in gone]

    def ring(self, start: int, most: int) -> tuple[list[tuple[int, Edge | int]], int]:
        """A shortest ring through `start` of at most `most` hops, as (instance, how it goes on), and the work done.

        One hop goes to anything later in a queue. Each queue's tail is read once: breadth-first.
        """
        came: dict[int, tuple[int, Edge | int]] = {}
        read = [len(line) for line in self.lines]
        todo = deque([(start, 0)])
        work = 0
        while todo:
            instance, depth = todo.popleft()
            if depth >= most:
                break
            hops: list[tuple[int, Edge | int]] = [(edge.after, edge) for edge in self.after.get(instance, ())]
            for number, position in self.places[instance]:
                hops += [(later, number) for later in self.lines[number][position + 1 : read[number]]]
                read[number] = min(read[number], position + 1)
            work += len(hops) + 1
            for later, how in hops:
                if later not in came:
                    came[later] = (instance, how)
                    todo.append((later, depth + 1))
            if start in came:
                break
        if start not in came:
            return [], work
        ring, at = [came[start]], came[start][0]
        while at != start:
            ring.append(came[at])
            at = came[at][0]
        return ring[::-1], work


def shortest_ring(
    orders: Orders, left: Sequence[int], extra: Sequence[Queue] = (), soft: bool = True, budget: int = 5_000_000
) -> tuple[tuple[Hop, ...], bool]:
    """A ring of fewest hops among what is stuck (`left` of `verify.order.queues.sort`), and whether it surely is one.

    Empty where nothing is in a ring. Rings that can bite first are preferred: the heads of queues are tried first.
    budget: calls to look at; when it is used up, the shortest ring so far is returned.
    """
    core = _Core(orders, left, extra, soft)
    heads = dict.fromkeys(line[0] for line in core.lines if line)
    best: list[tuple[int, Edge | int]] = []
    whole = True
    for start in (*heads, *(each for each in core.places if each not in heads)):
        if best and len(best) <= 2 and len(best) <= _least(core, best):
            break
        ring, work = core.ring(start, len(best) - 1 if best else 1 << 60)
        best = ring or best
        budget -= work
        if budget < 0 and best:
            whole = len(best) <= 2
            break
    return tuple(_hop(core, *best[n], best[(n + 1) % len(best)][0]) for n in range(len(best))), whole


def _least(core: _Core, best: list[tuple[int, Edge | int]]) -> int:
    """The fewest hops that any ring can have: 1 where some instance is before itself."""
    if len(best) == 1:
        return 1
    selfish = any(edge.before == edge.after for edge in core.edges)
    twice = any(len({number for number, _ in places}) < len(places) for places in core.places.values())
    return 1 if selfish or twice else 2


def _hop(core: _Core, before: int, how: Edge | int, after: int) -> Hop:
    if not isinstance(how, int):
        return Hop(how.rank, before, after, how.reason)
    queue = core.queues[how]
    if how >= len(core.orders.queues):
        return Hop(queue.rank, before, after, "order of issue on the device")
    at = (queue.calls.index(before), queue.calls.index(after))
    # The same instance twice in a queue: its second time.
    at = (at[0], queue.calls.index(after, at[0] + 1)) if before == after else at
    sites = (core.orders.site(how, at[0]), core.orders.site(how, at[1]))
    return Hop(queue.rank, before, after, f"stream {queue.name}", sites)


def cycle_verdict(orders: Orders, hops: Sequence[Hop], shortest: bool) -> Verdict:
    """The finding: certain as it stands. Blamed are the ranks that differ from the order of most, if there are such."""
    lines = tuple(hop.told(orders) for hop in hops)
    involved = tuple(sorted({hop.rank for hop in hops}))
    odd, order = _odd(orders, hops)
    say = f"{ranks(involved).capitalize()} allow no common order: {'; '.join(lines)}."
    if odd:
        say += f" {ranks(odd).capitalize()} differs from the majority, which has {order}."
    if not shortest:
        say += " There may be a shorter ring."
    return Verdict(Class.CYCLE, Certainty.CERTAIN, odd or involved, lines, say, FIXES["cycle"])


def _odd(orders: Orders, hops: Iterable[Hop]) -> tuple[tuple[int, ...], str]:
    """The ranks that issue two instances of the ring in another order than most, and the order of most."""
    for hop in hops:
        sides: dict[bool, list[int]] = {}
        for rank in set(orders.ranks_of(hop.before)) & set(orders.ranks_of(hop.after)):
            calls = orders.issued[rank]
            sides.setdefault(calls.index(hop.before) < calls.index(hop.after), []).append(rank)
        if odd := minority(sides.values()):
            most = len(sides.get(True, ())) > len(sides.get(False, ()))
            first, second = (hop.before, hop.after) if most else (hop.after, hop.before)
            return odd, f"{orders.name(first)} before {orders.name(second)}"
    return (), ""
