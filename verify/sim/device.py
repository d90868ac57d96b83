"""`kernel.ports.Device` for one simulated rank: submitted work runs in place, which enqueues kernels; these take time.

As on CUDA, `submit` is the host enqueue and costs the host nothing; the event it returns is the last thing of that
work on the stream. A routed collective goes onto D's stream with an edge from what P has enqueued so far, and P's next
kernel waits for it.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kernel.errors import ModelError, OrderViolation, RankLost
from kernel.request import Phase
from verify.sim.collectives import Communicators, Shape
from verify.sim.kernels import Chip, Kernel, Queue
from verify.sim.launches import Launch, Launches
from verify.sim.waits import Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.ports import ExpertExchange, Layout
    from kernel.program import Call
    from kernel.topology import Role
    from verify.sim.scheduler import Scheduler

T = TypeVar("T")


class SimEvent(Generic[T]):
    """`kernel.ports.Event`: what one submission returned, once the device has finished all that it enqueued."""

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name, self._scheduler = name, scheduler
        self._ended: tuple[int, ...] = ()
        self.error: BaseException | None = None
        self.received = False
        self._value: T
        self._done = False
        self._waiters: list[Wait] = []

    def done(self) -> bool:
        """Whether the device has finished it: an answer that depends on time, and so on the schedule."""
        if self._scheduler.trace is not None:
            self._scheduler.trace.touch("done", self.name)
        return self._done

    async def wait(self) -> T:
        """Suspend the task until the device has finished it; its value, or the exception it raised."""
        trace = self._scheduler.trace
        if not self._done or (trace is not None and trace.split):
            waiter = Wait()
            waiter.what = self.name
            if self._done:
                waiter.causes = self._ended
                waiter.set_result(None)
            else:
                self._waiters.append(waiter)
            await waiter
        if self.error is not None:
            self.received = True
            raise self.error
        return self._value

    @property
    def known(self) -> bool:
        """As `done`, for whoever has waited for it: an answer that no schedule can change."""
        return self._done

    def returned(self, value: T) -> None:
        """The host has run the work."""
        self._value = value

    def finish(self, steps: tuple[int, ...] = ()) -> None:
        """The device has finished it, in these steps of a trace: wake who waits."""
        self._done, self._ended = True, steps
        if self._scheduler.trace is not None:
            self._scheduler.trace.touch("done", self.name)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.causes = steps
                waiter.set_result(None)
        self._waiters.clear()


class SimStream:
    """`kernel.ports.Stream` of one phase."""

    def __init__(self, device: SimDevice, phase: Phase) -> None:
        self._device, self.phase = device, phase

    def submit(self, work: Callable[[], T], label: str) -> SimEvent[T]:
        """Run `work` now; kernels that it enqueues go onto this stream."""
        return self._device.submit(self.phase, work, label)


class SimRoute:
    """`kernel.ports.Route`: P's collectives on D's stream. Reservation costs nothing here, but order is checked."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self.reserved: deque[Call] = deque()

    def reserve(self, calls: Sequence[Call]) -> None:
        """Note that these calls come next, in this order."""
        self.reserved.extend(calls)

    def run(self, call: Call, work: Callable[[], T]) -> T:
        """Run `work` with D's stream as its target. Raises OrderViolation unless `call` is the next one reserved."""
        if not self.reserved or self.reserved[0] != call:
            expected = self.reserved[0] if self.reserved else "nothing"
            raise OrderViolation(
                f"rank {self._device.rank} routes {call}, but {expected} is reserved next:"
                " reserve a segment's routed collectives in the order in which it runs them"
            )
        self.reserved.popleft()
        return self._device.routed(work)


