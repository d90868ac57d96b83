"""What a checkpoint's config.json says, as one frozen dataclass a family. Torch-free.

Hub checkpoints and transformers 5 spell some fields differently (`num_experts` / `num_local_experts`, `rope_theta` /
`rope_parameters`, `torch_dtype` / `dtype`); both are read. A family is added by one entry of `FAMILIES`: how to parse
its fields, and the module whose `load` builds its model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kernel import files
from kernel.errors import UsageError
from models.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LARGEST: Final = 16 << 20
"""Bytes of a config.json."""
MOST_LAYERS: Final = 10_000
DTYPES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "bfloat16": 2})
"""Element types that models run in, and their bytes."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What every decoder family has.

    heads, kv_heads: of the whole model. head_dim: numbers in one head. max_positions: context that the model was
    trained for, in tokens. eos_token_ids: ids that end a text, empty if the file names none. dtype: element type of the
    checkpoint.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig(DecoderConfig):
    """Qwen3-MoE: grouped-query attention with normalised q and k, softmax top-k routing.

    experts, experts_per_token, expert_width: E, k and the columns of one expert. dense_layers: layers with one plain
    MLP of `dense_width` columns in place of experts. norm_topk_prob: the k routing weights are scaled to sum to 1.
    attention_bias: q, k, v and o projections have biases.
    """

    experts: int
    experts_per_token: int
    expert_width: int
    dense_layers: tuple[int, ...]
    dense_width: int
    norm_topk_prob: bool
    attention_bias: bool


def _qwen3_moe(fields: Fields) -> Qwen3MoeConfig:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads, layers = fields.integer("num_key_value_heads"), fields.integer("num_hidden_layers")
    if layers > MOST_LAYERS:
        fields.refuse(f"num_hidden_layers is {layers:,}: no model has more than {MOST_LAYERS:,}")
        layers = 1
    experts, chosen = fields.integer("num_experts", "num_local_experts"), fields.integer("num_experts_per_tok")
    head_dim = fields.integer("head_dim", default=max(1, hidden // heads))
    sparse_step = fields.integer("decoder_sparse_step", default=1)
    plain = fields.integers("mlp_only_layers", default=())
    dense = tuple(i for i in range(layers) if i in plain or (i + 1) % sparse_step)
    config = Qwen3MoeConfig(
        model_type="qwen3_moe",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope_theta=fields.rope_theta(),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_positions=fields.integer("max_position_embeddings", default=32768),
        eos_token_ids=fields.integers("eos_token_id", default=()),
        dtype=fields.choice("torch_dtype", "dtype", default="float32", of=("float32", "bfloat16", "float16")),
        experts=experts,
        experts_per_token=chosen,
        expert_width=fields.integer("moe_intermediate_size"),
        dense_layers=dense,
        dense_width=fields.integer("intermediate_size") if dense else 0,
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
    )
    fields.choice("hidden_act", default="silu", of=("silu",))
    if fields.flag("use_sliding_window", default=False):
        fields.refuse("use_sliding_window is true: sliding-window attention is not supported")
    if kv_heads and heads % kv_heads:
        fields.refuse(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        fields.refuse(f"head_dim {head_dim} is odd: rotary embedding turns pairs")
    if chosen > experts:
        fields.refuse(f"num_experts_per_tok {chosen} is more than the {experts} experts")
    if any(not 0 <= layer < layers for layer in plain):
        fields.refuse(f"mlp_only_layers {list(plain)} names a layer outside 0 .. {layers - 1}")
    return config


@dataclass(frozen=True, slots=True)
class Family:
    """A supported `model_type`: its parser, and the module whose `load` builds the model."""

    parse: Callable[[Fields], DecoderConfig]
    module: str


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType({"qwen3_moe": Family(_qwen3_moe, "models.qwen3_moe")})
"""Supported families by `model_type`."""


def read_config(path: str | Path) -> DecoderConfig:
    """The configuration of the checkpoint directory `path`.

    Raises UsageError when the directory or its config.json cannot be read, when its `model_type` is not one of
    `FAMILIES`, and when fields are missing or invalid (all of them named in the one message).
    """
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise UsageError(f"{path}: no such directory; --model names a Hugging Face checkpoint directory")
    try:
        raw = json.loads(files.read(file, LARGEST).decode())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; a checkpoint directory holds a config.json") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not JSON ({error}); copy the checkpoint again") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{file}: not a JSON object; copy the checkpoint again")
    return parse_config(raw, str(file))


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The configuration in the parsed JSON object `raw`; `where` is named in errors. Raises as `read_config` does."""
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        what = f"model_type {kind!r} is not supported" if "model_type" in raw else "model_type is missing"
        raise UsageError(f"{where}: {what}; supported: {', '.join(sorted(FAMILIES))}")
    fields = Fields(raw)
    config = family.parse(fields)
    if fields.problems:
        raise UsageError(f"{where}: {'; '.join(fields.problems)}")
    return config
