"""A Qwen3-MoE in the CPU world by the kernels of native.cpp, one call for all that lies between two sites.

torch's operations take a few microseconds each before they compute anything, and so does the interpreter between them:
an iteration of a small model is hundreds of them. Prefill's are large, but pass over memory many times more.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from models.layers import Rotary
from models.native.build import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kernel.request import Row
    from models.attention.pool import KVPool
    from models.config import Qwen3MoeConfig
    from models.weights.qwen3_moe import LayerWeights, Weights

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


class _Model(ctypes.Structure):
    """`Model` of native.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "vocab")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("layer", "embed", "norm", "head", "inverse", "last")),
    )


class _Batch(ctypes.Structure):
    """`Batch` of native.cpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "tables", "cos", "sin")),
    )


class Fed:
    """The fed tokens of a forward, where the kernels read them: positions [n] int64, slots [n] int64, the lines of
    tables [lines, depth] int32 that they read. frequencies: `Rotary.frequencies`.
    """

    def __init__(self, frequencies: Tensor, tokens: int) -> None:
        """tokens: the most."""
        self._frequencies, half = frequencies.contiguous(), frequencies.shape[0]
        self.positions, self.lines = np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
        self._angles = np.zeros((2, tokens, half), dtype=np.float32)
        self._batch = _Batch(
            positions=self.positions.ctypes.data, slots=self.lines.ctypes.data,
            cos=self._angles[0].ctypes.data, sin=self._angles[1].ctypes.data,
        )  # fmt: skip
        self.at = ctypes.addressof(self._batch)
        self._begin = _function("begin", "ppl")
        self._tables = np.zeros((0, 0), dtype=np.int32)

    def set(self, tokens: int, tables: NDArray[np.int32]) -> None:
        """`positions` and `lines` have been written for so many tokens."""
        self._batch.rows = tokens
        if tables is not self._tables:
            self._tables = tables
            self._batch.depth, self._batch.tables = tables.shape[1], tables.ctypes.data

    def begin(self) -> None:
        """Before the first layer: the rotary angles."""
        self._begin(self.at, self._frequencies.data_ptr(), self._frequencies.shape[0])


class Decoding(Fed):
    """Rows of one token each, which their slots keep; one object for all iterations. rows: of the one at hand.

    slots: [rows] int64, a view.
    """

    def __init__(self, slots: int, frequencies: Tensor) -> None:
        super().__init__(frequencies, slots)
        self._known: list[tuple[int, ...] | None] = [None] * slots
        self._every = np.zeros((slots, 64), dtype=np.int32)
        self._all_slots = torch.from_numpy(self.lines)
        self.rows = 0
        self.slots = self._all_slots[:0]

    def take(self, rows: Sequence[Row]) -> None:
        """Set these rows. A table is copied when another turn comes with its slot, not in every iteration."""
        count, known = len(rows), self._known
        for row in rows:
            if known[row.slot] is not row.blocks:
                self._learn(row.slot, row.blocks)
        if count != self.rows:
            self.rows, self.slots = count, self._all_slots[:count]
        self.positions[:count] = [row.start for row in rows]
        self.lines[:count] = [row.slot for row in rows]
        self.set(count, self._every)

    def _learn(self, slot: int, blocks: tuple[int, ...]) -> None:
        depth = self._every.shape[1]
        if len(blocks) > depth:
            self._every = np.pad(self._every, ((0, 0), (0, 2 * len(blocks) - depth)))
        self._every[slot, : len(blocks)] = blocks
        self._known[slot] = blocks


def prompts(rows: Sequence[Row], frequencies: Tensor) -> Fed:
    """Of rows of any number of tokens each."""
    counts = [row.fed for row in rows]
    fed = Fed(frequencies, sum(counts))
    if rows:
        np.concatenate([np.arange(row.start, row.start + row.fed) for row in rows], out=fed.positions)
        fed.lines[:] = np.repeat(np.arange(len(rows)), counts)
    tables = np.zeros((max(1, len(rows)), max((len(row.blocks) for row in rows), default=1)), dtype=np.int32)
    for table, row in zip(tables, rows, strict=False):
        table[: len(row.blocks)] = row.blocks
    fed.set(len(fed.positions), tables)
    return fed


class Native:
    """One rank's layers and head. Matrices are packed one after the other, and each plain one's memory is given back:
    of `weights` the vectors and the embedding are left.

    heads: this rank's query heads. leader: whether this rank adds the residual to the attention's part. slots: the
    tokens that they keep. experts: False leaves those to whoever exchanges their rows, with their plain matrices.
    decoding: D's rows; its forwards come one after the other, and P's bring their own.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        weights: Weights,
        pool: KVPool,
        heads: int,
        *,
        leader: bool,
        slots: Tensor,
        experts: bool = True,
    ) -> None:
        self._experts = experts
        self._config, self._held = config, list[Tensor]()
        self._embed = weights.embed.untyped_storage().data_ptr()
        self.frequencies = Rotary(config.head_dim, config.rope_theta, "cpu").frequencies
        self.decoding = Decoding(len(slots), self.frequencies)
        name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[weights.norm.dtype]
        self._size = _function(f"packed_{name}", "ll")
        self._size.restype = ctypes.c_int64
        self._pack = _function(f"pack_{name}", "pllllp")
        self._attention = _function(f"attention_{name}", "pppp")
        self._mixture = _function(f"mixture_{name}", "plpp")
        self._head_, self._greedy = _function(f"head_{name}", "ppllldpp"), _function(f"greedy_{name}", "plllpp")
        self._layers = [self._layer(layer, pool, index, heads, leader) for index, layer in enumerate(weights.layers)]
        self._at = [ctypes.addressof(layer) for layer in self._layers]
        self._head = (self._keep(weights.norm), self._packed(weights.head), *weights.head.shape)
        norm, head, hidden, vocab = self._head
        self._order = (ctypes.c_void_p * len(self._at))(*self._at)
        self._model = _Model(
            layers=len(self._at), hidden=hidden, vocab=vocab, eps=config.rms_norm_eps,
            layer=ctypes.addressof(self._order), embed=self._keep(weights.embed), norm=norm, head=head,
            inverse=self._keep(self.frequencies), last=slots.data_ptr(),
        )  # fmt: skip
        self._decode, self._whole = _function(f"decode_{name}", "ppppp"), ctypes.addressof(self._model)
        self._logits = torch.zeros((len(slots), vocab), dtype=weights.norm.dtype)
        self._tokens, self._logprobs = np.zeros(len(slots), dtype=np.int64), np.zeros(len(slots), dtype=np.float32)
        self._drawn = self._tokens.ctypes.data, self._logprobs.ctypes.data

    def logits(self) -> Tensor:
        """Of `decoding`, on a rank that has the whole model: [n, vocab], until the next iteration."""
        self._decode(self._whole, self.decoding.at, self._logits.data_ptr(), None, None)
        return self._logits[: self.decoding.rows]

    def draws(self) -> tuple[list[int], list[float]]:
        """Of `decoding` on such a rank: greedy tokens, kept in the slots, and their log-probabilities."""
        self._decode(self._whole, self.decoding.at, self._logits.data_ptr(), *self._drawn)
        n = self.decoding.rows
        return self._tokens[:n].tolist(), self._logprobs[:n].tolist()

    def attention(self, index: int, hidden: Tensor, fed: Fed) -> Tensor:
        """See `Qwen3Moe.attention`."""
        x, out = hidden.contiguous(), torch.empty_like(hidden)
        self._attention(self._at[index], fed.at, x.data_ptr(), out.data_ptr())
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
            router=None if experts.router is None or not self._experts else self._packed(experts.router),
            up=self._packed(experts.up.transpose(1, 2)) if self._experts else None,
            down=self._packed(experts.down) if self._experts else None,
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
        out = weight.new_empty((count, self._size(rows, columns)))
        for one, to in zip(every, out, strict=True):
            self._pack(one.data_ptr(), rows, columns, one.stride(0), one.stride(1), to.data_ptr())
        self._held.append(out)
        storage = weight.untyped_storage()
        if storage.data_ptr() != self._embed:  # a tied head's
            storage.resize_(0)
        return out.data_ptr()


def _function(name: str, kinds: str) -> Any:
    """A kernel. kinds: of its arguments: p pointer, l whole number, d double."""
    found = kernels()[name]  # of this name alone: argument types belong to whoever asks
    types: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "d": ctypes.c_double}
    found.argtypes, found.restype = tuple(types[kind] for kind in kinds), None
    return found
