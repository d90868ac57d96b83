"""A simulated world: ranks on deterministic loops, with simulated devices, in virtual time, in one thread.

The code under test is the production code; only the ports differ. `SimWorld.run` takes any program of n coroutines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kernel.errors import UsageError
from verify.sim.collectives import Communicators, Cost
from verify.sim.device import SimDevice
from verify.sim.errors import Deadlock
from verify.sim.exchange import SimExchange, Told
from verify.sim.kernels import Chip, Entry
from verify.sim.launches import Launches
from verify.sim.loop import RankLoop
from verify.sim.rendezvous import Hall, SimRendezvous, Skew
from verify.sim.scheduler import Choose, Scheduler
from verify.sim.stuck import examine

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterator

    from kernel.topology import World
    from verify.sim.trace import Trace

T = TypeVar("T")

WIDE = 1 << 30
"""A capacity that never blocks anything."""


class SimClock:
    """`kernel.ports.Clock` in virtual time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now_ns(self) -> int:
        """Virtual nanoseconds since the world began."""
        return self._scheduler.now_ns


@dataclass(frozen=True, slots=True)
class SimRank:
    """What one simulated rank is plugged into. log: its events, in order."""

    rank: int
    loop: RankLoop
    device: SimDevice
    rendezvous: SimRendezvous
    clock: SimClock
    log: list[Entry] = field(default_factory=list)


def free(op: str, members: int, rows: int) -> int:
    """Collectives that take no time."""
    return 0


class SimWorld:
    """n ranks that share a virtual clock.

    capacity: slots of each device (WIDE: residency never matters). weights: slots of one collective of (D, P).
    collective_ns: time of a collective once all members are resident. contention: see `verify.sim.kernels.Chip`.
    latency_ns: of a rendezvous. skew: how late ranks arrive at it. choose: picks among enabled actors (None: the
    first). log: whether events are logged; long studies save memory without. permute, patience_s, livelock: see
    `Scheduler`. trace: follows which step had to come before which. loop: of a rank. depth: of
    its launch queues, None for endless. graphs: each D iteration is one launch, see `verify.sim.launches`.
    A world runs once. Raises UsageError for a weight above the capacity.
    """

    def __init__(
        self,
        world: World,
        *,
        capacity: int = WIDE,
        weights: tuple[int, int] = (1, 1),
        collective_ns: Cost = free,
        contention: float = 0.0,
        latency_ns: int = 0,
        skew: Skew | None = None,
        choose: Choose | None = None,
        permute: bool = False,
        log: bool = True,
        patience_s: float = 600.0,
        livelock: int = 2_000_000,
        trace: Trace | None = None,
        loop: Callable[[int, Scheduler], RankLoop] = RankLoop,
        depth: int | None = None,
        graphs: bool = False,
    ) -> None:
        if depth is not None and depth < 1:
            raise UsageError(f"a launch queue of depth {depth}: at least one launch fits")
        if max(weights) > capacity:
            raise UsageError(f"a collective of {max(weights)} slots on a device of {capacity}: it could never start")
        self.world = world
        self.scheduler = scheduler = Scheduler(choose, permute, patience_s, livelock)
        scheduler.trace = trace
        self.hall = Hall(world.size, scheduler, latency_ns, skew)
        communicators = Communicators(world, scheduler, collective_ns)
        clock, told = SimClock(scheduler), Told()
        self.ranks: list[SimRank] = []
        for rank in range(world.size):
            lines: list[Entry] = []
            chip = Chip(rank, scheduler, capacity, contention, lines if log else None)
            chip.idle = self._look
            launches = Launches(rank, scheduler, depth) if depth is not None else None
            device = SimDevice(chip, communicators, weights, launches, graphs)
            if world.splits:
                device.expert_exchange = SimExchange(device, world.size, told)
            rendezvous = SimRendezvous(self.hall, rank, lines if log else None)
            own = loop(rank, scheduler)
            chip.launches = rendezvous.host = own.host = launches
            self.ranks.append(SimRank(rank, own, device, rendezvous, clock, lines))
        scheduler.witnesses += [self._device_waits, self.hall.waits]
        scheduler.stuck = self._stuck
        self._mains: list[asyncio.Task[Any]] = []
        self._unfinished = 0
        self._closing = False

    def run(self, main: Callable[[SimRank], Coroutine[Any, Any, T]]) -> list[T]:
        """Run `main(ports)` on every rank until all have returned and all devices are idle; the results in rank order.

        Raises the first exception of a rank (with a note that names it), Orphan for one that nobody received, Deadlock
        and Livelock.
        """
        if self._mains:
            raise RuntimeError("a simulated world runs once; make another one")
        for ports in self.ranks:
            task = ports.loop.create_task(main(ports), name="main")
            task.add_done_callback(self._ended)
            self._mains.append(task)
        self._unfinished = len(self._mains)
        try:
            self.scheduler.run()
            self._check_orphans()
            return [task.result() for task in self._mains]
        except Deadlock as error:
            error.standstill = examine(self, error.only_timers)
            raise
        finally:
            self._close()

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the world began."""
        return self.scheduler.now_ns

    def digest(self) -> str:
        """A hash of all logs: equal for equal runs, whatever the process."""
        return hashlib.blake2b(repr([ports.log for ports in self.ranks]).encode(), digest_size=16).hexdigest()

    # -- inside -------------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unfinished -= 1
        if task.cancelled() and not self._closing:
            self.scheduler.fail(f"rank {self._mains.index(task)}: its main task was cancelled by its own code", None)
        elif not task.cancelled():
            error = task.exception()
            if error is not None:
                error.add_note(f"raised on rank {self._mains.index(task)} at {self.now_ns / 1e6:.3f} ms")
                self.scheduler.failures.append(error)
        self._look()

    def _look(self) -> None:
        """The run is over once all ranks have returned and all devices are idle."""
        if not self._unfinished and not any(ports.device.busy for ports in self.ranks):
            self.scheduler.stop()

    def _stuck(self) -> bool:
        return bool(self.hall.open) or any(ports.device.busy for ports in self.ranks)

    def _device_waits(self) -> Iterator[str]:
        for ports in self.ranks:
            yield from ports.device.chip.waits()

    def _check_orphans(self) -> None:
        for ports in self.ranks:
            for task in ports.loop.unreceived():
                self.scheduler.fail(f"rank {ports.rank} task {task.get_name()!r} failed unseen", task.exception())
            for event in ports.device.failed:
                if not event.received:
                    self.scheduler.fail(f"rank {ports.rank} device work failed unseen ({event.name})", event.error)
            for call in ports.device.route().reserved:
                self.scheduler.fail(f"rank {ports.rank} reserved a place for {call} and never ran it", None)
        if self.scheduler.failures:
            raise self.scheduler.failures[0]

    def _close(self) -> None:
        """Cancel what is left, as asyncio.run does, and let it end quietly."""
        self._closing = True
        for ports in self.ranks:
            if ports.device.launches is not None:
                ports.device.launches.drop()
        for _ in range(3):
            left = [task for ports in self.ranks for task in ports.loop.pending()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.scheduler.drain(100_000)
        for ports in self.ranks:
            for task in ports.loop.unreceived():
                task.exception()
            for task in ports.loop.pending():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        for ports in self.ranks:
            ports.loop.close()
