"""Writes small random checkpoints that talk: real Hugging Face directories whose greedy text keeps changing.

Needs numpy and safetensors only, neither torch nor transformers. The bytes depend on the arguments alone: weights come
from a counter-based integer generator, through operations that IEEE arithmetic rounds alike everywhere.
"""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kernel.errors import UsageError

Floats = NDArray[np.float32]

EMBEDDING_STD: Final = 0.3
EXPERT_GAIN: Final = 4.0
"""A small embedding and strong experts: the residual is then mostly what the layers made of the context. With weak
layers the next token follows from the last one alone and greedy text runs in a short circle; with strong attention it
converges to one token; with a large tied embedding each token predicts itself."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser; uint64 arithmetic wraps."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x


class _Noise:
    """Uniform numbers with a given standard deviation, a fresh stream for each tensor."""

    def __init__(self, seed: int) -> None:
        self._seed, self._streams = seed, 0

    def __call__(self, *shape: int, std: float) -> Floats:
        self._streams += 1
        key = _mix(np.array([(self._seed << 20) + self._streams & (1 << 64) - 1], dtype=np.uint64))
        bits = _mix(key + np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        return (unit * np.float32(std * sqrt(3.0))).reshape(shape)


def write_checkpoint(
    path: str | Path,
    *,
    vocab: int = 256,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    experts: int = 8,
    top_k: int = 2,
    expert_width: int = 32,
    dense_layers: tuple[int, ...] = (),
    dense_width: int = 96,
    tied: bool = False,
    attention_bias: bool = False,
    norm_topk_prob: bool = True,
    rope_theta: float = 10000.0,
    max_positions: int = 4096,
    seed: int = 0,
    fused: bool = False,
) -> Path:
    """Write a float32 `qwen3_moe` checkpoint into the directory `path` (created) and return it.

    head_dim: numbers in a head, by default hidden / heads. dense_layers: layers with a plain MLP of `dense_width`
    columns. fused: one tensor for all experts of a layer, and the config spelling of transformers 5, in place of one
    for each expert and that of hub checkpoints. Raises UsageError when a size is below 1.
    """
    sizes = {
        "vocab": vocab,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "experts": experts,
    }
    for name, size in (*sizes.items(), ("top_k", top_k), ("expert_width", expert_width), ("dense_width", dense_width)):
        if size < 1:
            raise UsageError(f"{name}={size}: at least 1 is needed")
    dim = head_dim or max(1, hidden // heads)
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": dense_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense_layers),
        "moe_intermediate_size": expert_width,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": norm_topk_prob,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if fused:
        rope = {"rope_type": "default", "rope_theta": rope_theta}
        config |= {"num_local_experts": experts, "rope_parameters": rope, "dtype": "float32"}
    else:
        config |= {"num_experts": experts, "rope_theta": rope_theta, "rope_scaling": None, "torch_dtype": "float32"}
    noise = _Noise(seed)
    tensors: dict[str, Floats] = {"model.embed_tokens.weight": noise(vocab, hidden, std=EMBEDDING_STD)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{base}.{norm}.weight"] = 1 + noise(hidden, std=0.1)
        tensors |= _attention(noise, f"{base}.self_attn", hidden, heads, kv_heads, dim, attention_bias)
        mlp = f"{base}.mlp"
        if layer in dense_layers:
            tensors |= _columns(noise, mlp, hidden, dense_width)
            continue
        tensors[f"{mlp}.gate.weight"] = noise(experts, hidden, std=sqrt(2.0 / hidden))
        each = [_columns(noise, f"{mlp}.experts.{e}", hidden, expert_width) for e in range(experts)]
        tensors |= _fuse(f"{mlp}.experts", each) if fused else {name: t for one in each for name, t in one.items()}
    tensors["model.norm.weight"] = 1 + noise(hidden, std=0.1)
    if not tied:
        tensors["lm_head.weight"] = noise(vocab, hidden, std=1.0 / sqrt(hidden))
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return directory


def _attention(
    noise: _Noise, base: str, hidden: int, heads: int, kv_heads: int, dim: int, bias: bool
) -> dict[str, Floats]:
    tensors = {f"{base}.{norm}.weight": 1 + noise(dim, std=0.1) for norm in ("q_norm", "k_norm")}
    shapes = {
        "q": (heads * dim, hidden),
        "k": (kv_heads * dim, hidden),
        "v": (kv_heads * dim, hidden),
        "o": (hidden, heads * dim),
    }
    for name, (rows, columns) in shapes.items():
        tensors[f"{base}.{name}_proj.weight"] = noise(rows, columns, std=1.0 / sqrt(columns))
        if bias:
            tensors[f"{base}.{name}_proj.bias"] = noise(rows, std=0.1)
    return tensors


def _columns(noise: _Noise, base: str, hidden: int, width: int) -> dict[str, Floats]:
    return {
        f"{base}.gate_proj.weight": noise(width, hidden, std=1.0 / sqrt(hidden)),
        f"{base}.up_proj.weight": noise(width, hidden, std=1.0 / sqrt(hidden)),
        f"{base}.down_proj.weight": noise(hidden, width, std=EXPERT_GAIN / sqrt(width)),
    }


def _fuse(base: str, each: list[dict[str, Floats]]) -> dict[str, Floats]:
    gates, ups, downs = (
        [one[name] for one in each for name in one if f".{part}_proj." in name] for part in ("gate", "up", "down")
    )
    return {
        f"{base}.gate_up_proj": np.concatenate((np.stack(gates), np.stack(ups)), axis=1),
        f"{base}.down_proj": np.stack(downs),
    }
