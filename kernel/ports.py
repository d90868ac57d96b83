"""What the kernel asks of a world: streams, collectives, a route, a rendezvous, a clock, a model. Protocols only.

Three worlds plug in here (simulated, CPU, CUDA); the kernel, the policies and the models are the same in all of them.
Tensors are opaque: the kernel passes them on and never looks inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager

    from kernel.program import Call
    from kernel.request import Phase, Row, Sampled
    from kernel.topology import Role

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Tensor = Any
"""Opaque to the kernel: torch.Tensor in the CPU and CUDA worlds, a size or None in the simulated one."""


class Event(Protocol[T_co]):
    """The completion of one piece of work on a stream."""

    def done(self) -> bool:
        """Whether the work has finished on the device. Never blocks."""

    async def wait(self) -> T_co:
        """Suspend the task (never the loop) until the work has finished; its value, or the exception it raised."""


class Stream(Protocol):
    """A FIFO of device work owned by one phase."""

    phase: Phase

    def submit(self, work: Callable[[], T], label: str) -> Event[T]:
        """Enqueue `work` behind everything submitted or reserved before; returns at once (the host enqueue).

        `work` runs host code that feeds the device: on a worker thread in the CPU world, in place in the others.
        An exception it raises is delivered by the event.
        """


class Route(Protocol):
    """P's way onto D's launch stream, for registered collectives only (paper section 4)."""

    def reserve(self, calls: Sequence[Call]) -> None:
        """Take one place in D's FIFO for each call, now: the order of the host enqueue is the order of the device."""

    def run(self, call: Call, work: Callable[[], T]) -> T:
        """Run `work` in the place reserved for `call`, with edges from and to P's stream. Called from P's work."""


class Collectives(Protocol):
    """The communicators of one phase, one for each canonical role. Blocking, in stream order, never from the loop."""

    def all_reduce(self, role: Role, x: Tensor) -> Tensor:
        """Sum over the group; same shape, and bitwise equal on all members."""

    def all_gather(self, role: Role, x: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the members' equal-shaped parts along `dim`, in group order."""

    def reduce_scatter(self, role: Role, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum over the group, then keep this member's rows; `sizes` are the members' row counts (may differ)."""

    def close(self) -> None:
        """Release buffers. Idempotent."""


class Layout(Protocol):
    """The few local row operations that collectives need around them. Rows are dimension 0."""

    def place(self, x: Tensor, start: int, total: int) -> Tensor:
        """Zeros of `total` rows with x at row `start`."""

    def take(self, x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """The rows [start, stop) of each range, concatenated."""


class Device(Protocol):
    """One rank's device: its two phase-owned streams, the route and the scope in which model code advances."""

    deferred: bool
    """Submitted work runs when the device reaches it (CPU); otherwise it only enqueues, and runs at submission."""

    @property
    def layout(self) -> Layout:
        """Local row operations on this device's tensors."""

    def stream(self, phase: Phase) -> Stream:
        """The stream that `phase` owns."""

    def route(self) -> Route:
        """P's places on D's launch stream."""

    def collectives(self, phase: Phase) -> Collectives:
        """The communicators that `phase` owns."""

    def scope(self, phase: Phase) -> AbstractContextManager[None]:
        """Inference mode, current stream and autocast, entered around every advance of model code."""

    async def close(self) -> None:
        """End the streams; work not yet started is dropped. Idempotent."""


class Rendezvous(Protocol):
    """An all-rank CPU control phase. It carries bytes and enqueues nothing on a device (paper section 4)."""

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """Wait until every rank has arrived with the same tag; all payloads in rank order (at most 4,000 bytes each).

        Raises Divergence when tags differ and RankLost when a peer ended. Suspends the task, never the loop.
        """

    def close(self) -> None:
        """Detach. Idempotent."""


class Clock(Protocol):
    """Time since an arbitrary start; virtual in the simulated world."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""


class Step(Protocol):
    """What one forward may do; `kernel.step.Step` implements it. See there."""

    phase: Phase

    @property
    def alone(self) -> bool: ...
    def boundary(self, layer: int) -> Any: ...
    def inner(self, layer: int) -> Any: ...
    def ready(self, handle: Event[T]) -> Any: ...
    def embed(self, partial: Tensor) -> Tensor: ...
    def gather(self, layer: int, partial: Tensor) -> Tensor: ...
    def own(self, full: Tensor) -> Tensor: ...
    def scatter(self, layer: int, partial: Tensor) -> Tensor: ...
    def head(self, shard: Tensor) -> Tensor: ...


class Model(Protocol):
    """A decoder whose weights, KV pool and slot table are this rank's shards."""

    layers: int

    def forward(self, step: Step, rows: Sequence[Row]) -> Coroutine[Any, Any, Sequence[Sampled | None]]:
        """One forward of `rows` (none on an idle rank), as an `async def` that a driver advances.

        It awaits only `step.boundary(i)` and `step.inner(i)` for i = 0 .. layers-1, and `step.ready(handle)`. Writes
        the fed tokens' KV into the rows' blocks, leaves each drawn token in the row's slot, and returns what it drew,
        row by row. Where
        work is only enqueued the numbers are there, and may be looked at, once the submission's event is done.
        """

    def reload(self, path: str) -> None:
        """Take the weights of another checkpoint of the same shape, in place. Only while nothing is in flight.

        Raises UsageError, with the old weights kept, where it does not fit.
        """
