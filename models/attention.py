"""Attention over a paged KV pool: where a forward's tokens live in it, and attention of its rows over their blocks.

Pool layout, for each layer: [blocks, 2, kv_heads, block_size, head_dim], keys then values. A block is contiguous (it
can be copied whole), and a gather of (block, head) units yields keys and values that need no further copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import ints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.request import Row
    from models.attention_kept import Lanes

Numbers = TypeVar("Numbers", int, Any)
"""A number, or an array of them."""


class KVPool:
    """Keys and values of all layers. kv_heads: this rank's."""

    def __init__(
        self, layers: int, blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (layers, blocks, 2, kv_heads, block_size, head_dim)
        # Zeros, not empty: a masked token weighs 0, and 0 times a NaN left in memory would be NaN.
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size, self.kv_heads, self.head_dim = block_size, kv_heads, head_dim
        self._cells = tuple(layer.view(-1, head_dim) for layer in self.storage)
        self._units = tuple(layer.view(-1, block_size * head_dim) for layer in self.storage)
        heads = torch.arange(2 * kv_heads, device=device)
        self._cell_heads, self._unit_heads = heads * block_size, heads.view(2, 1, kv_heads, 1)
        self._seen, self._hidden = self.storage.new_zeros(()), self.storage.new_full((), float("-inf"))

    @property
    def keys(self) -> Tensor:
        """[layers, blocks, block_size, kv_heads, head_dim], a view."""
        return self.storage[:, :, 0].transpose(2, 3)

    @property
    def values(self) -> Tensor:
        """[layers, blocks, block_size, kv_heads, head_dim], a view."""
        return self.storage[:, :, 1].transpose(2, 3)

    def place(self, block: Numbers, position: Numbers) -> Numbers:
        """Where the token at `position`, in `block`, keeps its first key; of arrays, element by element."""
        return block * (2 * self.kv_heads * self.block_size) + position % self.block_size

    def cells(self, places: Tensor) -> Tensor:
        """Index of the K keys and K values of tokens at `places` [n]: [n * 2K]."""
        return (places.unsqueeze(-1) + self._cell_heads).flatten()

    def units(self, tables: Tensor) -> Tensor:
        """Index of all that `read` reads for block tables [rows, depth]: [2 * rows * K * depth]."""
        return (tables.unsqueeze(1) * (2 * self.kv_heads) + self._unit_heads).flatten()

    def mask(self, positions: Tensor, depth: int) -> Tensor:
        """0 up to each of `positions` [..., 1] and -inf past it, over `depth` blocks: [..., tokens].

        It is added to scores: a boolean mask would be converted in every layer.
        """
        reach = torch.arange(depth * self.block_size, device=positions.device)
        return torch.where(reach > positions, self._hidden, self._seen)

    def write(self, layer: int, cells: Tensor, kv: Tensor) -> None:
        """Keep kv [n, 2K, head_dim] (keys, then values) at `cells`."""
        self._cells[layer].index_copy_(0, cells, kv.flatten(0, 1))

    def read(self, layer: int, units: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values at `units`: each [rows, K, tokens, head_dim]."""
        found = self._units[layer].index_select(0, units)
        keys, values = found.view(2, rows, self.kv_heads, -1, self.head_dim).unbind(0)
        return keys, values


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
