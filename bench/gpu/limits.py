"""What one decode iteration must move and one prefill must compute, from config.json. Pure; world of one rank.

Only what cannot be avoided is counted: each weight that is used once, KV once, no activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models import kv_bytes_per_token
from models.config import DTYPES

if TYPE_CHECKING:
    from models.config import Qwen3MoeConfig
    from rollout.device import DeviceOptions


def experts_used(config: Qwen3MoeConfig, rows: int) -> float:
    """Distinct experts of a layer that `rows` tokens use, expected for an even router."""
    missed = (1 - config.experts_per_token / config.experts) ** rows
    return config.experts * (1 - missed)


def decode_bytes(config: Qwen3MoeConfig, options: DeviceOptions, rows: int, context: float) -> float:
    """Bytes of one decode iteration of `rows` rows with `context` tokens of KV each."""
    width, sparse = DTYPES[options.dtype or "bfloat16"], config.layers - len(config.dense_layers)
    expert_width = 1 if options.quantization == "fp8" else width
    dense = len(config.dense_layers) * 3 * config.hidden_size * config.dense_width
    plain = config.layers * _attention(config) + sparse * config.hidden_size * config.experts + dense
    head = config.vocab_size * config.hidden_size
    experts = sparse * experts_used(config, rows) * _expert(config)
    kv = rows * (context + 1) * _kv(config, options)
    return (plain + head + rows * config.hidden_size) * width + experts * expert_width + kv


def prefill_flops(config: Qwen3MoeConfig, tokens: int, start: int = 0) -> float:
    """Floating-point operations of a prefill of `tokens` after `start` cached ones, one row drawn at its end."""
    sparse = config.layers - len(config.dense_layers)
    dense = len(config.dense_layers) * 3 * config.hidden_size * config.dense_width
    routed = sparse * (config.experts_per_token * _expert(config) + config.hidden_size * config.experts)
    matrices = 2.0 * tokens * (config.layers * _attention(config) + dense + routed)
    pairs = tokens * start + tokens * (tokens + 1) / 2
    attention = 4.0 * config.layers * config.heads * config.head_dim * pairs
    return matrices + attention + 2.0 * config.vocab_size * config.hidden_size


def _attention(config: Qwen3MoeConfig) -> int:
    return config.hidden_size * config.head_dim * (2 * config.heads + 2 * config.kv_heads)


def _expert(config: Qwen3MoeConfig) -> int:
    return 3 * config.hidden_size * config.expert_width


def _kv(config: Qwen3MoeConfig, options: DeviceOptions) -> int:
    from kernel.topology import World

    return kv_bytes_per_token(config, World(), options.dtype or "bfloat16")
