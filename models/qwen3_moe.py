"""Qwen3-MoE on one rank: one forward for prefill and decode, over shards of the weights and a paged KV pool.

Shapes use n (own fed tokens), full (rows of all replicas), Q and K (this rank's query and KV heads), D (head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel.errors import UsageError
from kernel.ports import Step
from kernel.request import Row, Sampled
from kernel.topology import World
from models.attention import Batch, KVPool, attend
from models.checkpoint import Checkpoint
from models.config import Qwen3MoeConfig, read_config
from models.experts import mixture, mlp, route
from models.layers import Norm, Rotary, embed
from models.qwen3_moe_weights import Layer, Weights, read_weights
from models.sampling import sample
from models.shards import dtype_name, shard


class Qwen3Moe:
    """A `kernel.ports.Model`. Holds no state of a forward, so prefill and decode may run at the same time.

    layers: decoder layers. pool: keys and values. slots: the last sampled token of each slot, [slots] int64.
    """

    def __init__(
        self, config: Qwen3MoeConfig, world: World, rank: int, weights: Weights, *, blocks: int, block_size: int, slots: int
    ) -> None:
        part = shard(config, world, rank)
        self.config, self.layers, self.weights = config, config.layers, weights
        dtype, device = weights.norm.dtype, str(weights.norm.device)
        self._dtype, self._device, self._leader = dtype, device, part.leader
        self._first_id, self._whole_vocabulary = part.vocab.start, len(part.vocab) == config.vocab_size
        self._q, self._k = len(part.heads), len(part.kv_heads)
        self.pool = KVPool(config.layers, blocks, self._k, block_size, config.head_dim, dtype, device)
        self.slots = torch.zeros(slots, dtype=torch.int64, device=device)
        self._rotary = Rotary(config.head_dim, config.rope_theta, device)
        eps = config.rms_norm_eps
        self._norms = tuple(
            (Norm(layer.norm_in, eps), Norm(layer.attention.norm, eps), Norm(layer.norm_post, eps))
            for layer in weights.layers
        )
        self._norm = Norm(weights.norm, eps)

    async def forward(self, step: Step, rows: Sequence[Row]) -> list[Sampled | None]:
        """One forward; see `kernel.ports.Model`. All sites of the program run, also with no rows."""
        await step.boundary(0)
        batch = Batch(rows, self.pool, self._dtype)
        angles = self._rotary.angles(batch.positions, self._dtype)
        hidden = step.embed(self._embed(rows))
        for index, layer in enumerate(self.weights.layers):
            norm_in, norm_qk, norm_post = self._norms[index]
            partial = self._attention(index, layer, norm_in(hidden), norm_qk, hidden, angles, batch)
            if index:
                await step.boundary(index)
            full = step.gather(index, partial)
            residual = step.own(full)
            hidden = residual + step.scatter(index, self._experts(layer, norm_post(full)))
        return self._sample(step, rows, hidden)

    # -- inside -------------------------------------------------------------------------------------------------

    def _embed(self, rows: Sequence[Row]) -> Tensor:
        """[n] ids, those that the device keeps in slots among them, to this shard's [n, hidden]."""
        given = [token for row in rows for token in (row.tokens or (0,))]
        kept = [(at, row.slot) for at, row in _starts(rows) if row.tokens is None]
        slots = torch.tensor([slot for _, slot in kept], dtype=torch.int64, device=self._device)
        if len(kept) == len(given):
            tokens = self.slots.index_select(0, slots)
        else:
            tokens = torch.tensor(given, dtype=torch.int64, device=self._device)
            if kept:
                at = torch.tensor([at for at, _ in kept], dtype=torch.int64, device=self._device)
                tokens.index_copy_(0, at, self.slots.index_select(0, slots))
        return embed(self.weights.embed, self._first_id, tokens, self._whole_vocabulary)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, norm: Norm, residual: Tensor, angles: tuple[Tensor, Tensor], batch: Batch
    ) -> Tensor:
        """This rank's heads' part of the layer's attention, and on the leader the residual: [n, hidden]."""
        weights, q, k = layer.attention, self._q, self._k
        heads = F.linear(x, weights.qkv, weights.qkv_bias).view(batch.tokens, q + 2 * k, self.config.head_dim)
        turning = heads[:, : q + k]
        self._rotary.turn(norm(turning), angles, out=turning)
        kv = heads[:, q:]
        self.pool.write(index, batch.write, kv)
        attended = attend(heads[:, :q], kv, self.pool, index, batch)
        if not self._leader:
            return torch.mm(attended, weights.out)
        out = torch.addmm(residual, attended, weights.out)
        return out if weights.out_bias is None else out.add_(weights.out_bias)

    def _experts(self, layer: Layer, x: Tensor) -> Tensor:
        """This rank's experts' and columns' part: [full, hidden] -> [full, hidden]."""
        config, experts = self.config, layer.experts
        if experts.router is None:
            return mlp(x, experts.up[0], experts.down[0])
        share, chosen = route(x, experts.router, config.experts_per_token, config.norm_topk_prob)
        return mixture(x, share, chosen, experts.first, experts.up, experts.down, config.experts)

    def _sample(self, step: Step, rows: Sequence[Row], hidden: Tensor) -> list[Sampled | None]:
        """Draw from the last fed token of each row that asks, keep the draws in the slots and return them."""
        drawing = [(at + row.fed - 1, row) for at, row in _starts(rows) if row.sample is not None]
        if len(drawing) != hidden.shape[0]:
            hidden = hidden.index_select(0, torch.tensor([at for at, _ in drawing], dtype=torch.int64, device=self._device))
        shard = F.linear(self._norm(hidden), self.weights.head)
        logits = step.head(shard)[:, : self.config.vocab_size]
        results: list[Sampled | None] = [None] * len(rows)
        if drawing:
            params = [row.sample for _, row in drawing if row.sample is not None]
            tokens, logprobs = sample(logits, params, [row.start + row.fed for _, row in drawing])
            slots = torch.tensor([row.slot for _, row in drawing], dtype=torch.int64, device=self._device)
            self.slots.index_copy_(0, slots, tokens)
            drawn = iter(map(Sampled, tokens.tolist(), logprobs.tolist()))
            results = [None if row.sample is None else next(drawn) for row in rows]
        return results


def _starts(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """(index of its first fed token, row) of each row."""
    starts, at = [], 0
    for row in rows:
        starts.append((at, row))
        at += row.fed
    return starts


def load(
    path: str | Path, world: World, rank: int, *, blocks: int, block_size: int, slots: int, dtype: object = "float32",
    device: str = "cpu",
) -> Qwen3Moe:
    """Read this rank's shard of the checkpoint directory `path`. See `models.load`."""
    config = read_config(path)
    if not isinstance(config, Qwen3MoeConfig):
        raise UsageError(f"{path}: a {config.model_type} checkpoint, not qwen3_moe")
    with Checkpoint(path) as checkpoint:
        weights = read_weights(checkpoint, config, world, rank, getattr(torch, dtype_name(dtype)), device)
    return Qwen3Moe(config, world, rank, weights, blocks=blocks, block_size=block_size, slots=slots)
