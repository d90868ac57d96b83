"""Mixture of experts: routing, and the sum of one rank's experts. One rank holds E of all experts, I columns of each.

Two ways to the same sum, chosen by size alone, so that every forward of one shape takes the same way. *Dense* computes
every local expert for every row as two matrix products and weights unchosen ones with zero: four times the arithmetic
and a quarter of the operations, which is faster while rows and experts are few. *Grouped* sorts (row, expert) pairs by
expert and multiplies each group with its own weights.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

DENSE_FLOPS: Final[Mapping[torch.dtype, float]] = MappingProxyType({torch.float32: 12e6, torch.bfloat16: 1e6})
"""Below this much arithmetic dense was faster (one core of an EPYC 7003, torch 2.13, 8 to 64 experts)."""


def route(x: Tensor, router: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """(weights, experts), each [n, k], of rows x [n, hidden]; router [all experts, hidden].

    Softmax over all experts in float32, then the k largest; `normalise` scales those to sum to 1.
    """
    logits = F.linear(x, router)
    if normalise:
        # Softmax over the chosen alone is the softmax over all, renormalised.
        best, chosen = logits.topk(k, dim=-1)
        return best.softmax(-1, dtype=torch.float32).to(x.dtype), chosen
    best, chosen = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    return best.to(x.dtype), chosen


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated MLP's columns: up [2I, hidden] (gate, then up), down [I, hidden]."""
    gate, value = F.linear(x, up).chunk(2, dim=-1)
    return torch.mm(F.silu(gate).mul_(value), down)


def mixture(x: Tensor, weights: Tensor, chosen: Tensor, first: int, up: Tensor, down: Tensor, total: int) -> Tensor:
    """Weighted sum of the local experts first .. first+E-1 out of `total`: [n, hidden] -> [n, hidden].

    weights, chosen: [n, k] of `route`. up: [E, 2I, hidden]. down: [E, I, hidden].
    """
    experts, columns, hidden = down.shape
    work = 6.0 * x.shape[0] * experts * columns * hidden
    if work <= DENSE_FLOPS.get(x.dtype, 0.0) or not _groupable(up, down):
        return _dense(x, weights, chosen, first, up, down, total)
    return _grouped(x, weights, chosen, first, up, down)


def _groupable(up: Tensor, down: Tensor) -> bool:
    # grouped_mm wants strides of whole 16-byte units.
    return all(n * up.element_size() % 16 == 0 for n in (up.shape[1], up.shape[2], down.shape[1]))


def _dense(x: Tensor, weights: Tensor, chosen: Tensor, first: int, up: Tensor, down: Tensor, total: int) -> Tensor:
    rows, (experts, columns, hidden) = x.shape[0], down.shape
    share = x.new_zeros((rows, total)).scatter_(1, chosen, weights)
    if experts != total:
        share = share[:, first : first + experts]
    gate, value = F.linear(x, up.view(experts * 2 * columns, hidden)).view(rows, experts, 2, columns).unbind(2)
    inner = F.silu(gate).mul_(value).mul_(share.unsqueeze(-1))
    return torch.mm(inner.view(rows, experts * columns), down.view(experts * columns, hidden))


def _grouped(x: Tensor, weights: Tensor, chosen: Tensor, first: int, up: Tensor, down: Tensor) -> Tensor:
    experts = down.shape[0]
    pair = (chosen - first).flatten()
    # Pairs of other ranks' experts sort behind the last group, where grouped_mm leaves whatever was in memory.
    pair = pair.masked_fill_((pair < 0) | (pair >= experts), experts)
    pair, order = pair.sort(stable=True)
    ends = torch.searchsorted(pair, torch.arange(experts, device=x.device), right=True).to(torch.int32)
    row = order // chosen.shape[1]
    gate, value = F.grouped_mm(x.index_select(0, row), up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    inner = F.silu(gate).mul_(value).mul_(weights.flatten().index_select(0, order).unsqueeze(-1))
    out = F.grouped_mm(inner, down, offs=ends).masked_fill_((pair == experts).unsqueeze(-1), 0)
    return torch.zeros_like(x).index_add_(0, row, out)
