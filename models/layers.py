"""Small layer functions that families share. Rows are dimension 0.

Decode of a small model on a CPU spends most of its time between operations, so these count their operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Norm:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), computed in float32.

    On a CPU `torch.nn.functional.rms_norm` is a composite of twice as many operations.
    """

    __slots__ = ("_eps", "_scale", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._scale = weight, 1.0 / weight.shape[-1]
        self._eps = torch.full((1,), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n], in x's type."""
        # Converted once and changed in place: mixed operations convert as slowly, and each new result costs its pages.
        wide = x if x.dtype is torch.float32 else x.float()
        length = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self._eps, length, length, value=self._scale).rsqrt_()
        if wide is x:
            return (x * scale).mul_(self._weight)
        return wide.mul_(scale).mul_(self._weight).to(x.dtype)


class Rotary:
    """Rotary position embedding of whole heads, halves paired (arXiv:2104.09864, in the layout of GPT-NeoX)."""

    __slots__ = ("_half", "_inverse", "_sign")

    def __init__(self, head_dim: int, theta: float, device: str) -> None:
        self._half = head_dim // 2
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        self._inverse = torch.cat((inverse, inverse))
        self._sign = torch.ones_like(self._inverse)
        self._sign[: self._half] = -1.0

    @property
    def frequencies(self) -> Tensor:
        """Radians a position of each pair: [head_dim / 2] float32."""
        return self._inverse[: self._half]

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [n, 1, head_dim], of `positions` [n, 1, 1]; once a forward."""
        angle = positions * self._inverse
        return angle.cos().to(dtype), angle.sin_().mul_(self._sign).to(dtype)

    def turn(self, x: Tensor, angles: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Write the turned heads of x [n, heads, head_dim] into `out` (which may not be x)."""
        cos, sin = angles
        torch.addcmul(x * cos, x.roll(self._half, -1), sin, out=out)


def embed(table: Tensor, first: int, tokens: Tensor, whole: bool) -> Tensor:
    """Rows of a vocabulary shard [rows, hidden] that starts at id `first`; zeros for ids of other shards.

    tokens: [n]. whole: the shard is the whole vocabulary.
    """
    if whole:
        return table.index_select(0, tokens)
    local = tokens - first
    here = (local >= 0) & (local < table.shape[0])
    return table.index_select(0, local.mul_(here)).mul_(here.unsqueeze(-1))


def ints(values: ArrayLike, device: str) -> Tensor:
    """Integers on the device, int64. By way of numpy, which reads Python lists four times as fast as torch."""
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)
