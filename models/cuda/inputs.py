"""Inputs of forwards on a device: everything a forward needs in one asynchronous copy, results in another; no waits.

Works on a CPU device too, where nothing is asynchronous; so what is testable of it is tested there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernel.request import Phase
from models.attention.reference import Batch, Fixed, attend
from models.cuda.drawn import Drawn, Outbox
from models.cuda.sampling import DrawRows, Way, columns, draw, way
from models.cuda.staging import Parcel, Ring
from models.cuda.tables import BlockTables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.request import Row
    from models.attention.flashinfer import DecodePlan, FlashAttention, Paged
    from models.attention.pool import KVPool


class DeviceSource:
    """`models.inputs.Source` on a device. slots: the slot table, its last row for padding. flash: FlashInfer, or None
    for the reference attention.
    """

    def __init__(self, pool: KVPool, slots: Tensor, vocab: int, flash: FlashAttention | None = None) -> None:
        self.pool, self.slots, self.vocab, self.flash = pool, slots, vocab, flash
        self.tables = {phase: BlockTables() for phase in Phase}
        device = slots.device
        self.rings = {phase: Ring(device) for phase in Phase}
        self.outbox = Outbox(device, slots.shape[0])

    def begin(self, phase: Phase, rows: Sequence[Row]) -> DeviceInputs:
        """See `models.inputs.Source`."""
        return DeviceInputs(self, phase, rows)


class DeviceInputs:
    """`models.inputs.Inputs` of one eager forward."""

    def __init__(self, source: DeviceSource, phase: Phase, rows: Sequence[Row]) -> None:
        self._source, self._rows = source, rows
        pool, size = source.pool, source.pool.block_size
        fed = [row.fed for row in rows]
        first = list(accumulate(fed, initial=0))
        self.tokens = n = first.pop()
        drawing = [row for row in rows if row.sample is not None]
        self._asked = [row.sample is not None for row in rows]
        params = [row.sample for row in drawing if row.sample is not None]
        self._way = way(params)
        self._all_last = len(drawing) == n
        self._kept = sum(row.tokens is None for row in rows)
        parcel = source.rings[phase].take()
        parcel.put("slots", [row.slot for row in drawing], np.int64)
        ends = [at + row.fed - 1 for at, row in zip(first, rows, strict=True) if row.sample is not None]
        parcel.put("pick", ends, np.int64)
        if self._kept:
            parcel.put("from", [row.slot for row in rows for _ in range(row.fed)], np.int64)
        if self._kept < n or not n:
            parcel.put("ids", [token for row in rows for token in (row.tokens or (-1,))], np.int64)
        for name, values in columns(params, [row.start + row.fed for row in drawing], source.vocab).items():
            parcel.put(name, values, values.dtype)
        self._batch: Batch | None = None
        self._paged: Paged | None = None
        flash = source.flash
        if flash is None:
            self._tensors = parcel.ship()
            batch = self._batch = Batch(rows, pool, lambda values: _sent(parcel, values))
            self.positions, self.cells = batch.positions, batch.cells
        else:
            blocks, positions = source.tables[phase].fed(rows, size)
            parcel.put("positions", positions, np.int64)
            parcel.put("places", pool.place(blocks, positions), np.int64)
            flash.stage(parcel, rows)
            self._tensors = parcel.ship()
            self.positions = self._tensors["positions"].view(-1, 1, 1)
            self.cells = pool.cells(self._tensors["places"])
            if n:
                self._paged = flash.plan(phase, parcel, fed)
        parcel.close()

    def ids(self) -> Tensor:
        """See `models.inputs.Inputs`."""
        given = self._tensors.get("ids")
        if not self._kept:
            assert given is not None
            return given
        kept = self._source.slots.index_select(0, self._tensors["from"])
        return kept if given is None else torch.where(given < 0, kept, given)

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `models.inputs.Inputs`."""
        if self._batch is not None:
            return attend(q, kv, self._source.pool, layer, self._batch)
        if self._paged is None:
            return q.reshape(0, q.shape[1] * q.shape[2])
        return self._paged.attend(layer, q)

    def pick(self, hidden: Tensor) -> Tensor:
        """See `models.inputs.Inputs`."""
        return hidden if self._all_last else hidden.index_select(0, self._tensors["pick"])

    def draw(self, logits: Tensor) -> Drawn:
        """See `models.inputs.Inputs`."""
        source = self._source
        if not any(self._asked):
            return source.outbox.post(None, self._asked)
        drawn = draw(logits, DrawRows.of(self._tensors), self._way)
        source.slots.index_copy_(0, self._tensors["slots"], drawn[:, 0])
        return source.outbox.post(drawn, self._asked)


def _sent(parcel: Parcel, values: list[int]) -> Tensor:
    parcel.put("batch", values, np.int64)
    return parcel.ship()["batch"]


