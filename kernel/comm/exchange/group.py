"""Expert exchange over a group that gathers and exchanges tensors in stream order: NCCL's, and a test's threads.

Nothing here waits for the device, but for P's counts, which a thread of their own waits for. P moves exactly the rows
that were notified of. D gathers a fixed number of rows of every rank and exchanges equal parts, so that it can be
captured in a graph: rows for other ranks' experts stay where they are and are nobody's there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from kernel.comm.exchange.latency import GraphStates
from kernel.comm.exchange.normal import Data, NormalStates, PendingDispatch, value_of
from kernel.comm.exchange.routing import Packing, at_home, presence
from kernel.errors import RankLost
from kernel.exchange.states import LowLatency, Normal, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kernel.comm.exchange.wire import Matrix
    from kernel.exchange.shape import Shape
    from kernel.ports import Event, Received


class Group(Protocol):
    """A communicator of one phase; what it does is enqueued on the current stream."""

    size: int
    index: int
    name: str

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """All members' x, one after the other, into `out`; both contiguous."""

    def all_to_all(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Parts of x along dimension 0 to each member; those of each member into `out`. No sizes: equal parts."""


class _OverGroup:
    """What both phases have. group: None once closed."""

    def __init__(self, shape: Shape, group: Group, dtype: torch.dtype) -> None:
        self._shape, self._packing = shape, Packing(shape, dtype)
        self._group: Group | None = group
        self._rank = group.index

    def _open(self, doing: str) -> Group:
        if self._group is None:
            raise RankLost(f"rank {self._rank} in {doing} was given up: its exchange was closed")
        return self._group


class NormalOverGroup(NormalStates, _OverGroup):
    """`kernel.ports.NormalExchange`. fetch: brings a small tensor to the host; its numbers when they are there."""

    def __init__(
        self, shape: Shape, group: Group, dtype: torch.dtype, fetch: Callable[[Tensor], Event[Matrix]]
    ) -> None:
        super().__init__(shape, group, dtype)
        self._fetch = fetch
        self.states = Normal(group.index, shape.prefill_rows)
        self._matrix: Matrix = ()

    def notify(self, place: Place, experts: Tensor) -> PendingDispatch:
        """See the port."""
        group = self._open(f"notify of {place}")
        number = self.states.notify(place, experts.shape[0])
        present = presence(experts, self._shape)
        counts = present.new_empty((group.size, group.size), dtype=torch.int64)
        group.all_gather(counts.view(-1), present.sum(0))
        self._last = pending = PendingDispatch(number, place, experts, present, self._fetch(counts))
        return pending

    def submit(self, pending: PendingDispatch, rows: Tensor, weights: Tensor) -> Received:
        """See the port."""
        self.states.submit(pending.number, counted=pending.event.done())
        self._matrix = value_of(pending.event)
        data = self._data = Data()
        # In order of destination, then of rows; the host knows how many there are.
        flags, count = pending.sources.t().reshape(-1), rows.shape[0]
        order = flags.to(torch.int8).argsort(descending=True, stable=True)[: sum(self._matrix[self._rank])]
        packed = self._packing.pack(rows, pending.experts, weights).index_select(0, order.remainder(max(1, count)))
        arrived = self._moved(packed, self._matrix, f"dispatch of {pending.place}")
        data.ends_behind(arrived)
        return at_home(*self._packing.unpack(arrived), self._shape, self._rank)

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """See the port. Sums are taken in order of ranks."""
        pending = self._last
        self.states.combine(place)
        assert pending is not None
        reverse = [list(column) for column in zip(*self._matrix, strict=True)]
        back = self._moved(results.contiguous(), reverse, f"combine of {place}")
        present = pending.sources
        total = torch.zeros((present.shape[0], results.shape[1]), dtype=torch.float32, device=results.device)
        if back.shape[0]:
            # Where each message lies among those that came back; of one that was never sent, anywhere.
            where = (present.t().reshape(-1).cumsum(0) - 1).clamp_(min=0).view(present.shape[1], -1)
            for rank in range(present.shape[1]):
                part = back.index_select(0, where[rank]).float()
                total += part.masked_fill_(~present[:, rank : rank + 1], 0)
        return total.to(results.dtype)

    def close(self) -> None:
        """See the port. The group is its owner's."""
        self._group = None

    def _moved(self, x: Tensor, matrix: Matrix, doing: str) -> Tensor:
        group, received = self._open(doing), [row[self._rank] for row in matrix]
        out = x.new_empty((sum(received), *x.shape[1:]))
        if any(map(sum, matrix)):
            group.all_to_all(out, x, received, matrix[self._rank])
        return out


class LatencyOverGroup(GraphStates, _OverGroup):
    """`kernel.ports.LowLatencyExchange` of fixed shapes. device: of the rows."""

    def __init__(self, shape: Shape, group: Group, dtype: torch.dtype, device: Any) -> None:
        super().__init__(shape, group, dtype)
        self.states = LowLatency(group.index, shape.decode_rows)
        none = torch.full((shape.decode_rows, shape.topk), -1, device=device)
        rows = torch.zeros((shape.decode_rows, shape.hidden), dtype=dtype, device=device)
        self._nobody = self._packing.pack(rows, none, none)
        """Messages of rows that chose nothing: they fill up the fixed number."""
        self._count = 0

    def dispatch(self, place: Place, rows: Tensor, experts: Tensor, weights: Tensor) -> Received:
        """See the port. Weights travel along."""
        group, self._count = self._open(f"dispatch of {place.of_d}"), rows.shape[0]
        self.states.dispatch(place, self._count)
        packed = torch.cat([self._packing.pack(rows, experts, weights), self._nobody[self._count :]])
        everybody = packed.new_empty((group.size * packed.shape[0], packed.shape[1]))
        group.all_gather(everybody.view(-1), packed.view(-1))
        return at_home(*self._packing.unpack(everybody), self._shape, self._rank)

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """See the port. Sums are taken in order of ranks."""
        group = self._open(f"combine of {place.of_d}")
        self.states.combine(place)
        back = torch.empty_like(results)
        group.all_to_all(back, results.contiguous(), (), ())
        parts = back.view(group.size, self._shape.decode_rows, -1)[:, : self._count]
        return parts.sum(0, dtype=torch.float32).to(results.dtype)

    def close(self) -> None:
        """See the port. The group is its owner's."""
        self.states.close(aborts=True)
        self._group = None
