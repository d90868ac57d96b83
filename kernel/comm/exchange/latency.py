"""D's expert exchange over any wire of host memory: a fixed number of rows a rank, and one step of the wire each way.

Every rank publishes its rows, padded with rows that chose nothing, and takes those of its experts out of everybody's.
From all ranks' chosen experts each knows how many results come from where, so nothing needs to be announced. Graphs are
a GPU's; their states are kept here as well, so that the same rules hold wherever a model runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kernel.comm.exchange.normal import returned
from kernel.comm.exchange.routing import Packing, at_home, destinations, presence, summed
from kernel.exchange.states import Hold, LowLatency, Place

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from kernel.comm.exchange.wire import Matrix, Wire
    from kernel.exchange.shape import Shape
    from kernel.ports import Received


class GraphStates:
    """The part of `kernel.ports.LowLatencyExchange` that keeps account of graphs, over `states`."""

    states: LowLatency

    @contextmanager
    def capture(self, name: str) -> Generator[Hold]:
        """See the port."""
        hold = self.states.capture(name)
        try:
            yield hold
        except BaseException:
            self.states.captured(hold, well=False)
            raise
        self.states.captured(hold)

    def replayed(self, hold: Hold) -> None:
        """See the port."""
        self.states.replay(hold)

    def dropped(self, hold: Hold) -> None:
        """See the port."""
        self.states.drop(hold)


class LatencyOverWire(GraphStates):
    """`kernel.ports.LowLatencyExchange` over `wire`, giving exactly the rows that came. dtype: of the rows."""

    def __init__(self, shape: Shape, wire: Wire, dtype: torch.dtype) -> None:
        self._shape, self._wire, self._packing = shape, wire, Packing(shape, dtype)
        self.states = LowLatency(wire.rank, shape.decode_rows)
        self._matrix: Matrix = ()
        self._sources: Tensor | None = None
        self._nobody: Tensor | None = None
        self._count = 0

    def dispatch(self, place: Place, rows: Tensor, experts: Tensor, weights: Tensor) -> Received:
        """See the port. Weights travel along, and results come back weighted."""
        self.states.dispatch(place, rows.shape[0])
        packing, shape, count = self._packing, self._shape, rows.shape[0]
        padded = self._padding().clone()
        padded[:count] = packing.pack(rows, experts, weights)
        everybody = self._wire.gather(padded, f"dispatch of {place.of_d}")
        all_rows, chosen, all_weights = packing.unpack(everybody.flatten(0, 1))
        present = presence(chosen, shape)
        self._matrix = present.view(shape.ranks, -1, shape.ranks).sum(1).tolist()
        self._sources, self._count = destinations(presence(experts, shape)), count
        mine = present[:, self._wire.rank].nonzero()[:, 0]
        return at_home(all_rows[mine], chosen[mine], all_weights[mine], shape, self._wire.rank)

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """See the port."""
        self.states.combine(place)
        assert self._sources is not None
        back = returned(self._wire, results, self._matrix, f"combine of {place.of_d}")
        return summed(back, self._sources, self._count)

    def close(self) -> None:
        """See the port."""
        self.states.close(aborts=True)
        self._wire.close()

    def _padding(self) -> Tensor:
        """Messages of rows that chose nothing."""
        if self._nobody is None:
            shape, most = self._shape, self._shape.decode_rows
            rows = torch.zeros((most, shape.hidden), dtype=self._packing.dtype)
            none = torch.full((most, shape.topk), -1)
            self._nobody = self._packing.pack(rows, none, none)
        return self._nobody