class SimCollectives:
    """`kernel.ports.Collectives` of one phase. A tensor is its number of rows."""

    def __init__(self, device: SimDevice, phase: Phase) -> None:
        self._device, self._phase = device, phase

    def all_reduce(self, role: Role, x: int) -> int:
        """As many rows as before."""
        self._device.collective(self._phase, role, "all_reduce", (x,))
        return x

    def all_gather(self, role: Role, x: int, dim: int = 0) -> int:
        """The rows of all members, along dimension 0; as many as before along another."""
        members = self._device.collective(self._phase, role, "all_gather", (x,))
        return x * len(members) if dim == 0 else x

    def reduce_scatter(self, role: Role, x: int, sizes: Sequence[int]) -> int:
        """This member's share of the rows. Raises ModelError unless the sizes add up to x."""
        if sum(sizes) != x:
            raise ModelError(f"reduce_scatter over {role} splits {x} rows into {list(sizes)}: the sizes must add up")
        members = self._device.collective(self._phase, role, "reduce_scatter", tuple(sizes))
        return sizes[members.index(self._device.rank)]

    def close(self) -> None:
        """Nothing to release."""


class SimLayout:
    """`kernel.ports.Layout` on row counts."""

    def place(self, x: int, start: int, total: int) -> int:
        """`total` rows. Raises ModelError when x does not fit."""
        if start + x > total:
            raise ModelError(f"{x} rows at row {start} do not fit into {total}")
        return total

    def take(self, x: int, ranges: Sequence[tuple[int, int]]) -> int:
        """The rows of the ranges. Raises ModelError when they lie outside."""
        if any(not 0 <= start <= stop <= x for start, stop in ranges):
            raise ModelError(f"rows {list(ranges)} of a tensor of {x} rows")
        return sum(stop - start for start, stop in ranges)