class StaticInputs:
    """Inputs of D iterations of up to `bucket` rows at fixed addresses, for a captured graph to read.

    Rows past the live ones feed the scratch slot's token at the beginning of the scratch block, whose KV nobody reads,
    and draw into the scratch slot. depth: the most blocks of one row that the reference attention reads.
    """

    def __init__(self, source: DeviceSource, bucket: int, depth: int, scratch_block: int) -> None:
        self._source, self.tokens, self._depth = source, bucket, depth
        self._block, self._slot = scratch_block, source.slots.shape[0] - 1
        pool, device = source.pool, source.slots.device
        # Live rows own their blocks, so there are never more pages than the pool has, and one for each row of padding.
        self.pages = pool.storage.shape[1] + bucket
        parcel = Parcel(Ring(device, 1 << 20, 1), 0)
        self._put(parcel, (), full=True)
        self._places = parcel.places()
        self._bytes = torch.zeros(parcel.used, dtype=torch.uint8, device=device)
        tensors = {name: self._bytes[start:stop].view(kind) for name, (start, stop, kind) in self._places.items()}
        self._tensors, self._rows = tensors, DrawRows.of(tensors)
        self._fixed: Fixed | None = None
        self._plan: DecodePlan | None = None
        if source.flash is not None:
            self._plan = source.flash.graph(tensors["kv"], tensors["pages"], tensors["last"])
        self.positions = tensors["positions"].view(-1, 1, 1)
        self.cells = pool.cells(tensors["places"])

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether a graph over these inputs can run `rows`: each feeds its slot's token and draws."""
        size, pool = self._source.pool.block_size, self._source.pool.storage.shape[1]
        if len(rows) > self.tokens or any(row.tokens is not None or row.sample is None for row in rows):
            return False
        if self._plan is not None:
            return sum(row.start // size + 1 for row in rows) <= pool
        return all(row.start // size < self._depth for row in rows)

    def fill(self, rows: Sequence[Row]) -> Way:
        """Enqueue the copy of the rows into place and plan for them; how they are drawn."""
        parcel = self._source.rings[Phase.D].take()
        how = self._put(parcel, rows)
        # All but the pages, which come last, must lie where the graph reads them.
        assert all(parcel.places()[name] == place for name, place in self._places.items() if name != "pages")
        parcel.ship(self._bytes)
        if self._plan is not None:
            self._plan.plan(parcel)
        parcel.close()
        return how

    def open(self) -> None:
        """Compute what the layers share from the inputs in place: the beginning of the captured work."""
        pool, tensors = self._source.pool, self._tensors
        self.cells = pool.cells(tensors["places"])
        if self._plan is None:
            tables = tensors["tables"].view(self.tokens, self._depth)
            self._fixed = Fixed(tensors["positions"], tensors["places"], tables, pool)

    def ids(self) -> Tensor:
        """See `models.inputs.Inputs`."""
        return self._source.slots.index_select(0, self._tensors["slots"])

    @property
    def padding(self) -> Tensor:
        """Which rows are not live: bool [bucket]. Live rows own a slot, the others share the scratch slot."""
        return self._tensors["slots"] == self._slot

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `models.inputs.Inputs`."""
        if self._plan is not None:
            return self._plan.attend(layer, q)
        assert self._fixed is not None
        return attend(q, kv, self._source.pool, layer, self._fixed)

    def pick(self, hidden: Tensor) -> Tensor:
        """See `models.inputs.Inputs`."""
        return hidden

    def draw_all(self, logits: Tensor, how: Way) -> Tensor:
        """Draw for every row, padding too, and keep the draws in the slots. Returns as `models.cuda.sampling.draw`."""
        drawn = draw(logits, self._rows, how)
        self._source.slots.index_copy_(0, self._tensors["slots"], drawn[:, 0])
        return drawn

    def draw(self, logits: Tensor) -> Drawn:
        """See `models.inputs.Inputs`; for all rows, in the most general way."""
        return self._source.outbox.post(self.draw_all(logits, Way.TRUNCATED), [True] * self.tokens)

    def _put(self, parcel: Parcel, rows: Sequence[Row], full: bool = False) -> Way:
        """Every array in one order, pages last. full: with as many pages as there can be."""
        source, bucket, scratch = self._source, self.tokens, self._block
        pool, size, spare = source.pool, source.pool.block_size, self.tokens - len(rows)
        starts = [row.start for row in rows]
        params = [row.sample for row in rows if row.sample is not None]
        parcel.put("slots", [row.slot for row in rows] + [self._slot] * spare, np.int64)
        parcel.put("positions", starts + [0] * spare, np.int64)
        places = [pool.place(row.blocks[row.start // size], row.start) for row in rows]
        parcel.put("places", places + [pool.place(scratch, 0)] * spare, np.int64)
        for name, values in columns(params, [start + 1 for start in starts], source.vocab, bucket).items():
            parcel.put(name, values, values.dtype)
        if source.flash is None:
            tables = np.full((bucket, self._depth), scratch, np.int64)
            for number, row in enumerate(rows):
                deep = row.start // size + 1
                tables[number, :deep] = row.blocks[:deep]
            parcel.put("tables", tables, np.int64)
            return way(params)
        depths = [start // size + 1 for start in starts]
        parcel.put("kv", list(accumulate(depths + [1] * spare, initial=0)), np.int32)
        parcel.put("last", [start % size + 1 for start in starts] + [1] * spare, np.int32)
        if full:
            parcel.put("pages", np.full(self.pages, scratch, np.int32), np.int32)
        else:
            parcel.put("pages", source.tables[Phase.D].pages(rows, depths, [scratch] * spare), np.int32)
        return way(params)
