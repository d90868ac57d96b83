"""What can be made to go wrong in a simulated world, as plain data: late ranks, lost ranks, other schedules.

run(scenario, choose=picks.choose(), skew=lateness, world=fault.world)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from kernel.errors import TurnstileError
from verify.sim.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.sim.rendezvous import SimRendezvous
    from verify.sim.scheduler import Actor, Choose


@dataclass(frozen=True, slots=True)
class Picks:
    """A schedule. picks: (number of the choice, index among its actors, modulo their number); else the oldest acts."""

    picks: tuple[tuple[int, int], ...] = ()

    def choose(self) -> Choose:
        """For one run, see `verify.sim.scheduler.Choose`."""
        wanted, made = dict(self.picks), 0

        def pick(options: Sequence[Actor]) -> int:
            nonlocal made
            index = wanted.get(made, 0) % len(options)
            made += 1
            return index

        return pick


@dataclass(frozen=True, slots=True)
class Lateness:
    """A `verify.sim.rendezvous.Skew`. late: (rank, number of its exchange, nanoseconds)."""

    late: tuple[tuple[int, int, int], ...] = ()

    def __call__(self, rank: int, number: int) -> int:
        return sum(ns for r, n, ns in self.late if (r, n) == (rank, number))


class Killed(TurnstileError):
    """A rank was made to die."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank is lost before its exchange `at`, counted from 0.

    kind: `dies` (it raises Killed, and its rendezvous is closed, as the engine does) or `stands` (it waits for ever).
    """

    kind: str
    rank: int
    at: int

    def world(self, *args: Any, **options: Any) -> SimWorld:
        """A simulated world with this fault; arguments of `verify.sim.world.SimWorld`."""
        made = SimWorld(*args, **options)
        ports = made.ranks[self.rank]
        broken = cast("SimRendezvous", _Broken(ports.rendezvous, self))
        made.ranks[self.rank] = replace(ports, rendezvous=broken)
        return made


class _Broken:
    """A rendezvous that its rank does not come back from."""

    def __init__(self, rendezvous: SimRendezvous, fault: Fault) -> None:
        self._rendezvous, self._fault, self._count = rendezvous, fault, 0

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """See the port."""
        fault, count = self._fault, self._count
        self._count += 1
        if count == fault.at and fault.kind == "stands":
            await asyncio.Event().wait()
        if count == fault.at:
            self.close()
            raise Killed(f"rank {fault.rank} was made to die before its exchange {count}")
        return await self._rendezvous.exchange(tag, payload)

    def close(self) -> None:
        """See the port."""
        self._rendezvous.close()
