"""A stand-in for FlashInfer that reads its arguments as FlashInfer does and computes attention plainly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FakeFlashInfer:
    """The parts of the package that are used. pinned: how many pinned buffers plans were seen with. info: a plan.
    planned: tokens of each prefill, by backend.
    """

    def __init__(self) -> None:
        self.info = [1, 2, 3]
        self.planned: dict[str, list[int]] = {}
        self._seen: set[int] = set()

    @property
    def pinned(self) -> int:
        return len(self._seen)

    def seen(self, wrapper: Any) -> None:
        self._seen.add(wrapper._pin_memory_int_workspace_buffer.data_ptr())

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Tensor, layout: str, backend: str) -> Prefill:
        assert (layout, workspace.dtype) == ("HND", torch.uint8)
        assert backend in ("fa2", "fa3")
        return Prefill(self, backend)

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: Tensor, layout: str, **options: Any) -> Decode:
        assert (layout, workspace.dtype) == ("HND", torch.uint8)
        assert options.pop("use_cuda_graph")
        assert options.pop("use_tensor_cores")
        assert options.pop("backend") == "fa2"
        return Decode(self, **options)

    def fast_decode_plan(
        self, wrapper: Decode, kv: Tensor, pages: Tensor, last: Tensor, *shape: int, **options: Any
    ) -> None:
        assert torch.equal(options.pop("global_override_indptr_cpu"), kv)
        wrapper.check(kv, pages, last, shape)
        wrapper._plan_info = list(self.info)


class Prefill:
    def __init__(self, home: FakeFlashInfer, backend: str) -> None:
        self._home, self._backend = home, backend
        self._pin_memory_int_workspace_buffer = torch.empty(0)

    def plan(self, qo: Tensor, kv: Tensor, pages: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        assert {array.dtype for array in (qo, kv, pages, last, options["seq_lens"])} == {torch.int32}
        assert options["causal"]
        assert options["max_token_per_sequence"] == int((qo[1:] - qo[:-1]).max())
        self._home.seen(self)
        self._home.planned.setdefault(self._backend, []).append(int(qo[-1]))
        self._arrays, self._shape = [array.clone() for array in (qo, kv, pages, last)], shape

    def run(self, q: Tensor, storage: Tensor, *, out: Tensor, enable_pdl: bool) -> None:
        assert not enable_pdl
        qo, kv, pages, last = (array.tolist() for array in self._arrays)
        assert q.shape[0] == qo[-1]
        attention(q, storage, out, qo, kv, pages, last)


class Decode:
    def __init__(
        self,
        home: FakeFlashInfer,
        paged_kv_indptr_buffer: Tensor,
        paged_kv_indices_buffer: Tensor,
        paged_kv_last_page_len_buffer: Tensor,
    ) -> None:
        self._home = home
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert {buffer.dtype for buffer in self._buffers} == {torch.int32}
        self._plan_info: list[int] = []
        self._pin_memory_int_workspace_buffer = self._int_workspace_buffer = torch.empty(0)

    def check(self, kv: Tensor, pages: Tensor, last: Tensor, shape: tuple[int, ...]) -> None:
        assert [kv.dtype, pages.dtype, last.dtype] == [torch.int32] * 3
        assert len(kv) == len(self._buffers[0]) == len(last) + 1
        assert len(pages) == int(kv[-1]) <= len(self._buffers[1])
        assert len(shape) == 4
        self._home.seen(self)

    def plan(self, kv: Tensor, pages: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        self.check(kv, pages, last, shape)
        for buffer, array in zip(self._buffers, (kv, pages, last), strict=True):
            buffer[: len(array)].copy_(array)
        self._plan_info = list(self._home.info)

    def run(self, q: Tensor, storage: Tensor, *, out: Tensor, enable_pdl: bool) -> None:
        assert not enable_pdl
        kv, pages, last = (buffer.tolist() for buffer in self._buffers)
        attention(q, storage, out, list(range(len(last) + 1)), kv, pages, last)


def attention(
    q: Tensor, storage: Tensor, out: Tensor, qo: list[int], kv: list[int], pages: list[int], last: list[int]
) -> None:
    """Causal attention over pages of storage [blocks, 2, K, size, dim], row by row."""
    k, size = storage.shape[2], storage.shape[3]
    for row, tail in enumerate(last):
        mine = pages[kv[row] : kv[row + 1]]
        length, fed = (len(mine) - 1) * size + tail, qo[row + 1] - qo[row]
        context = storage[mine].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        for at in range(fed):
            keys, values = context[:, :, : length - fed + at + 1]
            heads = q[qo[row] + at].view(k, -1, q.shape[2])
            weights = (heads @ keys.transpose(1, 2) / q.shape[2] ** 0.5).softmax(-1)
            out[qo[row] + at] = (weights @ values).view(-1, q.shape[2])
