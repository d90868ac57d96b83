"""What the kernel asks of a world: streams, collectives, an expert exchange, a rendezvous, a model. Protocols only.

Three worlds plug in here (simulated, CPU, CUDA); the kernel, the policies and the models are the same in all of them.
Tensors are opaque: the kernel passes them on and never looks inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager

    from kernel.exchange.states import Place
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


class Received(NamedTuple):
    """Rows that peers sent to this rank's experts.

    rows: [m, hidden]. experts: [m, k] int64, this rank's experts 0 .. local-1 that the row is for, -1 for none.
    weights: [m, k], of the row's result from each (undefined where experts is -1).
    P has exactly m rows, one for each row of a peer that chose an expert here, in order of peers and of their rows,
    with k = top-k. D's are as the substrate likes: like P's, or one for each (row, expert) pair with k = 1 and weights
    of 1 (then `combine` weights them at their source); padding, where shapes are fixed, has experts -1.
    grouped: such pairs lie in equal parts, one for each expert in order, with whatever was in memory behind the last.
    """

    rows: Tensor
    experts: Tensor
    weights: Tensor
    grouped: bool = False


class Pending(Protocol):
    """A P dispatch between its notification and its data."""

    @property
    def event(self) -> Event[Any]:
        """Done when the counts of all peers are here; await it through `step.ready`. Raises what went wrong.

        Its value is the substrate's own, which `NormalExchange.arriving` reads.
        """


class NormalExchange(Protocol):
    """P's expert exchange: exact sizes, split behind its notification. The states are `kernel.exchange.states.Normal`.

    All but `abandon`, `quiesce` and `close` are called from P's work, in stream order. All peers call alike, with no
    rows too. A row's experts are distinct, or -1 for none (a padding row, or part of an idle rank, has -1 only).
    """

    def notify(self, place: Place, experts: Tensor) -> Pending:
        """Tell peers how many rows will come; blocks neither loop nor stream, nor holds the interpreter's lock.

        experts: [n, k] int64, global. Raises DispatchPending, BufferRetired, RowLimit.
        """

    def arriving(self, pending: Any) -> Sequence[int]:
        """Rows that will come here from each rank; for a pending dispatch whose counts are here, and are told."""

    def permit(self, pending: Any) -> None:
        """The turnstile lets P pass the boundary behind this notification; `kernel.step` calls it there.

        pending: what `notify` returned.
        """

    def submit(self, pending: Any, rows: Tensor, weights: Tensor) -> Received:
        """Move the data: rows [n, hidden], weights [n, k]. Raises NotNotified, NotPermitted, BufferRetired."""

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """Return the results of `submit`'s rows, weighted and summed over local experts; own rows' sums [n, hidden].

        Raises NotDispatched, BufferRetired.
        """

    def abandon(self, why: str) -> bool:
        """Give up what is pending: the buffer is retired. Whether it is retired now."""

    def quiesce(self) -> None:
        """A point that the plan fixes for all ranks, with no P in flight: a retired buffer may be used again.

        Raises NotQuiescent.
        """

    def close(self) -> None:
        """Make calls in progress, and later ones, raise RankLost, and let go of the buffer. Idempotent."""


class LowLatencyExchange(Protocol):
    """D's expert exchange: a fixed number of rows a rank, no host wait. See `kernel.exchange.states.LowLatency`."""

    def dispatch(self, place: Place, rows: Tensor, experts: Tensor, weights: Tensor) -> Received:
        """Send rows [n, hidden] to their experts [n, k] (-1 for none), n at most the fixed number.

        weights [n, k] stay here, for `combine`. Raises DispatchPending, RowLimit, OddGraph after half a capture.
        """

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """Return the results of `dispatch`'s rows at the same place; own rows' weighted sums [n, hidden].

        Raises NotDispatched.
        """

    def capture(self, name: str) -> AbstractContextManager[Any]:
        """Around a graph's capture: gives the hold, which `replayed` and `dropped` name. Raises OddGraph at its end."""

    def replayed(self, hold: Any) -> None:
        """A captured graph is launched next; not when this raises OddGraph or StillHeld."""

    def dropped(self, hold: Any) -> None:
        """A captured graph is gone. Idempotent."""

    def close(self) -> None:
        """As P's. Raises StillHeld while a graph is captured or holds pointers into the buffer; DispatchPending where
        the buffer's memory would go from under a dispatch. Idempotent."""


class ExpertExchange(Protocol):
    """Both phases' exchanges of one rank. They share initialisation and topology, and nothing that a kernel changes."""

    @property
    def normal(self) -> NormalExchange:
        """P's."""

    @property
    def low_latency(self) -> LowLatencyExchange:
        """D's."""

    def close(self) -> None:
        """Close both, then what they share. Raises StillHeld. Idempotent."""


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

    @property
    def expert_exchange(self) -> ExpertExchange | None:
        """The expert exchange; None where experts are reached by collectives. Owned, closed with the device."""

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
    @property
    def exchanges(self) -> bool: ...
    def boundary(self, layer: int) -> Any: ...
    def inner(self, layer: int) -> Any: ...
    def ready(self, handle: Event[T]) -> Any: ...
    def embed(self, partial: Tensor) -> Tensor: ...
    def gather(self, layer: int, partial: Tensor) -> Tensor: ...
    def own(self, full: Tensor) -> Tensor: ...
    def scatter(self, layer: int, partial: Tensor) -> Tensor: ...
    def share(self, layer: int, partial: Tensor) -> Tensor: ...
    def part(self, own: Tensor) -> Tensor: ...
    def notify(self, layer: int, experts: Tensor) -> None: ...
    def notified(self, layer: int) -> Any: ...
    def dispatch(self, layer: int, rows: Tensor, weights: Tensor) -> Received: ...
    def combine(self, layer: int, results: Tensor) -> Tensor: ...
    def join(self, layer: int, share: Tensor) -> Tensor: ...
    def head(self, shard: Tensor) -> Tensor: ...
    def capturing(self, name: str) -> AbstractContextManager[Any]: ...
    def replayed(self, hold: Any = None) -> None: ...
    def dropped(self, hold: Any) -> None: ...


class Model(Protocol):
    """A decoder whose weights, KV pool and slot table are this rank's shards."""

    layers: int

    def forward(self, step: Step, rows: Sequence[Row]) -> Coroutine[Any, Any, Sequence[Sampled | None]]:
        """One forward of `rows` (none on an idle rank), as an `async def` that a driver advances.

        It awaits only `step.boundary(i)`, `step.notified(i)` and `step.inner(i)` for i = 0 .. layers-1, and
        `step.ready(handle)`. Writes the fed tokens' KV into the rows' blocks, leaves each drawn token in the row's
        slot, and returns what it drew, row by row. Where work is only enqueued the numbers are there, and may be looked
        at, once the submission's event is done.
        """

    def reload(self, path: str) -> None:
        """Take the weights of another checkpoint of the same shape, in place. Only while nothing is in flight.

        Raises UsageError, with the old weights kept, where it does not fit.
        """
