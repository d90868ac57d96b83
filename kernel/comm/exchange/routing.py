"""Which rows go to which peer, and how a row travels with its chosen experts and weights. Tensor arithmetic alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel.ports import Received

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.exchange.shape import Shape


def presence(experts: Tensor, shape: Shape) -> Tensor:
    """Whether a row chose an expert of a rank: experts [n, k] (-1 for none) -> bool [n, ranks]."""
    owner = experts.div(shape.local, rounding_mode="floor").masked_fill_(experts < 0, shape.ranks)
    found = torch.zeros((experts.shape[0], shape.ranks + 1), dtype=torch.bool, device=experts.device)
    return found.scatter_(1, owner, True)[:, : shape.ranks]


def destinations(present: Tensor) -> Tensor:
    """The row of each message in order of destination, then of rows: bool [n, ranks] -> int64 [messages]."""
    return present.t().nonzero()[:, 1]


class Packing:
    """The bytes of one message: a row, its experts (global, int32) and their weights (float32).

    width: bytes. dtype: of the rows.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.dtype, self._hidden, self._k = dtype, shape.hidden, shape.topk
        self._ends = [shape.hidden * dtype.itemsize]
        self._ends += [self._ends[0] + 4 * shape.topk, self._ends[0] + 8 * shape.topk]
        self.width = self._ends[-1]

    def pack(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """uint8 [n, width] of rows [n, hidden], experts [n, k], weights [n, k]."""
        parts = (rows.to(self.dtype), experts.to(torch.int32), weights.to(torch.float32))
        return torch.cat([bytes_of(part) for part in parts], dim=1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, experts as int64, weights in the rows' type) of uint8 [n, width]."""
        first, second, _ = self._ends
        rows = numbers_in(packed[:, :first], self.dtype)
        experts = numbers_in(packed[:, first:second], torch.int32).to(torch.int64)
        weights = numbers_in(packed[:, second:], torch.float32).to(self.dtype)
        return rows, experts, weights


# `contiguous` says nothing of where a tensor begins, nor of the strides of dimensions of size 0 and 1; a view of
# another type asks for both.


def bytes_of(numbers: Tensor) -> Tensor:
    """[n, columns] of any type and strides -> uint8 [n, columns * itemsize]."""
    if numbers.stride(-1) != 1:
        numbers = numbers.clone(memory_format=torch.contiguous_format)
    return numbers.view(torch.uint8)


def numbers_in(part: Tensor, dtype: torch.dtype) -> Tensor:
    """What `bytes_of` was given, of columns of messages that begin at any byte: uint8 [n, bytes] -> [n, columns]."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def at_home(rows: Tensor, experts: Tensor, weights: Tensor, shape: Shape, rank: int) -> Received:
    """Received rows with global experts made `rank`'s own: -1 for those of other ranks."""
    local = experts - rank * shape.local
    return Received(rows, local.masked_fill_((local < 0) | (local >= shape.local), -1), weights)


def summed(results: Tensor, rows: Sequence[int] | Tensor, count: int) -> Tensor:
    """Add up results [m, hidden] by row, in order of messages, 16-bit numbers in float32: [count, hidden]."""
    wide = torch.float32 if results.dtype in (torch.bfloat16, torch.float16) else results.dtype
    total = torch.zeros((count, results.shape[1]), dtype=wide, device=results.device)
    index = torch.as_tensor(rows, dtype=torch.int64, device=results.device)
    return total.index_add_(0, index, results.to(wide)).to(results.dtype)
