"""What a rank's GPU memory holds: weights, KV pool, and what must stay free. Arithmetic on config.json; no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from models import kv_bytes_per_token
from models.config import DTYPES, Qwen3MoeConfig
from models.weights.shards import shard

if TYPE_CHECKING:
    from kernel.topology import World
    from models.config import DecoderConfig
    from rollout.device import DeviceOptions

GIB: Final = 1 << 30
USABLE: Final = 0.92
"""Share of a GPU's memory that is planned for; the driver and the contexts of other programs have the rest."""
RESERVE: Final = 6 * GIB
"""CUDA context, kernels, NCCL's buffers, graphs, workspaces and activations; at most a fifth of a small GPU.

What an expert exchange keeps is computed, and comes on top."""
MOST_KV_TOKENS: Final = 1 << 20
"""Default cap: the paper's trace keeps 1,026,085 tokens when nothing is evicted, and index lists grow with the pool."""
HEADROOM: Final = 96
"""Bytes of prefill's activations for a token, in hidden sizes: eight experts' rows, in and out, and the rest."""


def weight_bytes(config: DecoderConfig, world: World, options: DeviceOptions) -> int:
    """Bytes of rank 0's weights; no rank holds more. 0 where the family is unknown here."""
    if not isinstance(config, Qwen3MoeConfig):
        return 0
    part, width = shard(config, world, 0), DTYPES[options.dtype or "float32"]
    hidden, dim = config.hidden_size, config.head_dim
    attention = hidden * dim * (2 * len(part.heads) + 2 * len(part.kv_heads)) + 2 * hidden + 2 * dim
    experts = 3 * hidden * len(part.experts) * len(part.columns)
    dense = 3 * hidden * len(part.dense)
    sparse = config.layers - len(config.dense_layers)
    ends = len(part.vocab) * hidden * (1 if config.tie_word_embeddings else 2)
    plain = config.layers * attention + sparse * hidden * config.experts + len(config.dense_layers) * dense + ends
    return plain * width + sparse * experts * (1 if options.quantization == "fp8" else width)


def activation_bytes(tokens: int, hidden: int) -> int:
    """Bytes that one prefill of `tokens` (of all replicas) has alive at once, generously."""
    return tokens * hidden * HEADROOM


def kv_tokens(
    config: DecoderConfig,
    world: World,
    options: DeviceOptions,
    memory: int,
    *,
    prefill_tokens: int,
    block_size: int,
    asked: int | None = None,
    exchange: int = 0,
) -> int:
    """Tokens of a replica's KV pool on GPUs of `memory` bytes: `asked`, or what fits (at most 2**20).

    exchange: bytes that an expert exchange keeps of each rank.
    Raises UsageError with the numbers when the weights, or the pool asked for, do not fit.
    """
    each = kv_bytes_per_token(config, world, options.dtype or "float32")
    weights = weight_bytes(config, world, options)
    reserve = min(RESERVE, memory // 5) + activation_bytes(prefill_tokens * world.adp, config.hidden_size)
    room = int(memory * USABLE) - weights - reserve - exchange
    besides = f", {gib(exchange)} for the expert exchange" if exchange else ""
    if room < each * block_size:
        raise UsageError(
            f"this model does not fit: {gib(weights)} of weights a rank{besides} and {gib(reserve)} for the engine"
            f" leave no room for KV in a GPU of {gib(memory)}: use more ranks, --quantization fp8 or a smaller model"
        )
    fits = room // each // block_size * block_size
    if asked is None:
        return min(fits, MOST_KV_TOKENS)
    if asked > fits:
        raise UsageError(
            f"--kv-tokens {asked} takes {gib(asked * each)} a rank beside {gib(weights)} of weights{besides} and"
            f" {gib(reserve)} for the engine, in a GPU of {gib(memory)}: at most {fits} fit"
        )
    return asked


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:,.1f} GiB"
