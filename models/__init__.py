"""Decoder families, checkpoint loading, sampling. A model talks to the kernel's step and ports alone.

Importing this package imports no torch: `load` does, when it builds a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from models.config import FAMILIES, DecoderConfig, parse_config, read_config
from models.weights.shards import check_split, kv_bytes_per_token

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.ports import Model
    from kernel.topology import World

__all__ = [
    "FAMILIES", "DecoderConfig", "check_split", "check_weights", "kv_bytes_per_token", "load", "parse_config",
    "read_config",
]  # fmt: skip


def check_weights(path: str | Path, config: DecoderConfig) -> None:
    """Look through the whole checkpoint in `path` before anybody takes its weights. Imports torch.

    Raises UsageError, one line, where a file is cut off, tensors do not fit `config` (each listed), or hold no numbers.
    """
    import_module(FAMILIES[config.model_type].module).check(path, config)


def load(
    path: str | Path,
    world: World,
    rank: int,
    *,
    blocks: int,
    block_size: int,
    slots: int,
    dtype: object = "float32",
    device: str = "cpu",
    attention: str = "reference",
    weights: str = "checkpoint",
    quantization: str | None = None,
    compiled: bool = False,
) -> Model:
    """The model in the Hugging Face checkpoint directory `path`, as `rank` of `world` holds it.

    Only this rank's slices are read. blocks, block_size: KV pool, in blocks and in tokens a block. slots: rows of the
    replica's slot table. dtype: `float32` or `bfloat16` (or the torch.dtype). device: `cpu` or, as torch names it, a
    CUDA device. attention: `reference` (torch alone) or `flashinfer` (CUDA, bfloat16; `flashinfer-fa2`:
    without its kernels for sm_90 alone). weights: `checkpoint`, or
    `dummy`, made on the device from config.json alone. quantization: None, or `fp8` for the weights of experts.
    compiled: decode by kernels that this host's C++ compiler builds, on `cpu` alone.
    Raises UsageError on an unsupported family, bad config fields, tensors that do not fit (each listed), a world that
    the model does not divide over, and options that do not go together.
    """
    for name, value in (("blocks", blocks), ("block_size", block_size), ("slots", slots)):
        if value < 1:
            raise UsageError(f"{name}={value}: at least 1 is needed")
    for name, choice, choices in (
        ("attention", attention, ("reference", "flashinfer", "flashinfer-fa2")),
        ("weights", weights, ("checkpoint", "dummy")),
        ("quantization", quantization, (None, "fp8")),
    ):
        if choice not in choices:
            raise UsageError(f"{name} {choice}: choose one of {', '.join(map(str, choices))}")
    module = import_module(FAMILIES[read_config(path).model_type].module)
    model: Model = module.load(
        path,
        world,
        rank,
        blocks=blocks,
        block_size=block_size,
        slots=slots,
        dtype=dtype,
        device=device,
        attention=attention,
        weights=weights,
        quantization=quantization,
        compiled=compiled,
    )
    return model
