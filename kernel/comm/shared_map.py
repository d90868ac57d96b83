"""Where everything lies in the shared memory of one world: offsets only, no memory. Pure.

    header      magic, version, shape, abort word, eventfd numbers
    status      one record a rank, and one for the launcher
    exchange    one arrival counter a rank; two slots a rank (`kernel.comm.rendezvous`)
    regions     for each phase, canonical role and group: a bell, one arrival counter and two headers a member, and two
                data slots a member (`kernel.comm.channel`)
    exchanges   three more of them, of all ranks, for the expert exchange: P's counts and rows, and D's rows

Memory that nobody touches costs nothing, so data slots can be generous.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kernel.request import Phase
from kernel.topology import Role, World

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = 4096
LINE: Final = 64
"""A cache line: counters that different ranks write share none with words that others poll."""
HEADER: Final = 128
"""Bytes that describe one step of one member: text, so that a mismatch can be quoted."""
SLOT: Final = 4160
"""Bytes of one exchange slot: 160 of header and tag, 4,000 of payload."""
STATUS: Final = 1024
"""Bytes of one status record: state, pid and two texts."""
ABORT_AT: Final = 64
FDS_AT: Final = 128


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass(frozen=True, slots=True)
class Region:
    """One communicator: offsets in bytes from the start of the arena.

    capacity: bytes of one data slot, a multiple of a page. kind: `counts` or `rows` of an expert exchange.
    """

    phase: Phase
    role: Role
    members: tuple[int, ...]
    capacity: int
    start: int
    kind: str = ""

    @property
    def bell(self) -> int:
        """The 32-bit word that members sleep on."""
        return self.start

    @property
    def arrivals(self) -> int:
        """One 64-bit counter a member, contiguous."""
        return self.start + LINE

    def headers(self, parity: int) -> int:
        """The headers of all members for steps of `parity`, contiguous."""
        return self.start + LINE + _up(8 * len(self.members), LINE) + parity * HEADER * len(self.members)

    def data(self, index: int, parity: int) -> int:
        """The data slot of member `index` for steps of `parity`."""
        return _up(self.headers(2), PAGE) + (2 * index + parity) * self.capacity

    @property
    def end(self) -> int:
        """The first byte behind it, a multiple of a page."""
        return self.data(len(self.members), 0)

    def __str__(self) -> str:
        role = f"expert {self.kind}" if self.kind else self.role
        return f"{role}{list(self.members)} of {self.phase}"


@dataclass(frozen=True)
class ArenaMap:
    """Offsets for a world of `size` ranks divided by `adp` and `ep`; capacity as in `Region`."""

    size: int
    adp: int
    ep: int
    capacity: int

    @property
    def status(self) -> int:
        """Status records of ranks 0 .. size-1, then the launcher's."""
        return _up(FDS_AT + 4 * self.size, PAGE)

    @property
    def exchange_arrivals(self) -> int:
        """One 64-bit counter a rank, contiguous."""
        return _up(self.status + STATUS * (self.size + 1), PAGE)

    def exchange_slot(self, rank: int, parity: int) -> int:
        """The slot of `rank` for exchanges of `parity`."""
        return _up(self.exchange_arrivals + 8 * self.size, PAGE) + (2 * rank + parity) * SLOT

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Every communicator of two or more members."""
        return tuple(self._regions())

    @property
    def total(self) -> int:
        """Bytes of the whole arena."""
        last = (*self.regions, *self.exchanges)[-1:]
        return last[0].end if last else self._regions_at

    @cached_property
    def exchanges(self) -> tuple[Region, ...]:
        """Those of the expert exchange, of all ranks: P's counts and rows, D's rows. None in a world of one rank."""
        if self.size == 1:
            return ()
        start, members, found = self.regions[-1].end, tuple(range(self.size)), []
        for phase, kind in ((Phase.P, "counts"), (Phase.P, "rows"), (Phase.D, "rows")):
            capacity = _up(8 * self.size, PAGE) if kind == "counts" else self.capacity
            found.append(Region(phase, Role.TP, members, capacity, start, kind))
            start = found[-1].end
        return tuple(found)

    @property
    def _regions_at(self) -> int:
        return _up(self.exchange_slot(self.size, 0), PAGE)

    def _regions(self) -> Iterator[Region]:
        world = World(self.size, self.adp, self.ep)
        start = self._regions_at
        for phase in Phase:
            for role in Role:
                if world.canonical(role) is not role:
                    continue
                for members in world.groups[role]:
                    if len(members) > 1:
                        region = Region(phase, role, members, self.capacity, start)
                        start = region.end
                        yield region
