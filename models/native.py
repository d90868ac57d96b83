"""Decode of a Qwen3-MoE in the CPU world by the kernels of native.cpp, one call for all that lies between two sites.

torch's operations take a few microseconds each before they compute anything, and the interpreter between them: an
iteration of a small model is hundreds of them. Prefill, whose operations are large, stays with torch.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from models.native_build import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.request import Row
    from models.attention import KVPool
    from models.config import Qwen3MoeConfig
    from models.qwen3_moe_weights import LayerWeights, Weights

_SIZES = (
    "hidden", "q", "k", "dim", "block_size", "experts", "first", "local", "columns", "top_k", "normalise", "leader",
)  # fmt: skip
_POINTERS = (
    "pool", "norm_in", "norm_heads", "qkv", "qkv_bias", "out", "out_bias", "norm_post", "router", "up", "down",
)  # fmt: skip


class _Layer(ctypes.Structure):
    """`Layer` of native.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


class _Batch(ctypes.Structure):
    """`Batch` of native.cpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "tables", "cos", "sin")),
    )


class Decoding:
    """The rows of one iteration, each of one token that its slot keeps, where the kernels read them. Made once.

    rows: those of the iteration at hand. slots: [rows] int64, a view.
    """

    def __init__(self, slots: int, frequencies: Tensor) -> None:
        """slots: how many there are. frequencies: `Rotary.frequencies`."""
        self._frequencies, half = frequencies.contiguous(), frequencies.shape[0]
        self._positions, self._slots = np.zeros(slots, dtype=np.int64), np.zeros(slots, dtype=np.int64)
        self._angles = np.zeros((2, slots, half), dtype=np.float32)
        self._known: list[tuple[int, ...] | None] = [None] * slots
        self._all_slots = torch.from_numpy(self._slots)
        self.batch = _Batch(
            positions=self._positions.ctypes.data,
            slots=self._slots.ctypes.data,
            cos=self._angles[0].ctypes.data,
            sin=self._angles[1].ctypes.data,
        )
        self.at = ctypes.addressof(self.batch)
        self._begin = _function("begin", "ppl")
        self._tables = np.zeros((slots, 0), dtype=np.int32)
        self._widen(64)
        self.rows = 0
        self.slots = self._all_slots[:0]

    def begin(self, rows: Sequence[Row]) -> None:
        """Take these rows. Their tables are copied when another turn comes with a slot, not in every iteration."""
        count, known = len(rows), self._known
        for row in rows:
            if known[row.slot] is not row.blocks:
                self._learn(row.slot, row.blocks)
        if count != self.rows:
            self.rows = self.batch.rows = count
            self.slots = self._all_slots[:count]
        self._positions[:count] = [row.start for row in rows]
        self._slots[:count] = [row.slot for row in rows]
        self._begin(self.at, self._frequencies.data_ptr(), self._frequencies.shape[0])

    def _learn(self, slot: int, blocks: tuple[int, ...]) -> None:
        if len(blocks) > self._tables.shape[1]:
            self._widen(2 * len(blocks))
        self._tables[slot, : len(blocks)] = blocks
        self._known[slot] = blocks

    def _widen(self, depth: int) -> None:
        tables = np.zeros((len(self._known), depth), dtype=np.int32)
        tables[:, : self._tables.shape[1]] = self._tables
        self._tables = tables
        self.batch.depth, self.batch.tables = depth, self._tables.ctypes.data


class Native:
    """One rank's layers and head. Weights are packed beside those of prefill: twice their memory.

    rows: those that the kernels work on. heads: this rank's query heads. leader: whether this rank adds the residual to
    the attention's part.
    """

    def __init__(
        self, config: Qwen3MoeConfig, weights: Weights, pool: KVPool, rows: Decoding, heads: int, leader: bool
    ) -> None:
        self._config, self._held, self.rows = config, list[Tensor](), rows
        name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[weights.norm.dtype]
        self._panel = int(kernels().panel())
        self._pack = _function(f"pack_{name}", "pllllp")
        self._attention = _function(f"attention_{name}", "pppp")
        self._mixture = _function(f"mixture_{name}", "plpp")
        self._head_, self._greedy = _function(f"head_{name}", "ppllldpp"), _function(f"greedy_{name}", "plllpp")
        self._layers = [self._layer(layer, pool, index, heads, leader) for index, layer in enumerate(weights.layers)]
        self._at = [ctypes.addressof(layer) for layer in self._layers]
        self._head = (self._keep(weights.norm), self._packed(weights.head), *weights.head.shape)

    def attention(self, index: int, hidden: Tensor) -> Tensor:
        """See `Qwen3Moe.attention`."""
        x, out = hidden.contiguous(), torch.empty_like(hidden)
        self._attention(self._at[index], self.rows.at, x.data_ptr(), out.data_ptr())
        return out

    def mixture(self, index: int, full: Tensor) -> Tensor:
        """See `Qwen3Moe.mixture`."""
        x, out = full.contiguous(), torch.empty_like(full)
        self._mixture(self._at[index], x.shape[0], x.data_ptr(), out.data_ptr())
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary: [n, hidden] -> [n, vocab rows]."""
        norm, weight, width, vocab = self._head
        x, out = hidden.contiguous(), hidden.new_empty((hidden.shape[0], vocab))
        eps = self._config.rms_norm_eps
        self._head_(norm, weight, x.shape[0], width, vocab, eps, x.data_ptr(), out.data_ptr())
        return out

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `sampling.sample` at temperature 0: (tokens [n] int64, log-probabilities [n] float32)."""
        n, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        tokens, logprobs = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.float32)
        self._greedy(logits.data_ptr(), n, logits.stride(0), vocab, tokens.data_ptr(), logprobs.data_ptr())
        return tokens, logprobs

    # -- inside -------------------------------------------------------------------------------------------------

    def _layer(self, layer: LayerWeights, pool: KVPool, index: int, heads: int, leader: bool) -> _Layer:
        config, attention, experts = self._config, layer.attention, layer.experts
        local, columns, hidden = experts.down.shape
        return _Layer(
            hidden=hidden, q=heads, k=pool.kv_heads, dim=pool.head_dim, block_size=pool.block_size,
            experts=config.experts, first=experts.first, local=local, columns=columns, top_k=config.experts_per_token,
            normalise=config.norm_topk_prob, leader=leader, eps=config.rms_norm_eps,
            pool=pool.storage[index].data_ptr(), norm_in=self._keep(layer.norm_in),
            norm_heads=self._keep(attention.norm), qkv=self._packed(attention.qkv),
            qkv_bias=self._keep(attention.qkv_bias), out=self._packed(attention.out),
            out_bias=self._keep(attention.out_bias), norm_post=self._keep(layer.norm_post),
            router=None if experts.router is None else self._packed(experts.router),
            up=self._packed(experts.up.transpose(1, 2)), down=self._packed(experts.down),
        )  # fmt: skip

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()

    def _packed(self, weight: Tensor) -> int:
        """A matrix [in, out], or several [E, in, out], in panels of columns."""
        every = weight if weight.dim() == 3 else weight.unsqueeze(0)
        count, rows, columns = every.shape
        out = weight.new_empty((count, -(-columns // self._panel) * self._panel * rows))
        for one, to in zip(every, out, strict=True):
            self._pack(one.data_ptr(), rows, columns, one.stride(0), one.stride(1), to.data_ptr())
        self._held.append(out)
        return out.data_ptr()


def _function(name: str, kinds: str) -> Any:
    """A kernel. kinds: of its arguments: p pointer, l whole number, d double."""
    found = kernels()[name]  # of this name alone: argument types belong to whoever asks
    types: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "d": ctypes.c_double}
    found.argtypes, found.restype = tuple(types[kind] for kind in kinds), None
    return found
