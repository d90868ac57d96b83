"""Qwen3-MoE's tensor names, and one rank's weights read from a checkpoint: the only place that knows the names.

Expert weights are stored per expert (hub checkpoints, transformers' `save_pretrained`) or fused, all experts of a layer
in one tensor (transformers 5's own parameters); a checkpoint may mix both by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.weights.checkpoint import Tensors, empty
from models.weights.shards import Shard, Span, shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from kernel.topology import World
    from models.config import Qwen3MoeConfig

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's attention shard: Q query and K KV heads of D numbers.

    qkv: [hidden, (Q + 2K) * D], columns of q, k, v. qkv_bias: [(Q + 2K) * D] or None. norm: [Q + K, D], q_norm for each
    query head, then k_norm for each KV head. out: [Q * D, hidden], o_proj transposed. out_bias: [hidden], None except
    on the leader.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    norm: Tensor
    out: Tensor
    out_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's expert shard: E experts of I columns. A plain MLP is one expert without a router.

    router: [hidden, all experts] or None. first: index of this rank's first expert. up: [E, 2I, hidden], gate rows then
    up rows. down: [E, I, hidden], down_proj transposed.
    """

    router: Tensor | None
    first: int
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. norm_in, norm_post: [hidden]."""

    norm_in: Tensor
    attention: AttentionWeights
    norm_post: Tensor
    experts: ExpertWeights


@dataclass(frozen=True, slots=True)
class Weights:
    """One rank's weights: what a matrix product multiplies with is a [in, out] view of [out, in] memory.

    embed: [vocab rows, hidden]. norm: [hidden]. head: [hidden, vocab rows], the embedding's memory when tied.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    def tensors(self) -> Iterator[Tensor]:
        """Each tensor once."""
        yield self.embed
        for layer in self.layers:
            a, e = layer.attention, layer.experts
            optional = (a.qkv_bias, a.out_bias, e.router)
            yield from (layer.norm_in, a.qkv, a.norm, a.out, layer.norm_post, e.up, e.down)
            yield from (tensor for tensor in optional if tensor is not None)
        yield self.norm
        if self.head.data_ptr() != self.embed.data_ptr():
            yield self.head


