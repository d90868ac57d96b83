"""Qwen3-MoE on one rank: one forward for prefill and decode, over shards of the weights and a paged KV pool.

Shapes use n (own fed tokens), full (rows of all replicas), Q and K (this rank's query and KV heads), D (head_dim).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel.errors import UsageError
from kernel.request import Row, Sampled
from models.attention import Batch, KVPool, attend
from models.checkpoint import Checkpoint
from models.config import Qwen3MoeConfig, read_config
from models.experts import Experts, route
from models.layers import Norm, Rotary, embed, ints
from models.qwen3_moe_weights import Weights, read_weights
from models.sampling import sample
from models.shards import dtype_name, shard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.ports import Step
    from kernel.topology import World


class Qwen3Moe:
    """A `kernel.ports.Model`. Holds no state of a forward, so prefill and decode may run at the same time.

    layers: decoder layers. pool: keys and values. slots: the last sampled token of each slot, [slots] int64.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        world: World,
        rank: int,
        weights: Weights,
        *,
        blocks: int,
        block_size: int,
        slots: int,
    ) -> None:
        part = shard(config, world, rank)
        self.config, self.layers = config, config.layers
        self._world, self._rank = world, rank
        dtype, device = weights.norm.dtype, str(weights.norm.device)
        self._dtype, self._device, self._leader = dtype, device, part.leader
        self._first_id, self._whole_vocabulary = part.vocab.start, len(part.vocab) == config.vocab_size
        self._q, self._k = len(part.heads), len(part.kv_heads)
        self.pool = KVPool(config.layers, blocks, self._k, block_size, config.head_dim, dtype, device)
        self.slots = torch.zeros(slots, dtype=torch.int64, device=device)
        self._rotary = Rotary(config.head_dim, config.rope_theta, device)
        self._take(weights)

    def reload(self, path: str) -> None:
        """See `kernel.ports.Model`."""
        if read_config(path) != self.config:
            raise UsageError(f"{path}: its config differs from that of the weights in use")
        with Checkpoint(path) as checkpoint:
            new = read_weights(checkpoint, self.config, self._world, self._rank, self._dtype, self._device)
        self._take(new)

    def _take(self, weights: Weights) -> None:
        config, self.weights = self.config, weights
        eps = config.rms_norm_eps
        self._norms = tuple(
            (Norm(layer.norm_in, eps), Norm(layer.attention.norm, eps), Norm(layer.norm_post, eps))
            for layer in weights.layers
        )
        self._norm = Norm(weights.norm, eps)
        held = (layer.experts for layer in weights.layers)
        self._experts = tuple(Experts(part.up, part.down, part.first, config.experts) for part in held)

    async def forward(self, step: Step, rows: Sequence[Row]) -> list[Sampled | None]:
        """One forward; see `kernel.ports.Model`. All sites of the program run, also with no rows."""
        await step.boundary(0)
        batch = Batch(rows, self.pool)
        angles = self._rotary.angles(batch.positions, self._dtype)
        hidden = step.embed(self._embed(rows, batch))
        for index in range(self.layers):
            partial = self._attention(index, hidden, angles, batch)
            if index:
                await step.boundary(index)
            full = step.gather(index, partial)
            residual = step.own(full)
            hidden = residual + step.scatter(index, self._mixture(index, full))
        return self._sample(step, rows, batch, hidden)

    # -- inside -------------------------------------------------------------------------------------------------

    def _embed(self, rows: Sequence[Row], batch: Batch) -> Tensor:
        """[n] ids, those that the device keeps in slots among them, to this shard's [n, hidden]."""
        kept = [number for number, row in enumerate(rows) if row.tokens is None]
        if len(kept) == batch.tokens:
            tokens = self.slots.index_select(0, batch.slots)
        else:
            tokens = ints([token for row in rows for token in (row.tokens or (0,))], self._device)
            if kept:
                last = self.slots.index_select(0, batch.slots)[kept]
                tokens.index_copy_(0, ints([batch.first[number] for number in kept], self._device), last)
        return embed(self.weights.embed, self._first_id, tokens, self._whole_vocabulary)

    def _attention(self, index: int, hidden: Tensor, angles: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """This rank's heads' part of a layer's attention, the leader's with the residual: [n, hidden] twice."""
        weights, q, k = self.weights.layers[index].attention, self._q, self._k
        norm, norm_qk, _ = self._norms[index]
        x = norm(hidden)
        qkv = torch.mm(x, weights.qkv) if weights.qkv_bias is None else torch.addmm(weights.qkv_bias, x, weights.qkv)
        heads = qkv.view(batch.tokens, q + 2 * k, self.config.head_dim)
        turning, kv = heads[:, : q + k], heads[:, q:]
        self._rotary.turn(norm_qk(turning), angles, out=turning)
        self.pool.write(index, batch.cells, kv)
        attended = attend(heads[:, :q], kv, self.pool, index, batch)
        if not self._leader:
            return torch.mm(attended, weights.out)
        out = torch.addmm(hidden, attended, weights.out)
        return out if weights.out_bias is None else out.add_(weights.out_bias)

    def _mixture(self, index: int, full: Tensor) -> Tensor:
        """This rank's experts' and columns' part: [full, hidden] -> [full, hidden]."""
        experts, router = self._experts[index], self.weights.layers[index].experts.router
        x = self._norms[index][2](full)
        if router is None:
            return experts.plain(x)
        return experts(x, *route(x, router, self.config.experts_per_token, self.config.norm_topk_prob))

    def _sample(self, step: Step, rows: Sequence[Row], batch: Batch, hidden: Tensor) -> list[Sampled | None]:
        """Draw from the last fed token of each row that asks, keep the draws in the slots and return them."""
        drawing = [number for number, row in enumerate(rows) if row.sample is not None]
        if len(drawing) != hidden.shape[0]:
            last = [batch.first[number] + rows[number].fed - 1 for number in drawing]
            hidden = hidden.index_select(0, ints(last, self._device))
        logits = step.head(torch.mm(self._norm(hidden), self.weights.head))[:, : self.config.vocab_size]
        if not drawing:
            return [None] * len(rows)
        chosen = rows if len(drawing) == len(rows) else [rows[number] for number in drawing]
        params = [row.sample for row in chosen if row.sample is not None]
        tokens, logprobs = sample(logits, params, [row.start + row.fed for row in chosen])
        slots = batch.slots if chosen is rows else batch.slots[drawing]
        self.slots.index_copy_(0, slots, tokens)
        drawn = map(Sampled, tokens.tolist(), logprobs.tolist())
        if chosen is rows:
            return list(drawn)
        return [None if row.sample is None else next(drawn) for row in rows]


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
) -> Qwen3Moe:
    """Read this rank's shard of the checkpoint directory `path`. See `models.load`."""
    config = read_config(path)
    if not isinstance(config, Qwen3MoeConfig):
        raise UsageError(f"{path}: a {config.model_type} checkpoint, not qwen3_moe")
    with Checkpoint(path) as checkpoint:
        weights = read_weights(checkpoint, config, world, rank, getattr(torch, dtype_name(dtype)), device)
    return Qwen3Moe(config, world, rank, weights, blocks=blocks, block_size=block_size, slots=slots)
