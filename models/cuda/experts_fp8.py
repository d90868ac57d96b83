"""Experts with float8 weights (e4m3): one scale an output column of each expert, one a row of activations, made anew.

The grouped products are torch's row-wise scaled ones (sm_90 and later, bfloat16 results). Half the bytes of bfloat16
weights; rounding costs about 3 % of a single weight, at random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F

from kernel.errors import UsageError
from models.cuda.fused import fuses, gated
from models.experts import Local, Order
from models.weights.shards import shard

if TYPE_CHECKING:
    from torch import Tensor

    from kernel.topology import World
    from models.config import Qwen3MoeConfig
    from models.weights.qwen3_moe import Weights

LARGEST: Final = 448.0
"""Largest float8_e4m3fn."""


def check_fp8(config: Qwen3MoeConfig, world: World, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError unless this model can have float8 experts here."""
    wrong = []
    if device.type != "cuda":
        wrong.append(f"device {device}")
    if dtype is not torch.bfloat16:
        wrong.append(f"dtype {str(dtype).removeprefix('torch.')}")
    columns = len(shard(config, world, 0).columns)
    if config.hidden_size % 16 or columns % 16:
        wrong.append(f"hidden size {config.hidden_size} and {columns} expert columns a rank (multiples of 16)")
    if wrong:
        raise UsageError(f"quantization fp8 cannot run with {', '.join(wrong)}; it needs CUDA and bfloat16")


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 [..., n], float32 scales [...]) of x [..., n], so that the largest number of each row is float8's."""
    scale = x.abs().amax(-1).float().clamp_(min=1e-12).div_(LARGEST)
    return (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def quantised(weights: Weights, layer: int) -> Weights:
    """`weights` without the bfloat16 experts of `layer`."""
    held = weights.layers[layer]
    empty = held.experts.up.new_empty(0)
    experts = replace(held.experts, up=empty, down=empty)
    layers = (*weights.layers[:layer], replace(held, experts=experts), *weights.layers[layer + 1 :])
    return replace(weights, layers=layers)


class Fp8Experts(Local):
    """`models.experts.Mixture` of float8 weights made from up [E, 2I, hidden] and down [E, I, hidden]."""

    def __init__(self, up: Tensor, down: Tensor, first: int, total: int) -> None:
        self._first, self._total, self._fused = first, total, fuses(up.device, up.dtype)
        experts, two, hidden = up.shape
        self._up = torch.empty((experts, two, hidden), dtype=torch.float8_e4m3fn, device=up.device)
        self._down = torch.empty((experts, hidden, two // 2), dtype=torch.float8_e4m3fn, device=up.device)
        self._up_scale = torch.empty((experts, two), dtype=torch.float32, device=up.device)
        self._down_scale = torch.empty((experts, hidden), dtype=torch.float32, device=up.device)
        self._bounds = torch.arange(experts, dtype=torch.int16, device=up.device)
        self.take(up, down)

    def take(self, up: Tensor, down: Tensor) -> None:
        """Quantise other weights of the same shapes, on any device, into the memory of these."""
        # An expert at a time: the float32 quotients of all at once would be twice the weights.
        for expert in range(up.shape[0]):
            self._up[expert], self._up_scale[expert] = quantise(up[expert].to(self._up.device))
            columns = down[expert].to(self._down.device).t().contiguous()
            self._down[expert], self._down_scale[expert] = quantise(columns)

    def plain(self, x: Tensor) -> Tensor:
        """See `Mixture`. All rows choose the one expert."""
        ones = x.new_ones((x.shape[0], 1))
        return self(x, ones, torch.zeros_like(ones, dtype=torch.int64))

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `Mixture`."""
        pairs = Order(chosen, self._first, self._bounds, self._total)
        rows, scale = quantise(x)
        rows = rows.view(torch.uint8).index_select(0, pairs.rows).view(torch.float8_e4m3fn)
        both = self._product(rows, scale.index_select(0, pairs.rows), self._up, self._up_scale, pairs.ends)
        inner = gated(both, weights.flatten().index_select(0, pairs.order), self._fused)
        # Behind the last group may lie NaN; its results are thrown away row by row.
        out = self._product(*quantise(inner), self._down, self._down_scale, pairs.ends)
        return pairs.sum(out, self._fused)

    @staticmethod
    def _product(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, ends: Tensor) -> Tensor:
        """Row-wise scaled grouped product with weight [E, out, in], in bfloat16."""
        functional: Any = F  # torch's stubs do not have it yet
        recipe = functional.ScalingType.RowWise
        out: Tensor = functional.scaled_grouped_mm(
            x, weight.transpose(1, 2), scale, recipe, weight_scale, recipe, offs=ends, output_dtype=torch.bfloat16
        )
        return out
