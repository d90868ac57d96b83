"""Qwen3-MoE on one rank: one forward for prefill and decode, over shards of the weights and a paged KV pool.

Shapes use n (own fed tokens), full (rows of all replicas), Q and K (this rank's query and KV heads), D (head_dim).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel.errors import UsageError
from models.attention.pool import KVPool
from models.config import Qwen3MoeConfig, read_config
from models.cuda.experts_fp8 import Fp8Experts, check_fp8, quantised
from models.cuda.fused import parts
from models.cuda.inputs import DeviceSource, StaticInputs
from models.experts import Experts, route
from models.inputs import HostSource, NativeDecode, NativePrefill
from models.layers import Rotary, embed
from models.products import product
from models.weights.checkpoint import Checkpoint
from models.weights.dummy import DummyTensors
from models.weights.qwen3_moe import Weights, check_tensors, read_weights
from models.weights.shards import dtype_name, shard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.ports import Step
    from kernel.request import Row, Sampled
    from kernel.topology import World
    from models.cuda.fused import Angles
    from models.experts import Mixture
    from models.inputs import Inputs, Source
    from models.native.forward import Fed, Native


class Qwen3Moe:
    """A `kernel.ports.Model`. Holds no state of a forward, so prefill and decode may run at the same time.

    layers: decoder layers. pool: keys and values. slots: the last sampled token of each slot, int64. scratch_block,
    scratch_slot: one more of each than asked for, for rows of padding (a device only; else -1). source: makes the
    inputs of eager forwards.
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
        attention: str = "reference",
        quantization: str | None = None,
        staged: bool | None = None,
        compiled: bool = False,
    ) -> None:
        """attention: `reference`, `flashinfer` or `flashinfer-fa2`. quantization: `fp8` expert weights, or None.

        compiled: layers by `models.native` (a CPU only). staged: inputs and results travel as on a device; None: where
        there is one.
        """
        part = shard(config, world, rank)
        self.config, self.layers = config, config.layers
        self.world, self._rank, self._quantization = world, rank, quantization
        dtype, device = weights.norm.dtype, weights.norm.device
        self._dtype, self._device, self._leader = dtype, str(device), part.leader
        self._first_id, self._whole_vocabulary = part.vocab.start, len(part.vocab) == config.vocab_size
        self._q, self._k = len(part.heads), len(part.kv_heads)
        on_device = device.type != "cpu" if staged is None else staged
        self.scratch_block, self.scratch_slot = (blocks, slots) if on_device else (-1, -1)
        self.pool = KVPool(config.layers, blocks + on_device, self._k, block_size, config.head_dim, dtype, self._device)
        self.slots = torch.zeros(slots + on_device, dtype=torch.int64, device=device)
        flash = None
        if attention != "reference":
            from models.attention.flashinfer import FlashAttention

            flash = FlashAttention(self.pool, self._q, device, fa3=attention == "flashinfer")
        if flash is None and not on_device:
            self.source: Source = HostSource(self.pool, self.slots)
        else:
            self.source = DeviceSource(self.pool, self.slots, config.vocab_size, flash)
        rotary = Rotary(config.head_dim, config.rope_theta, self._device)
        self._parts = parts(self.pool, rotary, config.rms_norm_eps)
        self._compiled = compiled
        self._take(weights)

    def reload(self, path: str) -> None:
        """See `kernel.ports.Model`. On a device the new weights move into the old ones' memory (graphs read it)."""
        if read_config(path) != self.config:
            raise UsageError(f"{path}: its config differs from that of the weights in use")
        where = self._device if self.scratch_block < 0 else "cpu"
        with Checkpoint(path) as checkpoint:
            new = read_weights(checkpoint, self.config, self.world, self._rank, self._dtype, where)
        if self.scratch_block < 0:
            self._take(new)
            return
        for old, fresh in zip(self.weights.tensors(), new.tensors(), strict=True):
            if old.numel():  # what was quantised is held elsewhere
                old.copy_(fresh)
        for held, layer in zip(self._experts, new.layers, strict=True):
            if isinstance(held, Fp8Experts):
                held.take(layer.experts.up, layer.experts.down)
        if self.slots.device.type == "cuda":
            torch.cuda.synchronize(self.slots.device)

    def _take(self, weights: Weights) -> None:
        config = self.config
        if self._compiled and isinstance(self.source, HostSource):
            from models.native.forward import Native

            splits = self.world.splits
            native = Native(
                config, weights, self.pool, self._q, leader=self._leader, slots=self.slots, experts=not splits
            )
            self.weights, self.source.native = weights, native
            if splits:
                self._take_experts(weights)
            return
        self._heads = tuple(
            self._parts.heads(index, layer.attention.norm) for index, layer in enumerate(weights.layers)
        )
        self._norm = self._parts.norm(weights.norm)
        attention = [layer.attention for layer in weights.layers]
        self._products = tuple((product(each.qkv, each.qkv_bias), product(each.out)) for each in attention)
        self._head = product(weights.head)
        self._take_experts(weights)

    def _take_experts(self, weights: Weights) -> None:
        config = self.config
        self._norms = tuple(
            (self._parts.norm(layer.norm_in), self._parts.norm(layer.norm_post)) for layer in weights.layers
        )
        experts: list[Mixture] = []
        for index, layer in enumerate(weights.layers):
            part = layer.experts
            if self._quantization is None or part.router is None:
                experts.append(Experts(part.up, part.down, part.first, config.experts))
            else:
                experts.append(Fp8Experts(part.up, part.down, part.first, config.experts))
                weights = quantised(weights, index)
        self.weights, self._experts = weights, tuple(experts)

    async def forward(self, step: Step, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        """One forward; see `kernel.ports.Model`. All sites of the program run, also with no rows."""
        await step.boundary(0)
        inputs = self.source.begin(step.phase, rows)
        if isinstance(inputs, NativeDecode) and step.alone:
            return inputs.at_once()
        return inputs.draw(await self.logits(step, inputs))

    async def logits(self, step: Step, inputs: Inputs | NativeDecode | NativePrefill) -> Tensor:
        """All of a forward between its inputs and its draws, from behind boundary 0: [drawing rows, vocab]."""
        # What lies between two sites: by torch's operations, or one call of ours each.
        body: _Eager | _Native
        if isinstance(inputs, NativeDecode | NativePrefill):
            body = _Native(inputs.native, inputs.fed)
        else:
            body = _Eager(self, inputs)
        hidden = step.embed(embed(self.weights.embed, self._first_id, inputs.ids(), self._whole_vocabulary))
        for index in range(self.layers):
            if step.exchanges:
                hidden = await self._exchanged(step, index, body.attention(index, hidden), inputs)
                continue
            partial = body.attention(index, hidden)
            if index:
                await step.boundary(index)
            full = step.gather(index, partial)
            residual = step.own(full)
            mixed = body.mixture(index, full)
            await step.inner(index)
            hidden = residual + step.scatter(index, mixed)
        logits: Tensor = step.head(body.head(inputs.pick(hidden)))
        return logits[:, : self.config.vocab_size]

    async def _exchanged(
        self, step: Step, index: int, partial: Tensor, inputs: Inputs | NativeDecode | NativePrefill
    ) -> Tensor:
        """One layer behind its attention, where rows travel to their experts: [n, hidden] -> [n, hidden]."""
        own, router = step.share(index, partial), self.weights.layers[index].experts.router
        assert router is not None, "a layer of one expert has nothing to exchange"
        x = self._norms[index][1](own)
        weights, chosen = route(x, router, self.config.experts_per_token, self.config.norm_topk_prob)
        if isinstance(inputs, StaticInputs):  # rows that fill a bucket go to nobody
            chosen = chosen.masked_fill(step.part(inputs.padding).unsqueeze(1), -1)
        step.notify(index, chosen)
        await step.notified(index)
        came = step.dispatch(index, x, weights)
        results = self._experts[index].received(came)
        await step.inner(index)
        hidden: Tensor = step.join(index, own + step.combine(index, results))
        return hidden

    # -- what layers are made of, by torch's operations ---------------------------------------------------------

    def angles(self, inputs: Inputs) -> Angles:
        """Of the fed tokens' positions."""
        return self._parts.angles(inputs.positions)

    def attention(self, index: int, hidden: Tensor, angles: Angles, inputs: Inputs) -> Tensor:
        """This rank's heads' part of a layer's attention, the leader's with the residual: [n, hidden] twice."""
        q, k, (qkv, project) = self._q, self._k, self._products[index]
        heads = qkv(self._norms[index][0](hidden)).view(inputs.tokens, q + 2 * k, self.config.head_dim)
        self._heads[index](heads, angles, inputs.cells)
        attended = inputs.attend(index, heads[:, :q], heads[:, q:])
        if not self._leader:
            return project(attended)
        out, bias = project.onto(attended, hidden), self.weights.layers[index].attention.out_bias
        return out if bias is None else out.add_(bias)

    def mixture(self, index: int, full: Tensor) -> Tensor:
        """This rank's experts' and columns' part: [full, hidden] -> [full, hidden]."""
        experts, router = self._experts[index], self.weights.layers[index].experts.router
        x = self._norms[index][1](full)
        if router is None:
            return experts.plain(x)
        return experts(x, *route(x, router, self.config.experts_per_token, self.config.norm_topk_prob))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary: [n, hidden] -> [n, vocab rows]."""
        return self._head(self._norm(hidden))


class _Eager:
    """One forward's layers by torch's operations."""

    __slots__ = ("_angles", "_inputs", "_model")

    def __init__(self, model: Qwen3Moe, inputs: Inputs) -> None:
        self._model, self._inputs, self._angles = model, inputs, model.angles(inputs)

    def attention(self, index: int, hidden: Tensor) -> Tensor:
        return self._model.attention(index, hidden, self._angles, self._inputs)

    def mixture(self, index: int, full: Tensor) -> Tensor:
        return self._model.mixture(index, full)

    def head(self, hidden: Tensor) -> Tensor:
        return self._model.head(hidden)


class _Native:
    """One forward's layers by kernels of our own."""

    __slots__ = ("_fed", "_native", "head", "mixture")

    def __init__(self, native: Native, fed: Fed) -> None:
        self._native, self._fed = native, fed
        fed.begin()
        self.mixture, self.head = native.mixture, native.head

    def attention(self, index: int, hidden: Tensor) -> Tensor:
        return self._native.attention(index, hidden, self._fed)


def check(path: str | Path, config: Qwen3MoeConfig) -> None:
    """See `models.check_weights`."""
    with Checkpoint(path) as checkpoint:
        check_tensors(checkpoint, config)
        for name in checkpoint.shapes:
            checkpoint.check_numbers(name)


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
    staged: bool | None = None,
) -> Qwen3Moe:
    """Read this rank's shard of the checkpoint directory `path`. See `models.load` and, for staged, `Qwen3Moe`."""
    config = read_config(path)
    if not isinstance(config, Qwen3MoeConfig):
        raise UsageError(f"{path}: a {config.model_type} checkpoint, not qwen3_moe")
    kind = getattr(torch, dtype_name(dtype))
    if attention != "reference":
        from models.attention.flashinfer import check_shape, library

        check_shape(config.head_dim, kind, torch.device(device))
        library()
    if quantization is not None:
        check_fp8(config, world, kind, torch.device(device))
    if torch.device(device).type == "cuda":
        # Settings of the process: float32 in full, and long sums (all experts of a row in one) not rounded halfway.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if weights == "dummy":
        held = read_weights(DummyTensors(path, config), config, world, rank, kind, device)
    else:
        with Checkpoint(path) as checkpoint:
            held = read_weights(checkpoint, config, world, rank, kind, device)
    model = Qwen3Moe(
        config,
        world,
        rank,
        held,
        blocks=blocks,
        block_size=block_size,
        slots=slots,
        attention=attention,
        quantization=quantization,
        staged=staged,
        compiled=compiled,
    )
    if torch.device(device).type == "cuda":
        # The phases' streams do not wait for the one that all this was enqueued on.
        torch.cuda.synchronize(device)
    return model
