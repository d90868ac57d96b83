"""Mixture of experts: routing, and the sum of one rank's experts. One rank holds E of all experts, I columns of each.

Two ways to the same sum, chosen by size alone, so that every forward of one shape takes the same way. *Dense* computes
every local expert for every row as two matrix products and weights unchosen ones with zero: several times the
arithmetic and a fraction of the operations, which is faster while rows and experts are few. *Grouped* sorts
(row, expert) pairs by expert and multiplies each group with its own weights.

On a CUDA device dense reads all local experts' weights once, which decode batches do anyway (64 rows that choose 8 of
64 experts miss none); past `DENSE_ROWS` its surplus arithmetic costs more than sorting. There grouped needs bfloat16:
torch's grouped product of other types reads the group ends back and waits for the device.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.cuda.fused import fuses, gated
from models.products import Plain, product, tiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.ports import Received

DENSE_FLOPS: Final[Mapping[torch.dtype, float]] = MappingProxyType({torch.float32: 12e6, torch.bfloat16: 1e6})
"""Below this much arithmetic dense was faster (one core of an EPYC 7003, torch 2.13, 8 to 64 experts)."""
TILE_FLOPS: Final = 40e6
"""The same in bfloat16 for each local expert, where the processor multiplies tiles (AMX): a product of a few rows costs
there what it costs to begin it (one core of a Xeon of 2024, torch 2.13, 8 to 64 experts)."""
CACHED_BYTES: Final = 1 << 21
"""Where it multiplies tiles, weights up to which dense is used for any number of rows. Beyond it, dense would read more
than the rows chose, until they choose half of all."""
DENSE_ROWS: Final = 128
"""On a CUDA device, rows up to which dense is used in bfloat16 (an estimate: at 128 rows an H200's matmul peak takes as
long for the surplus arithmetic of 64 experts as its memory for their weights)."""
DENSE_BYTES: Final = 1 << 28
"""On a CUDA device, the most bytes of intermediate numbers that dense makes at a time."""


class Mixture(Protocol):
    """One rank's experts of one layer."""

    def plain(self, x: Tensor) -> Tensor:
        """The only expert, of every row with weight 1: a gated MLP. [n, hidden] -> [n, hidden]."""

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Weighted sum of the local experts among the chosen: [n, hidden] -> [n, hidden]. See `route`."""

    def received(self, came: Received) -> Tensor:
        """The same for rows that an exchange brought, whose experts are this rank's, -1 for none."""


