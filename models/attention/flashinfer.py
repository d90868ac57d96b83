"""Attention by FlashInfer's paged kernels (sm_80 and later, half precision): a plan a forward, a kernel a layer.

The pool's layout is FlashInfer's "HND". Each phase has its own workspace, because split-KV partial results lie in it
and the phases' kernels overlap. `plan` schedules on the host and copies the schedule from a pinned buffer; that buffer
takes turns with the phase's staging ring, so that no plan overwrites one that is still to be copied. All index arrays
are given as pinned CPU tensors: from device tensors `plan` would copy them back and wait.

On sm_90 a prefill that fills the device takes FlashInfer's FA3 kernels (warp-specialised, persistent); a
smaller one keeps FA2, which packs a KV head's queries into one tile and splits long contexts over idle SMs.

FlashInfer is imported when the first attention is built; its kernels are compiled at their first plan (once a machine,
tens of seconds). Read against flashinfer 0.6.13, whose decode planning without copies (`fast_decode_plan`) and whose
workspace attributes are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kernel.errors import ModelError, UsageError
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.request import Row
    from models.attention.pool import KVPool
    from models.cuda.staging import Parcel

HEAD_DIMS: Final = (64, 128, 256)
_INTS: Final = 8 << 20
_MARGIN: Final = 16 << 20
_PREFILL_TILE: Final = 128
_DECODE_TILE: Final = 16
_FA3_TILE: Final = 128
_FA3_WORK: Final = 8 * 4
"""Bytes of schedule for one query tile of one head."""


def check_shape(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError unless FlashInfer has kernels for these heads."""
    wrong = []
    if device.type != "cuda":
        wrong.append(f"device {device}")
    if dtype not in (torch.bfloat16, torch.float16):
        wrong.append(f"dtype {str(dtype).removeprefix('torch.')}")
    if head_dim not in HEAD_DIMS:
        wrong.append(f"head_dim {head_dim} (it has {', '.join(map(str, HEAD_DIMS))})")
    if wrong:
        raise UsageError(f"attention flashinfer cannot run with {', '.join(wrong)}; choose attention reference")


def library() -> Any:
    """The flashinfer package. Raises UsageError where it is not installed."""
    try:
        import flashinfer
    except ImportError as error:
        raise UsageError(
            f"attention flashinfer needs flashinfer-python 0.6.13 ({error}); install it or choose attention reference"
        ) from None
    return flashinfer


