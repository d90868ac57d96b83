"""Products of rows with a weight, in the form that this processor multiplies fastest.

torch multiplies bfloat16 through oneDNN, which brings the weight into tiles first: for the few rows of a decode
iteration that takes longer than the product. Here it is done once, when the weights are taken.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES: Final = 1 << 26
"""Weights up to which a packed copy is kept beside the plain one: all of a large model's but its experts and its
vocabulary, which are most of it."""


class Product(Protocol):
    """x @ weight + bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""

    def onto(self, x: Tensor, other: Tensor) -> Tensor:
        """other [n, out] + x @ weight, without the bias: [n, out]."""


class Plain:
    """By torch's operations. weight: [in, out]; bias: [out] or None."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Product`."""
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def onto(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Product`."""
        return torch.addmm(other, x, self._weight)


class Packed:
    """By oneDNN, with a weight packed for rows in the tens. The operations are those that torch's compiler emits."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), 16)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Product`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def onto(self, x: Tensor, other: Tensor) -> Tensor:
        """See `Product`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, None, "add")
        return out


@cache
def tiles(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies tiles of `dtype` (AMX)."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return dtype is torch.bfloat16 and bool(capabilities.get("amx_bf16"))


@cache
def packs() -> bool:
    """Whether this torch has the operations, and they compute what they should."""
    weight = torch.arange(32 * 64, dtype=torch.float32).view(32, 64).sin_().to(torch.bfloat16)
    x, other = weight[:4, :32].contiguous(), weight[:4].contiguous()
    try:
        with torch.inference_mode():
            packed, plain = Packed(weight), Plain(weight)
            pairs = (packed(x), plain(x)), (packed.onto(x, other), plain.onto(x, other))
            return all(torch.allclose(one, two, atol=0.1) for one, two in pairs)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The fastest there is of `weight` [in, out], which stays as it is."""
    small = weight.numel() * weight.element_size() <= MOST_BYTES
    if weight.device.type == "cpu" and weight.numel() and small and tiles(weight.dtype) and packs():
        return Packed(weight, bias)
    return Plain(weight, bias)
