"""The paged KV pool.

Layout, for each layer: [blocks, 2, kv_heads, block_size, head_dim], keys then values. A block is contiguous (it can be
copied whole), and a gather of (block, head) units yields keys and values that need no further copy.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

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