def route(x: Tensor, router: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """(weights, experts), each [n, k], of rows x [n, hidden]; router [hidden, all experts].

    Softmax over all experts in float32, then the k largest; `normalise` scales those to sum to 1.
    """
    logits = torch.mm(x, router)
    if normalise:
        # Softmax over the chosen alone is the softmax over all, renormalised.
        best, chosen = logits.topk(k)
        weights = best.softmax(-1, dtype=torch.float32)
    else:
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(k)
    return (weights if weights.dtype is x.dtype else weights.to(x.dtype)), chosen


class Order:
    """(row, expert) pairs sorted by local expert, without a wait; pairs of other ranks' experts come last.

    rows: the row of each sorted pair, [n * k]. order: which pair it is. ends: int32 [experts], where each expert's
    pairs end, as grouped products want it.
    """

    def __init__(self, chosen: Tensor, first: int, bounds: Tensor, total: int) -> None:
        """chosen: [n, k]. first: the first local expert. bounds: int16 0 .. experts-1. total: of all ranks."""
        self._shape, experts = chosen.shape, bounds.shape[0]
        # int16 halves the passes of the device's radix sort, twice.
        pair = (chosen - first).to(torch.int16).flatten()
        self._foreign: Tensor | None = None
        if experts != total:
            self._foreign = (pair < 0) | (pair >= experts)
            pair = pair.masked_fill(self._foreign, experts)
        pair, self.order = pair.sort(stable=True)
        self.ends = torch.searchsorted(pair, bounds, right=True, out_int32=True)
        self.rows = self.order // chosen.shape[1]

    def sum(self, out: Tensor, fused: bool = False) -> Tensor:
        """Sum sorted pairs' results [n * k, hidden] by row: [n, hidden]. In one order always, unlike index_add_."""
        n, k = self._shape
        back = torch.empty_like(self.order)
        back.scatter_(0, self.order, torch.arange(n * k, device=out.device))
        if fused:
            from models.cuda.triton_kernels import summed

            return summed(out, back.view(n, k), None if self._foreign is None else self.ends[-1:])
        found = out.index_select(0, back).view(n, k, out.shape[1])
        if self._foreign is not None:
            # Behind the last group lies whatever was in memory.
            found = found.masked_fill_(self._foreign.view(n, k, 1), 0)
        return found.sum(1)


class Local:
    """The part of a `Mixture` that takes rows from an exchange, over its `__call__`."""

    _first: int
    _total: int
    _bounds: Tensor

    def received(self, came: Received) -> Tensor:
        """See `Mixture`. As if there were one expert more, which nobody has, for -1."""
        if came.rows.shape[0] == 0:
            return torch.zeros_like(came.rows)
        chosen = came.experts.masked_fill(came.experts < 0, self._bounds.shape[0])
        out: Tensor = self._at_home(came.rows, came.weights, chosen)
        return out

    @cached_property
    def _at_home(self) -> Any:
        """The same weights under a rank's own numbers."""
        these = copy(self)
        these._first, these._total = 0, self._bounds.shape[0] + 1
        return these


class Experts(Local):
    """The local experts first .. first+E-1 out of `total`.

    up: [E, 2I, hidden], gate rows then up rows of each. down: [E, I, hidden], down_proj transposed.
    """

    def __init__(self, up: Tensor, down: Tensor, first: int = 0, total: int = 1) -> None:
        self._first, self._total = first, total
        self._experts, self._columns, hidden = down.shape
        self._up, self._down = up.transpose(1, 2), down
        self._row_flops = 6.0 * down.numel()
        # grouped_mm wants strides of whole 16-byte units.
        groupable = all(n * up.element_size() % 16 == 0 for n in (2 * self._columns, hidden, self._columns))
        self._dense_flops = DENSE_FLOPS.get(up.dtype, 0.0) if groupable else float("inf")
        self._tiles = groupable and tiles(up.dtype)
        self._cached = 3 * down.numel() * down.element_size() <= CACHED_BYTES
        # Where both ways are taken, a packed copy beside the plain one costs memory: small models have it to spare.
        made = product if self._tiles and self._cached else Plain
        self._up_of, self._down_of = made(up.flatten(0, 1).t()), made(down.flatten(0, 1))
        self._cuda, self._fused = up.device.type == "cuda", fuses(up.device, up.dtype)
        self._permutes = groupable and up.dtype is torch.bfloat16
        self._bounds = torch.arange(self._experts, dtype=torch.int16, device=up.device)

    def plain(self, x: Tensor) -> Tensor:
        """The only expert, of every row with weight 1: a gated MLP. [n, hidden] -> [n, hidden]."""
        gate, value = self._up_of(x).chunk(2, dim=-1)
        return self._down_of(F.silu(gate).mul_(value))

    def received(self, came: Received) -> Tensor:
        """See `Mixture`. Rows that lie by expert are multiplied where they lie: nothing is sorted or copied."""
        if not came.grouped:
            return super().received(came)
        both = torch.bmm(came.rows.view(self._experts, -1, came.rows.shape[1]), self._up)
        inner = gated(both.view(-1, 2 * self._columns), came.weights.flatten(), self._fused)
        return torch.bmm(inner.view(self._experts, -1, self._columns), self._down).flatten(0, 1)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Weighted sum of the local experts among the chosen: [n, hidden] -> [n, hidden]. See `route`."""
        if self._cuda:
            return self._on_cuda(x, weights, chosen)
        return (self.dense if self.prefers_dense(*chosen.shape) else self.grouped)(x, weights, chosen)

    def prefers_dense(self, rows: int, k: int) -> bool:
        """Whether dense is the faster way for so many rows, each of which chose k experts, on this processor."""
        flops = self._row_flops * rows
        if not self._tiles:
            return flops <= self._dense_flops
        reached = self._cached or 2 * rows * k >= self._total
        return reached and flops <= TILE_FLOPS * self._experts

    def dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """By two matrix products over all local experts."""
        rows, experts, columns = x.shape[0], self._experts, self._columns
        share = x.new_zeros((rows, self._total)).scatter_(1, chosen, weights)
        if experts != self._total:
            share = share[:, self._first : self._first + experts]
        both = self._up_of(x)
        if self._fused:
            inner = gated(both.view(rows * experts, 2 * columns), share.reshape(-1), True)
            return self._down_of(inner.view(rows, experts * columns))
        gate, value = both.view(rows, experts, 2, columns).unbind(2)
        inner = F.silu(gate).mul_(value).mul_(share.unsqueeze(-1))
        return self._down_of(inner.view(rows, experts * columns))

    def grouped(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """By one product for each expert, over the rows that chose it."""
        experts = self._experts
        pair = (chosen - self._first).flatten()
        # Pairs of other ranks' experts sort behind the last group, where grouped_mm leaves whatever was in memory.
        pair = pair.masked_fill_((pair < 0) | (pair >= experts), experts)
        pair, order = pair.sort(stable=True)
        ends = torch.searchsorted(pair, torch.arange(experts, device=x.device), right=True).to(torch.int32)
        row = order // chosen.shape[1]
        gate, value = F.grouped_mm(x.index_select(0, row), self._up, offs=ends).chunk(2, dim=-1)
        inner = F.silu(gate).mul_(value).mul_(weights.flatten().index_select(0, order).unsqueeze(-1))
        out = F.grouped_mm(inner, self._down, offs=ends).masked_fill_((pair == experts).unsqueeze(-1), 0)
        return torch.zeros_like(x).index_add_(0, row, out)

    def permuted(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As `grouped`, on a device: nothing waits, and rows are summed in one order always."""
        pairs = Order(chosen, self._first, self._bounds, self._total)
        both = F.grouped_mm(x.index_select(0, pairs.rows), self._up, offs=pairs.ends)
        inner = gated(both, weights.flatten().index_select(0, pairs.order), self._fused)
        return pairs.sum(F.grouped_mm(inner, self._down, offs=pairs.ends), self._fused)

    def _on_cuda(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows = x.shape[0]
        if self._permutes and rows > DENSE_ROWS:
            return self.permuted(x, weights, chosen)
        part = max(1, DENSE_BYTES // (2 * self._experts * self._columns * x.element_size()))
        if rows <= part:
            return self.dense(x, weights, chosen)
        cuts = [slice(start, start + part) for start in range(0, rows, part)]
        return torch.cat([self.dense(x[cut], weights[cut], chosen[cut]) for cut in cuts])
