"""Which parts of a model run as fused kernels, and the same parts by torch's operations where there are none.

Fused on a CUDA device in bfloat16, if Triton is there and heads are a power of two wide. float32 stays with torch, so
that a device can be held against the CPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from models.layers import Norm

if TYPE_CHECKING:
    from torch import Tensor

    from models.attention.pool import KVPool
    from models.layers import Rotary

Angles = tuple["Tensor", "Tensor"]


class RowNorm(Protocol):
    """A norm over the last dimension of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size] -> [n, size], in x's type."""


class Heads(Protocol):
    """What becomes of one layer's heads between projection and attention."""

    def __call__(self, heads: Tensor, angles: Angles, cells: Tensor) -> None:
        """Norm and turn the query and key heads of `heads` [n, Q + 2K, D] in place; keep keys and values at `cells`."""


class Parts(Protocol):
    """Makes the parts of layers that can be fused."""

    def angles(self, positions: Tensor) -> Angles:
        """What `Heads` needs of positions [n, 1, 1]; once a forward."""

    def norm(self, weight: Tensor) -> RowNorm:
        """The norm with `weight` [size]."""

    def heads(self, layer: int, weight: Tensor) -> Heads:
        """Those of `layer`, with norms `weight` [Q + K, D]."""


class TorchParts:
    """By torch's operations. eps: of the norms."""

    def __init__(self, pool: KVPool, rotary: Rotary, eps: float) -> None:
        self._pool, self._rotary, self._eps = pool, rotary, eps

    def angles(self, positions: Tensor) -> Angles:
        """See `Parts`."""
        return self._rotary.angles(positions, self._pool.storage.dtype)

    def norm(self, weight: Tensor) -> Norm:
        """See `Parts`."""
        return Norm(weight, self._eps)

    def heads(self, layer: int, weight: Tensor) -> TorchHeads:
        """See `Parts`."""
        return TorchHeads(self._pool, self._rotary, layer, weight, self._eps)


class TorchHeads:
    """`Heads` by torch's operations."""

    __slots__ = ("_layer", "_norm", "_pool", "_queries", "_rotary", "_turning")

    def __init__(self, pool: KVPool, rotary: Rotary, layer: int, weight: Tensor, eps: float) -> None:
        self._pool, self._rotary, self._layer = pool, rotary, layer
        self._norm, self._turning = Norm(weight, eps), weight.shape[0]
        self._queries = weight.shape[0] - pool.kv_heads

    def __call__(self, heads: Tensor, angles: Angles, cells: Tensor) -> None:
        """See `Heads`."""
        turning = heads[:, : self._turning]
        self._rotary.turn(self._norm(turning), angles, out=turning)
        self._pool.write(self._layer, cells, heads[:, self._queries :])


class FusedParts:
    """By Triton's kernels."""

    def __init__(self, pool: KVPool, rotary: Rotary, eps: float) -> None:
        self._pool, self._rotary, self._eps = pool, rotary, eps

    def angles(self, positions: Tensor) -> Angles:
        """See `Parts`."""
        return self._rotary.angles(positions, torch.float32)

    def norm(self, weight: Tensor) -> RowNorm:
        """See `Parts`."""
        from models.cuda.triton_kernels import norm

        return lambda x: norm(x, weight, self._eps)

    def heads(self, layer: int, weight: Tensor) -> Heads:
        """See `Parts`."""
        from models.cuda.triton_kernels import heads as run

        pool, keys, eps = self._pool.storage[layer], self._pool.kv_heads, self._eps
        return lambda heads, angles, cells: run(heads, weight, eps, angles, cells, pool, keys)


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of this type run fused on this device."""
    return device.type == "cuda" and dtype is torch.bfloat16 and find_spec("triton") is not None


def parts(pool: KVPool, rotary: Rotary, eps: float) -> Parts:
    """The best there is for this pool."""
    whole = pool.head_dim & (pool.head_dim - 1) == 0
    if whole and fuses(pool.storage.device, pool.storage.dtype):
        return FusedParts(pool, rotary, eps)
    return TorchParts(pool, rotary, eps)


def gated(both: Tensor, share: Tensor, fused: bool) -> Tensor:
    """silu(gate) * value * share of both [n, 2 * columns] (gate, then value) and share [n]: [n, columns]."""
    if fused:
        from models.cuda.triton_kernels import gated as run

        return run(both, share)
    gate, value = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(value).mul_(share.unsqueeze(-1))
