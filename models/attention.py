"""Attention over a paged KV pool: where a forward's tokens live in it, and attention of its rows over their blocks.

Pool layout, for each layer: [blocks, 2, kv_heads, block_size, head_dim], keys then values. A block is contiguous (it can
be copied whole), and a gather of (block, head) units yields keys and values that need no further copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel.request import Row


class KVPool:
    """Keys and values of all layers. kv_heads: this rank's."""

    def __init__(
        self, layers: int, blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (layers, blocks, 2, kv_heads, block_size, head_dim)
        # Zeros, not empty: a masked token weighs 0, and 0 times a NaN left in memory would be NaN.
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size, self.kv_heads = block_size, kv_heads
        self.cells = tuple(layer.view(-1, head_dim) for layer in self.storage)
        """For each layer, one row a (block, key or value, head, place)."""
        self.units = tuple(layer.view(-1, block_size * head_dim) for layer in self.storage)
        """For each layer, one row a (block, key or value, head)."""
        heads = torch.arange(2 * kv_heads, device=device)
        self._cell_offsets = heads * block_size
        self._unit_offsets = heads.view(2, 1, kv_heads, 1)

    @property
    def keys(self) -> Tensor:
        """[layers, blocks, block_size, kv_heads, head_dim], a view."""
        return self.storage[:, :, 0].transpose(2, 3)

    @property
    def values(self) -> Tensor:
        """[layers, blocks, block_size, kv_heads, head_dim], a view."""
        return self.storage[:, :, 1].transpose(2, 3)

    def cell_index(self, blocks: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Where token i, at `positions[i]` in block `blocks[i]`, keeps its K keys and K values: [n * 2K]."""
        size, stride = self.block_size, 2 * self.kv_heads * self.block_size
        first = [block * stride + position % size for block, position in zip(blocks, positions, strict=True)]
        base = torch.tensor(first, dtype=torch.int64, device=self.storage.device)
        return (base.unsqueeze(-1) + self._cell_offsets).flatten()

    def unit_index(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """Units of rows with equally long block tables: [2 * rows * K * blocks], in that order."""
        table = torch.tensor(tables, dtype=torch.int64, device=self.storage.device) * (2 * self.kv_heads)
        return (table.unsqueeze(1).unsqueeze(0) + self._unit_offsets).flatten()

    def write(self, layer: int, index: Tensor, kv: Tensor) -> None:
        """Keep kv [n, 2K, head_dim] (keys, then values) at `cell_index`."""
        self.cells[layer].index_copy_(0, index, kv.flatten(0, 1))

    def read(self, layer: int, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values at `unit_index` of `rows` rows: each [rows, K, tokens, head_dim]."""
        found = self.units[layer].index_select(0, index)
        keys, values = found.view(2, rows, self.kv_heads, -1, self.storage.shape[-1]).unbind(0)
        return keys, values


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of a prefill: its tokens [start, stop) of the forward. units, mask: None where it begins its context."""

    start: int
    stop: int
    units: Tensor | None
    mask: Tensor | None


class Batch:
    """What all layers of one forward need to know of its rows, computed once.

    positions: of each fed token, [n]. write: the pool cells of each fed token. A forward that feeds one token a row is
    attended in one piece, padded to the longest row's blocks; other rows one by one.
    """

    def __init__(self, rows: Sequence[Row], pool: KVPool, dtype: torch.dtype) -> None:
        size, device = pool.block_size, pool.storage.device
        places = [position for row in rows for position in range(row.start, row.start + row.fed)]
        blocks = [row.blocks[at // size] for row in rows for at in range(row.start, row.start + row.fed)]
        self.tokens = len(places)
        self.positions = torch.tensor(places, dtype=torch.int64, device=device)
        self.write = pool.cell_index(blocks, places)
        self.single = self.tokens == len(rows)
        if self.single and rows:
            depth = max(places) // size + 1
            tables = [row.blocks[:depth] + (0,) * (depth - len(row.blocks)) for row in rows]
            self.units = pool.unit_index(tables)
            reach = torch.arange(depth * size, device=device)
            self.mask = _additive(reach > self.positions.unsqueeze(-1), dtype)[:, None, None]
        else:
            self.chunks = self._chunks(rows, pool, dtype)

    def _chunks(self, rows: Sequence[Row], pool: KVPool, dtype: torch.dtype) -> list[Chunk]:
        chunks, at, size = [], 0, pool.block_size
        for row in rows:
            end = at + row.fed
            units = mask = None
            if row.start:
                depth = -(-(row.start + row.fed) // size)
                units = pool.unit_index((row.blocks[:depth],))
                reach = torch.arange(depth * size, device=self.positions.device)
                mask = _additive(reach > self.positions[at:end].unsqueeze(-1), dtype)
            chunks.append(Chunk(at, end, units, mask))
            at = end
        return chunks


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention may look and -inf where `hidden`; cheaper for all layers together than a boolean mask each."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def attend(q: Tensor, kv: Tensor, pool: KVPool, layer: int, batch: Batch) -> Tensor:
    """Attention of the fed tokens over their rows' contexts, which the pool already holds.

    q: [n, Q, head_dim]. kv: [n, 2K, head_dim], the fed tokens' own keys and values. Returns [n, Q * head_dim].
    Query heads of one KV head are attended as if they were successive queries, so that keys are never repeated.
    """
    n, heads, dim = q.shape
    k = pool.kv_heads
    group = heads // k
    if n == 0:
        return q.reshape(0, heads * dim)
    if batch.single:
        keys, values = pool.read(layer, batch.units, n)
        grouped = q.reshape(n, k, group, dim)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.mask).reshape(n, heads * dim)
    parts = []
    for chunk in batch.chunks:
        fed = chunk.stop - chunk.start
        if chunk.units is None:
            own = kv[chunk.start : chunk.stop].transpose(0, 1)
            keys, values = own[:k].unsqueeze(1), own[k:].unsqueeze(1)
        else:
            old_keys, old_values = pool.read(layer, chunk.units, 1)
            keys, values = old_keys.transpose(0, 1), old_values.transpose(0, 1)
        query = q[chunk.start : chunk.stop].transpose(0, 1).unflatten(0, (k, group))
        shape = (k, group, keys.shape[2], dim)
        out = F.scaled_dot_product_attention(
            query, keys.expand(shape), values.expand(shape), attn_mask=chunk.mask, is_causal=chunk.mask is None
        )
        parts.append(out.permute(2, 0, 1, 3).reshape(fed, heads * dim))
    return torch.cat(parts)
