"""Rings of instances in which every device is used for one choice at most (see `verify.order.residency`)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verify.order.chip import Spent
from verify.order.cycle import Hop
from verify.order.queues import sort

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from verify.order.chip import Device, Steps
    from verify.order.queues import Orders

CHOICE = "nothing orders them there"


@dataclass(frozen=True)
class Ring:
    """hops: a shortest one. gated: some kernel that holds room in it may not get there before others of it are done."""

    hops: tuple[Hop, ...]
    gated: bool


_State = tuple[int, frozenset[int]]
"""An instance, and the tight devices used for a choice on the way to it."""


def find_ring(
    orders: Orders,
    device: Callable[[int], Device],
    tight: frozenset[int],
    steps: Steps,
    room: Mapping[int, int] | None = None,
) -> Ring | None:
    """A ring with a choice on tight devices, as short as there is; None: there is none.

    room: of the devices, to choose only between two kernels that do not fit together.

    Of the instances of one kind (in the same queues everywhere) the earliest that a hop can reach stands for all: what
    it may come before is a superset. And of the starts of one kind that reach the same one, the latest stands for all.
    Raises chip.Spent, unless a ring was found before.
    """
    search = _Search(orders, device, tight, steps, room)
    starts: dict[tuple[int, int, object, int], int] = {}
    for rank in sorted(tight):
        here = device(rank)
        for number, weights in enumerate(here.own):
            for position, weight in enumerate(weights):
                instance = here.lines[number][position]
                for other in range(len(here.lines)) if weight else ():
                    low, high = here.window(instance, other)
                    if low == high:
                        continue
                    for later in here.from_on(other, low):
                        if _position(here, later, other) < high and search.competes(rank, instance, later):
                            starts[rank, other, here.kind(instance), later] = instance
    best: tuple[Hop, ...] = ()
    for (rank, _, _, later), start in starts.items():
        try:
            found = search.back(start, rank, later, len(best) - 1 if best else 1 << 30)
        except Spent:
            if best:
                break
            raise
        best = found if found and (not best or len(found) < len(best)) else best
        if len(best) == 2:
            break
    return Ring(best, search.gated(best)) if best else None


def _position(here: Device, instance: int, queue: int) -> int:
    return next(position for each, position in here.at[instance] if each == queue)


class _Search:
    def __init__(
        self,
        orders: Orders,
        device: Callable[[int], Device],
        tight: frozenset[int],
        steps: Steps,
        room: Mapping[int, int] | None,
    ) -> None:
        self.orders, self.device, self.tight, self.steps, self.room = orders, device, tight, steps, room
        self.members: dict[int, tuple[int, ...]] = {}

    def ranks(self, instance: int) -> tuple[int, ...]:
        """Its members."""
        shape = self.orders.shape[instance]
        if shape not in self.members:
            self.members[shape] = self.orders.ranks_of(instance)
        return self.members[shape]

    def competes(self, rank: int, one: int, other: int) -> bool:
        """Whether one of these kernels may keep the other from the device, given that nothing orders them there."""
        weights = self.orders.weight(one), self.orders.weight(other)
        return all(weights) and (self.room is None or sum(weights) > self.room[rank])

    def back(self, start: int, rank: int, first: int, most: int) -> tuple[Hop, ...]:
        """The shortest ring start -> first (a choice on `rank`) -> ... -> start of at most `most` hops; () for none."""
        origin: _State = (first, frozenset((rank,)))
        came: dict[_State, tuple[_State | None, Hop]] = {origin: (None, Hop(rank, start, first, CHOICE))}
        todo = deque([(origin, 1)])
        goals = frozenset(self.ranks(start))
        while todo:
            state, depth = todo.popleft()
            if depth >= most:
                return ()
            instance, used = state
            for place in self.ranks(instance):
                if place in goals and (hop := self._closes(instance, start, place, used)) is not None:
                    return self._path(came, state, hop)
            for place in self.ranks(instance):
                for later, after, hop in self._hops(instance, place, used):
                    self.steps.take()
                    following = (later, after)
                    if later != start and following not in came:
                        came[following] = (state, hop)
                        todo.append((following, depth + 1))
        return ()

    def _path(self, came: dict[_State, tuple[_State | None, Hop]], state: _State, last: Hop) -> tuple[Hop, ...]:
        hops, at = [last], state
        while True:
            before, hop = came[at]
            hops.append(hop)
            if before is None:
                return tuple(hops[::-1])
            at = before

    def _closes(self, instance: int, start: int, rank: int, used: frozenset[int]) -> Hop | None:
        here = self.device(rank)
        if here.precedes(instance, start):
            return Hop(rank, instance, start, "in order")
        if rank in self.tight and rank not in used and not here.precedes(start, instance):
            return Hop(rank, instance, start, CHOICE) if self.competes(rank, instance, start) else None
        return None

    def _hops(self, instance: int, rank: int, used: frozenset[int]) -> Iterator[tuple[int, frozenset[int], Hop]]:
        """(later instance, tight devices used, hop): the first of each kind in each queue."""
        here, narrow = self.device(rank), rank in self.tight
        for queue in range(len(here.lines)):
            for later in here.from_on(queue, here.first_after(instance, queue)):
                yield later, used, Hop(rank, instance, later, "in order")
            low, high = here.window(instance, queue) if narrow and rank not in used else (0, 0)
            for later in here.from_on(queue, low) if low < high else ():
                if _position(here, later, queue) < high and self.competes(rank, instance, later):
                    yield later, used | {rank}, Hop(rank, instance, later, CHOICE)

    def gated(self, hops: tuple[Hop, ...]) -> bool:
        """Whether something of the ring must be done before a kernel that holds room in it can be there.

        With room for one (`room` None) only a rendezvous of hosts can tell: what else comes before a holder competes
        with the same kernels, and the ring closes through it.
        """
        if self.room is None and not self.orders.host:
            return False
        gates: set[int] = set()
        for hop in hops:
            if hop.reason == CHOICE:
                here = self.device(hop.rank)
                mine = here.before[hop.before]
                if self.room is None:
                    hosts = (each for each in here.before if each in self.orders.host)
                    gates |= {each for each in hosts if here.precedes(each, hop.before)}
                else:
                    gates |= {line[count - 1] for line, count in zip(here.lines, mine, strict=True) if count}
        return bool(gates) and self._reaches({hop.before for hop in hops}, gates)

    def _reaches(self, seeds: set[int], gates: set[int]) -> bool:
        order, _ = sort(self.orders)
        index = {instance: number for number, instance in enumerate(order)}
        limit = max(index[gate] for gate in gates)
        seen, todo = set(seeds), list(seeds)
        while todo:
            instance = todo.pop()
            if instance in gates:
                return True
            for rank in self.ranks(instance):
                here = self.device(rank)
                for queue in range(len(here.lines)):
                    at = here.first_after(instance, queue)
                    if at < len(here.lines[queue]):
                        later = here.lines[queue][at]
                        if later not in seen and index[later] <= limit:
                            seen.add(later)
                            todo.append(later)
        return False
