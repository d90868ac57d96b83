"""Attention over the paged KV pool: where a forward's tokens lie in it, and attention of its rows over their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import ints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.request import Row
    from models.attention.lanes import Lanes
    from models.attention.pool import KVPool

@dataclass(frozen=True, slots=True)
class Span:
    """The fed tokens [start, stop) of one row that feeds several.

    units, mask [fed, tokens]: what it reads from the pool; None where it begins its context and needs only itself.
    """

    start: int
    stop: int
    units: Tensor | None
    mask: Tensor | None


class Batch:
    """What all layers of one forward need to know of its rows, computed once.

    tokens: fed tokens n. first: index of each row's first fed token. slots: of each row. positions: [n, 1, 1]. cells:
    where the fed tokens go. single: every row feeds one token. Such rows are attended in one piece, padded to the
    longest one's blocks (units, mask); others one by one (spans). send: brings integers to the device. lanes: where
    such rows are kept side by side; then nothing is read from the pool but what is not there yet.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        pool: KVPool,
        send: Callable[[list[int]], Tensor] | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self.lanes = lanes
        size, device = pool.block_size, str(pool.storage.device)
        fed = [row.fed for row in rows]
        self.first = list(accumulate(fed, initial=0))
        self.tokens = n = self.first.pop()
        self.single = n == len(rows)
        if self.single:
            positions = [row.start for row in rows]
            places = [pool.place(row.blocks[row.start // size], row.start) for row in rows]
        else:
            positions = [at for row, count in zip(rows, fed, strict=True) for at in range(row.start, row.start + count)]
            places = [
                pool.place(row.blocks[at // size], at)
                for row, count in zip(rows, fed, strict=True)
                for at in range(row.start, row.start + count)
            ]
        deep = depth = max(positions, default=-1) // size + 1
        if lanes is not None and not lanes.gather:
            depth = 0  # no table is read
        tables = chain.from_iterable(row.blocks[:depth] + (0,) * (depth - len(row.blocks)) for row in rows)
        # One transfer to the device for all of it.
        sizes = (n, n, len(rows), len(rows) * depth)
        numbers_ = [*positions, *places, *(row.slot for row in rows), *tables]
        numbers = ints(numbers_, device) if send is None else send(numbers_)
        at, places_, self.slots, table = numbers.split_with_sizes(sizes)
        self.positions = at.view(-1, 1, 1)
        self.cells = pool.cells(places_)
        table = table.view(len(rows), depth)
        self.spans = []
        if self.single:
            self.units = pool.units(table)
            self.mask = pool.mask(self.positions.unsqueeze(1), deep)
            return
        for number, (row, start) in enumerate(zip(rows, self.first, strict=True)):
            stop, units, mask = start + row.fed, None, None
            if row.start:
                deep = (row.start + row.fed - 1) // size + 1
                units = pool.units(table[number : number + 1, :deep])
                mask = pool.mask(at[start:stop].unsqueeze(-1), deep)
            self.spans.append(Span(start, stop, units, mask))


class Fixed:
    """A `Batch` of single tokens made of device tensors alone, so that a captured graph can hold it.

    positions, places: [n] int64. tables: [n, depth] int64, the blocks that each row reads; past its context, anything.
    """

    single = True
    spans: Sequence[Span] = ()
    lanes = None

    def __init__(self, positions: Tensor, places: Tensor, tables: Tensor, pool: KVPool) -> None:
        self.tokens = positions.shape[0]
        self.positions = positions.view(-1, 1, 1)
        self.cells = pool.cells(places)
        self.units = pool.units(tables)
        self.mask = pool.mask(self.positions.unsqueeze(1), tables.shape[1])


def attend(q: Tensor, kv: Tensor, pool: KVPool, layer: int, batch: Batch | Fixed) -> Tensor:
    """Attention of the fed tokens over their rows' contexts, which the pool already holds.

    q: [n, Q, head_dim]. kv: [n, 2K, head_dim], the fed tokens' own keys and values. Returns [n, Q * head_dim].
    In one piece, query heads of one KV head are attended as if they were successive queries: one token a row wastes
    nothing by it, and keys are read once.
    """
    n, heads, dim = q.shape
    k = pool.kv_heads
    if n == 0:
        return q.reshape(0, heads * dim)
    if batch.single:
        keys, values = _contexts(kv, pool, layer, batch)
        grouped = q.reshape(n, k, heads // k, dim)
        return F.scaled_dot_product_attention(grouped, keys, values, batch.mask).reshape(n, heads * dim)
    parts = []
    for span in batch.spans:
        query = q[span.start : span.stop].transpose(0, 1).unsqueeze(0)
        if span.units is None:
            own = kv[span.start : span.stop].transpose(0, 1).unsqueeze(0)
            keys, values = own[:, :k], own[:, k:]
        else:
            keys, values = pool.read(layer, span.units, 1)
        out = F.scaled_dot_product_attention(
            query, keys, values, span.mask, is_causal=span.mask is None, enable_gqa=heads != k
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts).view(n, heads * dim)


def _contexts(kv: Tensor, pool: KVPool, layer: int, batch: Batch | Fixed) -> tuple[Tensor, Tensor]:
    """Keys and values of rows of one fed token each: each [n, K, tokens, head_dim]."""
    lanes = batch.lanes
    if lanes is None:
        return pool.read(layer, batch.units, batch.tokens)
    if lanes.gather:
        lanes.take(layer, *pool.read(layer, batch.units, batch.tokens))
    return lanes.add(layer, kv)