class SimDevice:
    """`kernel.ports.Device` of one rank.

    chip: the hardware. communicators: of the whole world. weights: slots that a collective of each phase takes.
    launches: the bounded way of the host into the device; None: it never waits. graphs: each D iteration is one launch.
    """

    deferred = False

    def __init__(
        self,
        chip: Chip,
        communicators: Communicators,
        weights: tuple[int, int] = (1, 1),
        launches: Launches | None = None,
        graphs: bool = False,
    ) -> None:
        self.rank, self.chip = chip.rank, chip
        self.launches, self.graphs = launches, graphs
        self._graph: Launch | None = None
        self.layout: Layout = SimLayout()
        self.expert_exchange: ExpertExchange | None = None
        self._communicators = communicators
        self._weights = dict(zip((Phase.D, Phase.P), weights, strict=True))
        chip.width, chip.least = sum(weights), min(weights)
        self._streams = {phase: SimStream(self, phase) for phase in Phase}
        self._collectives = {phase: SimCollectives(self, phase) for phase in Phase}
        self._route = SimRoute(self)
        self._active: Phase | None = None
        self._target: Queue | None = None
        self._closed = False
        self._open: dict[Kernel, SimEvent[Any]] = {}
        self.failed: list[SimEvent[Any]] = []

    @property
    def busy(self) -> bool:
        """Whether anything enqueued has not finished."""
        return bool(self.chip.outstanding or self.launches)

    # -- the port -----------------------------------------------------------------------------------------------

    def stream(self, phase: Phase) -> SimStream:
        """The stream that `phase` owns."""
        return self._streams[phase]

    def route(self) -> SimRoute:
        """P's places on D's stream."""
        return self._route

    def collectives(self, phase: Phase) -> SimCollectives:
        """The communicators that `phase` owns."""
        return self._collectives[phase]

    def scope(self, phase: Phase) -> AbstractContextManager[None]:
        """Nothing to set."""
        return nullcontext()

    async def close(self) -> None:
        """Drop work that has not started; whoever waits for it gets RankLost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.chip.drop()
        if self.launches is not None:
            self.launches.drop()
        for kernel, event in list(self._open.items()):
            if kernel.dropped:
                del self._open[kernel]
                event.error, event.received = RankLost(f"rank {self.rank} closed its device before {event.name}"), True
                event.finish()

    # -- what streams and models do -----------------------------------------------------------------------------

    def submit(self, phase: Phase, work: Callable[[], T], label: str) -> SimEvent[T]:
        """See `SimStream.submit`. Raises OrderViolation where the CPU world would enqueue in another order."""
        if self._closed:
            raise RankLost(f"rank {self.rank} submitted {label} to a closed device")
        if self._active is not None:
            raise OrderViolation(f"rank {self.rank} submitted {label} from inside work of {self._active}")
        if phase is Phase.D and self._route.reserved:
            raise OrderViolation(
                f"rank {self.rank} launched {label} before {self._route.reserved[0]}, whose place was reserved earlier:"
                " D enters only when P's segment has been enqueued"
            )
        event: SimEvent[T] = SimEvent(f"{label} on stream {phase} of rank {self.rank}", self.chip.scheduler)
        queue = self.chip.queues[phase]
        self._touch(phase)
        self._active, self._target = phase, queue
        if self.launches is not None and self.graphs and phase is Phase.D:
            self._graph = Launch(queue)
        try:
            event.returned(work())
        except Exception as error:
            event.error = error
            self.failed.append(event)
        finally:
            self._active = self._target = None
            graph, self._graph = self._graph, None
        if graph is not None and graph.kernels and self.launches is not None:
            self.launches.add(graph)
        marker = Kernel(label, then=lambda: self._finished(marker))
        self._open[marker] = event
        self._put(queue, marker)
        return event

    def compute(self, label: str, duration_ns: int) -> Kernel:
        """Enqueue a compute kernel on the stream whose work is running; the kernel."""
        kernel = Kernel(label, duration_ns=duration_ns)
        self._put(self._queue("compute"), kernel)
        return kernel

    def collective(self, phase: Phase, role: Role, op: str, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Enqueue this rank's part of a collective; the group's members."""
        queue = self._queue(op)
        if phase is not self._active:
            raise OrderViolation(f"rank {self.rank} used the {role} communicator of {phase} in work of {self._active}")
        communicator = self._communicators.of(phase, role, self.rank)
        self._put(queue, communicator.kernel(self.rank, Shape(op, rows, queue.phase), self._weights[phase]))
        return communicator.members

    def marked(self, name: str) -> SimEvent[None]:
        """An event behind what has been enqueued on the stream whose work is running."""
        queue = self._queue("an event")
        event: SimEvent[None] = SimEvent(f"{name} on rank {self.rank}", self.chip.scheduler)
        event.returned(None)
        marker = Kernel(name, then=lambda: self._finished(marker))
        self._open[marker] = event
        self._put(queue, marker)
        return event

    def routed(self, work: Callable[[], T]) -> T:
        """Run `work` of P with D's stream as its target, with edges from and to P's stream."""
        if self._target is None or self._target.phase is not Phase.P:
            raise OrderViolation(f"rank {self.rank} routes a collective outside P's work")
        mine, theirs = self._target, self.chip.queues[Phase.D]
        self._touch(Phase.D)
        self._join(theirs, mine)
        self._target = theirs
        try:
            return work()
        finally:
            self._target = mine
            self._join(mine, theirs)

    # -- inside -------------------------------------------------------------------------------------------------

    def _put(self, queue: Queue, kernel: Kernel) -> None:
        kernel.queue = queue
        if self._graph is not None:
            self._graph.kernels.append(kernel)
        elif self.launches is None:
            queue.append(kernel)
        elif kernel.marker:
            self.launches.add(partial(queue.append, kernel))
        else:
            launch = Launch(queue)
            launch.kernels.append(kernel)
            self.launches.add(launch)

    def _join(self, later: Queue, earlier: Queue) -> None:
        """What comes next on `later` waits for what is on `earlier` now."""

        def join() -> None:
            later.edges += earlier.record()

        if self.launches is None:
            join()
        else:
            self.launches.add(join)

    def _touch(self, phase: Phase) -> None:
        """Order on a stream matters."""
        if self.chip.scheduler.trace is not None:
            self.chip.scheduler.trace.touch("stream", self.rank, str(phase))

    def _queue(self, what: str) -> Queue:
        if self._target is None:
            raise OrderViolation(f"rank {self.rank} called {what} outside work submitted to a stream")
        return self._target

    def _finished(self, marker: Kernel) -> None:
        self._open.pop(marker).finish(marker.ended)
