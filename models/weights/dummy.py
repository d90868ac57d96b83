"""Random weights made where they are used, from a config.json alone: for measurements, where what is said is nothing.

Each slice that a rank reads is drawn from a generator keyed by the tensor's name and the slice. Ranks that hold the
same slice hold the same numbers (replicated tensors must agree); slices of one tensor in different worlds are not, so a
dummy model says other things in another world. Scales are those of `models.tiny`: activations stay finite in bfloat16
and routing is spread over all experts.
"""

from __future__ import annotations

import hashlib
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from models.tiny import EMBEDDING_STD, EXPERT_GAIN
from models.weights.qwen3_moe import expected

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from models.config import Qwen3MoeConfig


class DummyTensors:
    """Stands in for `models.weights.checkpoint.Checkpoint`. seed: another seed, other weights."""

    def __init__(self, path: str | Path, config: Qwen3MoeConfig, seed: int = 0) -> None:
        self.path, self._seed = Path(path), seed
        # Fused experts: three large draws a layer instead of three for each expert.
        sparse = (layer for layer in range(config.layers) if layer not in config.dense_layers)
        self.shapes: dict[str, tuple[int, ...]] = {f"model.layers.{i}.mlp.experts.gate_up_proj": () for i in sparse}
        self.shapes = expected(config, self)

    def check(self, expected: Mapping[str, tuple[int, ...]], allowed: Iterable[str] = ()) -> None:
        """Everything expected is there."""

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Draw `name[index]` into `out`, on its device."""
        key = hashlib.sha256(f"{self._seed} {name} {index} {tuple(out.shape)}".encode()).digest()
        generator = torch.Generator(device=out.device)
        generator.manual_seed(int.from_bytes(key[:7], "little"))
        if name.endswith("norm.weight"):
            out.normal_(1.0, 0.1, generator=generator)
        elif name.endswith(".bias"):
            out.normal_(0.0, 0.1, generator=generator)
        else:
            out.normal_(0.0, self._spread(name), generator=generator)

    def _spread(self, name: str) -> float:
        """Standard deviation of a matrix's numbers."""
        columns = self.shapes[name][-1]
        if name == "model.embed_tokens.weight":
            return EMBEDDING_STD
        if name.endswith("mlp.gate.weight"):
            return sqrt(2.0 / columns)
        return (EXPERT_GAIN if "down_proj" in name else 1.0) / sqrt(columns)