def expected(config: Qwen3MoeConfig, present: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model; experts fused where `present` holds a layer's fused tensor."""
    h, d, e, i = config.hidden_size, config.head_dim, config.experts, config.expert_width
    q, k = config.heads * d, config.kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for layer in range(config.layers):
        base = f"model.layers.{layer}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        shapes[f"{base}.input_layernorm.weight"] = shapes[f"{base}.post_attention_layernorm.weight"] = (h,)
        shapes[f"{attention}.q_norm.weight"] = shapes[f"{attention}.k_norm.weight"] = (d,)
        for name, rows, columns in (("q", q, h), ("k", k, h), ("v", k, h), ("o", h, q)):
            shapes[f"{attention}.{name}_proj.weight"] = (rows, columns)
            if config.attention_bias:
                shapes[f"{attention}.{name}_proj.bias"] = (rows,)
        if layer in config.dense_layers:
            shapes.update(_mlp(mlp, h, config.dense_width))
            continue
        shapes[f"{mlp}.gate.weight"] = (e, h)
        if _fused(mlp, present):
            shapes[f"{mlp}.experts.gate_up_proj"] = (e, 2 * i, h)
            shapes[f"{mlp}.experts.down_proj"] = (e, h, i)
        else:
            for expert in range(e):
                shapes.update(_mlp(f"{mlp}.experts.{expert}", h, i))
    return shapes


def read_weights(
    checkpoint: Tensors, config: Qwen3MoeConfig, world: World, rank: int, dtype: torch.dtype, device: str = "cpu"
) -> Weights:
    """Check `checkpoint` against `config` and read the part of `rank`, and nothing else.

    Raises UsageError when the model does not divide over the world, and when tensors are missing, unexpected or
    misshapen.
    """
    part = shard(config, world, rank)
    check_tensors(checkpoint, config)
    return _Reader(checkpoint, config, part, dtype, device).weights()


def check_tensors(checkpoint: Tensors, config: Qwen3MoeConfig) -> None:
    """Raise UsageError when tensors are missing, unexpected or misshapen, with all of them."""
    checkpoint.check(expected(config, checkpoint), allowed=("lm_head.weight",) if config.tie_word_embeddings else ())


def _mlp(base: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{base}.gate_proj.weight": (width, hidden),
        f"{base}.up_proj.weight": (width, hidden),
        f"{base}.down_proj.weight": (hidden, width),
    }


def _fused(mlp: str, present: Tensors) -> bool:
    return f"{mlp}.experts.gate_up_proj" in present.shapes or f"{mlp}.experts.down_proj" in present.shapes


class _Reader:
    """Copies one rank's slices into their places."""

    def __init__(
        self, checkpoint: Tensors, config: Qwen3MoeConfig, part: Shard, dtype: torch.dtype, device: str
    ) -> None:
        self._checkpoint, self._config, self._part = checkpoint, config, part
        self._dtype, self._device = dtype, device

    def weights(self) -> Weights:
        embed = self._vocabulary("model.embed_tokens.weight")
        return Weights(
            embed=embed,
            layers=tuple(self._layer(index) for index in range(self._config.layers)),
            norm=self._whole("model.norm.weight"),
            head=(embed if self._config.tie_word_embeddings else self._vocabulary("lm_head.weight")).t(),
        )

    def _layer(self, index: int) -> LayerWeights:
        base = f"model.layers.{index}"
        dense = index in self._config.dense_layers
        return LayerWeights(
            norm_in=self._whole(f"{base}.input_layernorm.weight"),
            attention=self._attention(f"{base}.self_attn"),
            norm_post=self._whole(f"{base}.post_attention_layernorm.weight"),
            experts=self._plain(f"{base}.mlp") if dense else self._sparse(f"{base}.mlp"),
        )

    def _attention(self, base: str) -> AttentionWeights:
        config, part = self._config, self._part
        d, h, q, k = config.head_dim, config.hidden_size, len(part.heads), len(part.kv_heads)
        qkv, norm, out = self._empty((q + 2 * k) * d, h), self._empty(q + k, d), self._empty(q * d, h)
        bias = self._empty((q + 2 * k) * d) if config.attention_bias else None
        start = 0
        for name, heads in (("q", part.heads), ("k", part.kv_heads), ("v", part.kv_heads)):
            rows, stop = slice(heads.start * d, heads.stop * d), start + len(heads) * d
            self._read(f"{base}.{name}_proj.weight", (rows, ALL), qkv[start:stop])
            if bias is not None:
                self._read(f"{base}.{name}_proj.bias", (rows,), bias[start:stop])
            start = stop
        norm[:q] = self._whole(f"{base}.q_norm.weight")
        norm[q:] = self._whole(f"{base}.k_norm.weight")
        self._read(f"{base}.o_proj.weight", (ALL, slice(part.heads.start * d, part.heads.stop * d)), out.t())
        out_bias = self._whole(f"{base}.o_proj.bias") if config.attention_bias and part.leader else None
        return AttentionWeights(qkv.t(), bias, norm, out, out_bias)

    def _sparse(self, base: str) -> ExpertWeights:
        part, h = self._part, self._config.hidden_size
        i, wanted = len(part.columns), part.experts
        up, down = self._empty(len(wanted), 2 * i, h), self._empty(len(wanted), i, h)
        if _fused(base, self._checkpoint):
            width = self._config.expert_width
            gate = slice(part.columns.start, part.columns.stop)
            second = slice(width + part.columns.start, width + part.columns.stop)
            self._read(f"{base}.experts.gate_up_proj", (wanted.slice, gate, ALL), up[:, :i])
            self._read(f"{base}.experts.gate_up_proj", (wanted.slice, second, ALL), up[:, i:])
            self._read(f"{base}.experts.down_proj", (wanted.slice, ALL, gate), down.transpose(1, 2))
        else:
            for local, expert in enumerate(range(wanted.start, wanted.stop)):
                self._columns(f"{base}.experts.{expert}", part.columns, up[local], down[local])
        return ExpertWeights(self._whole(f"{base}.gate.weight").t(), wanted.start, up, down)

    def _plain(self, base: str) -> ExpertWeights:
        i, h = len(self._part.dense), self._config.hidden_size
        up, down = self._empty(1, 2 * i, h), self._empty(1, i, h)
        self._columns(base, self._part.dense, up[0], down[0])
        return ExpertWeights(None, 0, up, down)

    def _columns(self, base: str, columns: Span, up: Tensor, down: Tensor) -> None:
        i = len(columns)
        self._read(f"{base}.gate_proj.weight", (columns.slice, ALL), up[:i])
        self._read(f"{base}.up_proj.weight", (columns.slice, ALL), up[i:])
        self._read(f"{base}.down_proj.weight", (ALL, columns.slice), down.t())

    def _vocabulary(self, name: str) -> Tensor:
        rows, size = self._part.vocab, self._config.vocab_size
        held = slice(min(rows.start, size), min(rows.stop, size))
        table = self._empty(len(rows), self._config.hidden_size)
        self._read(name, (held, ALL), table[: held.stop - held.start])
        return table

    def _whole(self, name: str) -> Tensor:
        shape = self._checkpoint.shapes[name]
        out = self._empty(*shape)
        self._read(name, (ALL,) * len(shape), out)
        return out

    def _empty(self, *shape: int) -> Tensor:
        return empty(shape, self._dtype, self._device)

    def _read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        self._checkpoint.read(name, index, out)
