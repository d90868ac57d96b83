"""Keys and values of the rows that decode, kept side by side in the CPU world.

Attention there needs each row's context in one piece, and gathering it from the pool's blocks in every iteration takes
about as long as attention itself. While the same turns decode, an iteration adds one token to each: here only that one
is added. The pool stays complete; this is a copy that may be thrown away at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from models.layers import ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.request import Row
    from models.attention.pool import KVPool

MOST_BYTES: Final = 1 << 28
"""Of all layers together. Beyond it nothing is kept, and every iteration gathers."""


class Lanes:
    """One iteration's rows in the copy. gather: they are not there yet, so each layer is read from the pool first."""

    def __init__(self, kept: Kept, rows: int, tokens: int, gather: bool, cells: Tensor) -> None:
        self._kept, self._rows, self._tokens = kept, rows, tokens
        self.gather, self._cells = gather, cells

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep what was read from the pool: each [rows, K, tokens, head_dim]."""
        both = self._kept.layer(layer)
        tokens = keys.shape[2]
        both[0, :, :, :tokens], both[1, :, :, :tokens] = keys, values

    def add(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Add the fed tokens' own kv [rows, 2K, head_dim]; keys and values, each [rows, K, tokens, head_dim]."""
        both = self._kept.layer(layer)
        both.view(-1, both.shape[-1]).index_copy_(0, self._cells, kv.flatten(0, 1))
        return both[0, :, :, : self._tokens], both[1, :, :, : self._tokens]


class Kept:
    """The copy. Used by D's stream alone."""

    def __init__(self, pool: KVPool, most_bytes: int = MOST_BYTES) -> None:
        self._pool, self._most = pool, most_bytes
        self._turns: list[tuple[int, int]] = []
        self._room = 0
        self._storage = pool.storage.new_zeros(0)
        self._layers: tuple[Tensor, ...] = ()
        self._lanes = torch.zeros(0)

    def begin(self, rows: Sequence[Row]) -> Lanes | None:
        """Where these rows of one fed token each are kept; None where they are not.

        A turn is known by its request's id, so a slot or a block that another turn has taken over never passes for it.
        """
        if not all(row.request for row in rows):
            return None
        size = self._pool.block_size
        depth = max(row.start for row in rows) // size + 1
        here = [(row.request, row.start) for row in rows]
        same = depth * size <= self._room and here == self._turns
        if not same and not self._make(len(rows), depth):
            return None
        self._turns = [(request, start + 1) for request, start in here]
        starts = ints([row.start for row in rows], "cpu")
        return Lanes(self, len(rows), depth * size, not same, (starts.unsqueeze(-1) + self._lanes).flatten())

    def layer(self, layer: int) -> Tensor:
        """[2, rows, K, room, head_dim], keys and values."""
        return self._layers[layer]

    def _make(self, rows: int, depth: int) -> bool:
        pool = self._pool
        self._turns, self._room = [], 0
        room = (depth + max(2, depth // 4)) * pool.block_size
        layers = pool.storage.shape[0]
        numbers = 2 * rows * pool.kv_heads * room * pool.head_dim
        if layers * numbers * pool.storage.element_size() > self._most:
            self._storage, self._layers = pool.storage.new_zeros(0), ()
            return False
        if self._storage.numel() < layers * numbers:
            # Zeros, as in the pool: a masked token weighs 0, and 0 times a NaN would be NaN.
            self._storage = pool.storage.new_zeros(layers * numbers)
        shape = (2, rows, pool.kv_heads, room, pool.head_dim)
        self._layers = self._storage[: layers * numbers].view(layers, *shape).unbind(0)
        self._room = room
        heads = torch.arange(pool.kv_heads)
        sides = torch.arange(2).view(2, 1) * (rows * pool.kv_heads)
        lane = torch.arange(rows).view(rows, 1, 1) * pool.kv_heads
        self._lanes = ((sides + heads + lane) * room).flatten(1)
        return True
