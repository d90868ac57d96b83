"""P's expert exchange over any wire of host memory: counts first, then exactly the rows they promise (paper section 5).

Rows travel once to each rank that holds an expert of theirs. Results come back weighted and summed over that rank's
experts, and are added up at their source in order of ranks, so that they do not depend on timing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernel.comm.exchange.routing import Packing, at_home, bytes_of, destinations, presence, summed
from kernel.exchange.states import Normal, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.comm.exchange.wire import Matrix, Wire
    from kernel.exchange.shape import Shape
    from kernel.ports import Event, Received


class PendingDispatch:
    """`kernel.ports.Pending`: what one notification promised, and all that is needed to keep the promise.

    sources: which rows go where, in the form that the substrate needs.
    """

    __slots__ = ("event", "experts", "number", "place", "sources")

    def __init__(self, number: int, place: Place, experts: Tensor, sources: Tensor, event: Event[Matrix]) -> None:
        self.number, self.place, self.experts, self.sources, self.event = number, place, experts, sources, event


class Data:
    """What one submission moves: under way until `ends_behind`, and then until the device has come so far."""

    __slots__ = ("_ended", "_mark")

    def __init__(self) -> None:
        self._ended = False
        self._mark: Any = None

    def ends_behind(self, came: Tensor) -> None:
        """It has moved with what is enqueued on the stream of `came` by now; on the host, with this call."""
        if came.is_cuda:
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._mark.record(torch.cuda.current_stream(came.device))
        self._ended = True

    def done(self) -> bool:
        """Whether nothing of it is in flight here."""
        return self._ended and (self._mark is None or self._mark.query())


class NormalStates:
    """The part of `kernel.ports.NormalExchange` that keeps account of permits and of what was abandoned."""

    states: Normal
    _last: Any = None
    """The newest pending dispatch, of the substrate's own kind."""
    _data: Data | None = None
    """Of the newest submission."""

    def arriving(self, pending: Any) -> Sequence[int]:
        """See the port. The event's value is everybody's counts."""
        return [row[self.states.rank] for row in value_of(pending.event)]

    def permit(self, pending: PendingDispatch) -> None:
        """See the port."""
        self.states.permit(pending.number)

    def abandon(self, why: str) -> bool:
        """See the port."""
        return self.states.abandon(why)

    def quiesce(self) -> None:
        """See the port. What was notified of has arrived once its counts are there, and what was submitted once its
        data has moved."""
        counted, moved = (each is None or each.done() for each in (self._last and self._last.event, self._data))
        self.states.quiesce(counted=counted, moved=moved)
        self._last = self._data = None


class NormalOverWire(NormalStates):
    """`kernel.ports.NormalExchange` over `wire`. dtype: of the rows."""

    def __init__(self, shape: Shape, wire: Wire, dtype: torch.dtype) -> None:
        self._shape, self._wire, self._packing = shape, wire, Packing(shape, dtype)
        self.states = Normal(wire.rank, shape.prefill_rows)
        self._matrix: Matrix = ()

    def notify(self, place: Place, experts: Tensor) -> PendingDispatch:
        """See the port."""
        number = self.states.notify(place, experts.shape[0])
        present = presence(experts, self._shape)
        counts = present.sum(0).tolist()
        event = self._wire.announce(counts, f"notify of {place}")
        self._last = pending = PendingDispatch(number, place, experts, destinations(present), event)
        return pending

    def submit(self, pending: PendingDispatch, rows: Tensor, weights: Tensor) -> Received:
        """See the port."""
        self.states.submit(pending.number, counted=pending.event.done())
        self._matrix = value_of(pending.event)
        data = self._data = Data()
        packed = self._packing.pack(rows, pending.experts, weights).index_select(0, pending.sources)
        came = self._wire.move(packed, self._matrix, f"dispatch of {pending.place}")
        data.ends_behind(came)
        return at_home(*self._packing.unpack(came), self._shape, self._wire.rank)

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """See the port."""
        pending = self._last
        self.states.combine(place)
        assert pending is not None
        back = returned(self._wire, results, self._matrix, f"combine of {place}")
        return summed(back, pending.sources, pending.experts.shape[0])

    def close(self) -> None:
        """See the port."""
        self._wire.close()


def returned(wire: Wire, results: Tensor, matrix: Matrix, label: str) -> Tensor:
    """Results [received, hidden] back to where their rows came from: [sent, hidden]."""
    back = wire.move(bytes_of(results), [list(column) for column in zip(*matrix, strict=True)], label)
    return back.view(results.dtype)


def value_of(event: Any) -> Any:
    """What a completion that is done holds."""
    coroutine = event.wait()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("an event that is done suspended whoever asked for its value")