def processors(device: torch.device) -> int:
    """SMs of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def hopper(device: torch.device) -> bool:
    """Whether the device runs FA3 kernels."""
    return torch.cuda.get_device_capability(device)[0] == 9


def fills(tokens: int, rows: int, heads: int, processors: int) -> bool:
    """Whether FA3 pays for `tokens` fed by `rows` rows: a tile of its queries (one head each) for every SM, half full.

    False too where its schedule could outgrow the workspace.
    """
    if tokens * heads < processors * _FA3_TILE or 2 * tokens < _FA3_TILE * rows:
        return False
    return heads * (tokens // _FA3_TILE + rows) * _FA3_WORK < _INTS // 2


def spread(rows: Sequence[Row], size: int) -> dict[str, list[int]]:
    """FlashInfer's index arrays of rows over blocks of `size` tokens, by the names they are staged under.

    qo: first fed token of each row, and how many in all, [rows + 1]. kv: first index of each row, [rows + 1]. last:
    tokens in each row's last block, 1 .. size. lens: context lengths with the fed tokens. pages: block numbers.
    """
    qo, kv = [0], [0]
    last: list[int] = []
    lens: list[int] = []
    pages: list[int] = []
    for row in rows:
        length = row.start + row.fed
        depth = (length + size - 1) // size
        if depth > len(row.blocks):
            raise IndexError(f"{length} tokens of context do not fit the row's {len(row.blocks)} blocks of {size}")
        qo.append(qo[-1] + row.fed)
        kv.append(kv[-1] + depth)
        last.append(length - (depth - 1) * size)
        lens.append(length)
        pages.extend(row.blocks[:depth])
    return {"qo": qo, "kv": kv, "last": last, "lens": lens, "pages": pages}


def workspace_bytes(heads: int, kv_heads: int, head_dim: int, rows: int, processors: int, tile: int) -> int:
    """Bytes of split-KV partial results for `rows` single-token rows, or for prefill (rows 0), of one forward.

    FlashInfer splits into at most two blocks an SM over the KV heads, or into the query tiles if these are more, and
    keeps float32 values and scales for each tile of each head.
    """
    tiles = max(2 * processors // kv_heads, -(-rows * (heads // kv_heads) // tile) + rows)
    return heads * tiles * tile * (head_dim + 1) * 4 + _MARGIN


class FlashAttention:
    """FlashInfer over one pool. heads: this rank's query heads. turns: buffers of the staging rings. fa3: False keeps
    large prefills on FA2 too.
    """

    def __init__(self, pool: KVPool, heads: int, device: torch.device, turns: int = 3, fa3: bool = True) -> None:
        check_shape(pool.head_dim, pool.storage.dtype, device)
        self._library = library()
        self._pool, self._heads, self._device, self._turns = pool, heads, device, turns
        self._processors = processors(device)
        size = workspace_bytes(heads, pool.kv_heads, pool.head_dim, 0, self._processors, _PREFILL_TILE)
        self._spaces = {phase: torch.zeros(size, dtype=torch.uint8, device=device) for phase in Phase}
        self._pinned = {phase: self._buffers() for phase in Phase}
        self._eager = {phase: self._wrapper(phase) for phase in Phase}
        self._large = self._wrapper(Phase.P, "fa3") if fa3 and hopper(device) else None
        self._schedule = torch.empty(_INTS, dtype=torch.uint8, device=device)

    def reserve(self, rows: int) -> None:
        """Have room for D graphs of up to `rows` rows. Before the first graph is captured."""
        pool = self._pool
        need = workspace_bytes(self._heads, pool.kv_heads, pool.head_dim, rows, self._processors, _DECODE_TILE)
        if need > self._spaces[Phase.D].shape[0]:
            self._spaces[Phase.D] = torch.zeros(need, dtype=torch.uint8, device=self._device)
            self._eager[Phase.D] = self._wrapper(Phase.D)

    def stage(self, parcel: Parcel, rows: Sequence[Row]) -> None:
        """Put the index arrays of an eager forward into its parcel."""
        for name, values in spread(rows, self._pool.block_size).items():
            parcel.put(name, values, np.int32)

    def plan(self, phase: Phase, parcel: Parcel, fed: Sequence[int]) -> Paged:
        """Plan an eager forward of rows that feed so many tokens each. After `stage`."""
        pool, wrapper = self._pool, self._eager[phase]
        if phase is Phase.P and self._large and fills(sum(fed), len(fed), self._heads, self._processors):
            wrapper = self._large
        wrapper._pin_memory_int_workspace_buffer = self._pinned[phase][parcel.index]
        wrapper.plan(
            parcel.host("qo"),
            parcel.host("kv"),
            parcel.host("pages"),
            parcel.host("last"),
            self._heads,
            pool.kv_heads,
            pool.head_dim,
            pool.block_size,
            causal=True,
            q_data_type=pool.storage.dtype,
            kv_data_type=pool.storage.dtype,
            non_blocking=True,
            seq_lens=parcel.host("lens"),
            max_token_per_sequence=max(fed),
        )
        return Paged(wrapper, pool)

    def graph(self, indptr: Tensor, pages: Tensor, last: Tensor) -> DecodePlan:
        """Decode of one bucket; its index arrays stay at these device tensors (int32; pages: the most there can be)."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._spaces[Phase.D],
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )
        # All buckets replay on one stream, one after the other: they share what the schedule is copied to.
        wrapper._int_workspace_buffer = self._schedule
        return DecodePlan(wrapper, self._pool, self._heads, self._pinned[Phase.D], self._library)

    def _wrapper(self, phase: Phase, backend: str = "fa2") -> Any:
        # By FA2 decode with tensor cores is the same module as prefill, compiled once.
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._spaces[phase], "HND", backend=backend)

    def _buffers(self) -> list[Tensor]:
        pin = self._device.type == "cuda"
        return [torch.empty(_INTS, dtype=torch.uint8, pin_memory=pin) for _ in range(self._turns)]


class Paged:
    """A planned forward."""

    def __init__(self, wrapper: Any, pool: KVPool) -> None:
        self._wrapper, self._pool = wrapper, pool

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q [n, Q, head_dim] -> [n, Q * head_dim], over what the pool holds."""
        n, heads, dim = q.shape
        out = q.new_empty(n, heads, dim)
        # Programmatic dependent launch is left off: torch's kernels around these do not take part in it.
        self._wrapper.run(q, self._pool.storage[layer], out=out, enable_pdl=False)
        return out.view(n, heads * dim)


class DecodePlan(Paged):
    """Decode of one bucket, planned anew before each replay of the graph that holds its kernels."""

    def __init__(self, wrapper: Any, pool: KVPool, heads: int, pinned: list[Tensor], library_: Any) -> None:
        super().__init__(wrapper, pool)
        self._heads, self._pinned, self._library = heads, pinned, library_
        self._planned: list[int] | None = None

    def plan(self, parcel: Parcel) -> None:
        """Plan from the parcel's arrays (`kv`, `pages`, `last`), which are shipped to the graph's tensors besides.

        Raises ModelError where the new plan does not fit the captured kernels.
        """
        pool, wrapper = self._pool, self._wrapper
        kind = pool.storage.dtype
        wrapper._pin_memory_int_workspace_buffer = self._pinned[parcel.index]
        kv, pages, last = parcel.host("kv"), parcel.host("pages"), parcel.host("last")
        shape = (self._heads, pool.kv_heads, pool.head_dim, pool.block_size)
        if self._planned is None:
            wrapper.plan(kv, pages, last, *shape, q_data_type=kind, kv_data_type=kind)
            self._planned = [int(number) for number in wrapper._plan_info]
            return
        # The same plan without its copies: the index arrays are on their way with all other inputs.
        self._library.fast_decode_plan(
            wrapper, kv, pages, last, *shape, q_data_type=kind, kv_data_type=kind, global_override_indptr_cpu=kv
        )
        planned = [int(number) for number in wrapper._plan_info]
        if planned != self._planned:
            raise ModelError(
                f"FlashInfer planned {planned} where the captured decode has {self._planned}; run with graphs off"
            )
