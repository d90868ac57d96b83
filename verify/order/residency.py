"""How much room the kernels need on their devices, given that a common order exists (`verify.order`).

A kernel of a collective holds its room until all members are there. `x < y` on a device: a queue, an event or the host
puts x before y. Four rules, each checked against a search of all schedules in tests/test_verify_residency.py:

    one chain   every device's kernels are totally ordered: any room for the largest one is enough
    budgets     room for the largest kernel of each stream together ("one kernel of each phase") is enough
    width       room for the heaviest set of kernels that are pairwise unordered is enough
    ring        a device is tight if it has less. Hops of a ring of instances are `<` on any device, or a choice: two
                kernels of a tight device that nothing orders, of which one may be there first. No device is used
                twice for a choice. Without such a ring every room for the largest kernel is enough, also between one
                and the width. With one, and tight devices of which no two unordered kernels fit on at once, some
                schedule deadlocks. Where some fit, a ring of pairs that do not is a deadlock if all kernels that hold
                room in it can get there at once; else it is not decided

A shortest ring of linear extensions uses no device twice, since two hops on one of them could be cut short; and one
choice for each device always extends to linear extensions. Where hosts meet in rendezvous, a kernel that only a later
rendezvous lets in cannot hold the room before; a ring that leans on such a hop is not decided. Kernels that compute
are not in the orders: they end by themselves, and are taken to need no more room than a collective on their stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verify.blame import Class, Verdict
from verify.order.chip import Device, Spent, Steps
from verify.order.rainbow import CHOICE, find_ring
from verify.words import ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.order.cycle import Hop
    from verify.order.queues import Orders

FIX = "Give the device room for one kernel of each stream, or put these collectives on one stream on all members."


@dataclass(frozen=True)
class Residency:
    """What room is needed, in the unit of the kernels' weights.

    capacity: what was asked about, by rank; None if nothing was. largest: the largest kernel. budgets: the largest
    kernel of each stream of a device together, over all devices the most. width: the heaviest unordered set, None
    where it was not needed or not found within the budget. safe_from: from this room on every schedule completes.
    rule: by which of the rules. ring: how too little room can deadlock. say: all that in a sentence.
    """

    largest: int
    budgets: int
    width: int | None
    safe_from: int
    rule: str
    ring: tuple[Hop, ...]
    verdict: Verdict
    say: str
    capacity: Mapping[int, int] | None = None


def residency(orders: Orders, capacity: int | Mapping[int, int] | None = None, *, budget: int = 400_000) -> Residency:
    """Judge the room of devices. capacity: of every device, or by rank; None: only say what is needed.

    orders: must have a common order. budget: steps of the exact searches.
    """
    rooms = _rooms(orders)
    largest = {rank: max(mine.values(), default=0) for rank, mine in rooms.items()}
    sums = {rank: sum(mine.values()) for rank, mine in rooms.items()}
    most, most_sum = max(largest.values(), default=0), max(sums.values(), default=0)
    asked = None if capacity is None else _by_rank(capacity, rooms)
    judged = asked if asked is not None else largest
    judge = _Judge(orders, judged, sums, all(len(mine) < 2 for mine in rooms.values()), Steps(budget))
    if asked is not None and (small := [rank for rank in rooms if asked[rank] < largest[rank]]):
        rank = small[0]
        say = f"The largest kernel of rank {rank} takes {largest[rank]} of {asked[rank]} slots: it never starts."
        fix = "Give the device room for its largest kernel."
        stall = Verdict(Class.DEVICE_STALL, ranks=tuple(small), chain=(say,), say=say, fix=fix)
        return Residency(most, most_sum, None, most, "", (), stall, say, asked)
    if asked is None and orders.kernels > budget and most_sum > most:
        say = f"Room for {most_sum} is enough, by the rule 'budgets'; less was not judged ({orders.kernels} kernels)."
        return Residency(most, most_sum, None, most_sum, "budgets", (), Verdict(Class.NONE), say)
    rule, found, ring = judge.verdict()
    width = judge.width()
    if asked is not None:
        safe = max(asked.values(), default=0) if found.cls is Class.NONE else (most_sum if width is None else width)
        safe = most if rule in ("one chain", "ring") else safe
        say = f"By the rule '{rule}' the room of {_room(asked)} is enough." if found.cls is Class.NONE else found.say
        return Residency(most, most_sum, width, safe, rule, ring, found, say, asked)
    if found.cls is Class.NONE:
        say = f"Any room for the largest kernel ({most}) is enough, by the rule '{rule}'."
        return Residency(most, most_sum, width, most, rule, (), Verdict(Class.NONE), say)
    safe, rule = (most_sum, "budgets") if width is None else (width, "width")
    say = f"Room for {safe} is enough, by the rule '{rule}'; with less, kernels may keep each other from the device."
    return Residency(most, most_sum, width, safe, rule, ring, Verdict(Class.NONE), say)


def _by_rank(capacity: int | Mapping[int, int], rooms: Mapping[int, object]) -> dict[int, int]:
    return {rank: capacity if isinstance(capacity, int) else capacity[rank] for rank in rooms}


def _room(asked: Mapping[int, int]) -> str:
    low, high = min(asked.values(), default=0), max(asked.values(), default=0)
    return str(low) if low == high else f"{low} to {high}"


def _rooms(orders: Orders) -> dict[int, dict[int, int]]:
    """Rank -> queue -> the largest kernel whose first queue it is. Looks at each kind of instance once."""
    rooms: dict[int, dict[int, int]] = {rank: {} for rank in orders.issued}
    kinds = set(zip(orders.shape, orders.comm, strict=True))
    if orders.host:
        kinds = {
            kind for number, kind in enumerate(zip(orders.shape, orders.comm, strict=True)) if number not in orders.host
        }
    for shape, comm in kinds:
        taken: set[int] = set()
        for place in orders.shapes[shape]:  # in the order of queues: the first of a rank's is the kernel's own
            rank = orders.queues[place].rank
            if rank not in taken:
                taken.add(rank)
                rooms[rank][place] = max(rooms[rank].get(place, 0), orders.weights[comm])
    return rooms


class _Judge:
    """One question: is this room enough?"""

    def __init__(
        self, orders: Orders, room: Mapping[int, int], sums: Mapping[int, int], single: bool, steps: Steps
    ) -> None:
        self.orders, self.room, self.sums, self.single, self.steps = orders, room, sums, single, steps
        self.queues = orders.queues_of()
        self.devices: dict[int, Device] = {}
        self.widths: dict[int, int] = {}
        self.spent = False

    def device(self, rank: int) -> Device:
        """A rank's, made when it is first looked at."""
        if rank not in self.devices:
            self.devices[rank] = Device(self.orders, rank, self.queues[rank], self.steps)
        return self.devices[rank]

    def width(self) -> int | None:
        """Over all devices, if that of the most loaded is known."""
        if self.spent:
            return None
        roomy = max((total for rank, total in self.sums.items() if rank not in self.widths), default=0)
        exact = max(self.widths.values(), default=0)
        return exact if exact >= roomy or len(self.widths) == len(self.sums) else None

    def verdict(self) -> tuple[str, Verdict, tuple[Hop, ...]]:
        """(rule, finding, ring)"""
        fine = Verdict(Class.NONE)
        rule = "one chain" if self.single else "budgets"
        narrow = [rank for rank, total in self.sums.items() if total > self.room[rank]]
        if not narrow:
            return rule, fine, ()
        try:
            for rank in narrow:
                self.widths[rank] = self.device(rank).width(self.sums[rank])
            tight = [rank for rank in narrow if self.widths[rank] > self.room[rank]]
            if not tight:
                single = all(self.device(rank).chain() for rank in self.sums)
                return "one chain" if single else "width", fine, ()
            ring = find_ring(self.orders, self.device, frozenset(tight), self.steps)
            solo = all(self.device(rank).solo(self.room[rank]) for rank in tight)
            hard = None
            if ring is not None and not solo:
                hard = find_ring(self.orders, self.device, frozenset(tight), self.steps, self.room)
        except Spent:
            self.spent = True
            why = f"{self.steps.budget} steps do not tell whether room for {_room(self.room)} is enough"
            return "", Verdict(Class.CYCLE, fix=FIX).undecided(why), ()
        if ring is None:
            return "ring", fine, ()
        told = hard if hard is not None and not hard.gated else ring
        loose = not solo and told is ring
        return "ring found", self._finding(told.hops, loose, told.gated), told.hops

    def _finding(self, hops: tuple[Hop, ...], loose: bool, gated: bool) -> Verdict:
        lines = tuple(hop.told(self.orders) for hop in hops)
        held = sorted({hop.rank for hop in hops if hop.reason == CHOICE})
        involved = tuple(sorted({hop.rank for hop in hops}))
        say = f"{ranks(involved).capitalize()} can keep each other from the device: {'; '.join(lines)}."
        found = Verdict(Class.CYCLE, ranks=involved, chain=lines, say=say, fix=FIX)
        room, need = self.room[held[0]], self.widths[held[0]]
        if loose:
            return found.undecided(
                f"{ranks(held)} has room for two of the kernels that nothing orders but not for all ({room} of {need}),"
                " which the rules do not decide"
            )
        if gated:
            return found.undecided("a rendezvous of the hosts may keep the kernels of the ring from meeting")
        return found.only_if(f"{ranks(held)} cannot hold these kernels at once (room {room}, unordered {need})")
