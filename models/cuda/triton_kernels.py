"""Kernels that do in one pass what torch does in several: norm, heads of attention, gated products and sums of experts.

Imported only where there is Triton (it comes with CUDA builds of torch). All compute in float32 and round once.
"""

# Triton is not typed, and reads the annotations of kernels itself: it looks up each name in them as a variable.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _norm(x, weight, out, stride, eps, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    scaled = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, scaled.to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the rows of x [n, size], contiguous in the last dimension."""
    rows, size = x.shape
    out = x.new_empty(rows, size)
    if rows:
        block = triton.next_power_of_2(size)
        _norm[(rows,)](x, weight, out, x.stride(0), eps, size, block, num_warps=8 if block >= 2048 else 4)
    return out


@triton.jit
def _heads(
    qkv,
    weight,
    cos,
    sin,
    cells,
    pool,
    eps,
    queries: tl.constexpr,
    keys: tl.constexpr,
    size: tl.constexpr,
    some: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * some + tl.arange(0, some))[:, None]
    at = tl.arange(0, size)[None, :]
    other = (at + size // 2) % size
    turns, kept = head < queries + keys, (head >= queries) & (head < queries + 2 * keys)
    place = qkv + (token * (queries + 2 * keys) + head) * size
    values = tl.load(place + at, mask=head < queries + 2 * keys, other=0.0)
    mine = values.to(tl.float32)
    partner = tl.load(place + other, mask=turns, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(mine * mine, 1) / size + eps)[:, None]
    mine = mine * scale * tl.load(weight + head * size + at, mask=turns, other=0.0).to(tl.float32)
    partner = partner * scale * tl.load(weight + head * size + other, mask=turns, other=0.0).to(tl.float32)
    turned = mine * tl.load(cos + token * size + at) + partner * tl.load(sin + token * size + at)
    values = tl.where(turns, turned.to(qkv.dtype.element_ty), values)
    # Every lane has read its partner before any of them writes.
    tl.debug_barrier()
    tl.store(place + at, values, mask=turns)
    cell = tl.load(cells + token * (2 * keys) + head - queries, mask=kept, other=0)
    tl.store(pool + cell * size + at, values, mask=kept)


def heads(
    qkv: Tensor, weight: Tensor, eps: float, angles: tuple[Tensor, Tensor], cells: Tensor, layer: Tensor, keys: int
) -> None:
    """Norm and turn query and key heads of qkv [n, Q + 2K, D] in place; write keys and values to the pool.

    weight: [Q + K, D]. angles: cos and signed sin, [n, 1, D] float32. cells: as `KVPool.cells`. layer: that layer of
    the pool. D is a power of two; all are contiguous.
    """
    tokens, count, size = qkv.shape
    if tokens:
        cos, sin = angles
        # A warp takes two heads of 128: enough loads in flight in a prefill, programs enough in a decode of few rows.
        some = max(1, 1024 // size)
        grid = (tokens, triton.cdiv(count, some))
        _heads[grid](qkv, weight, cos, sin, cells, layer, eps, count - 2 * keys, keys, size, some, num_warps=4)


@triton.jit
def _gated(both, share, out, columns: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    weight = tl.load(share + row).to(tl.float32)
    # A row that nobody chose is not read: it may hold anything, and its product is zero.
    inside = at < columns
    read = at < tl.where(weight != 0.0, columns, 0)
    gate = tl.load(both + row * 2 * columns + at, mask=read, other=0.0).to(tl.float32)
    value = tl.load(both + row * 2 * columns + columns + at, mask=read, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * value * weight
    tl.store(out + row * columns + at, product.to(out.dtype.element_ty), mask=inside)


def gated(both: Tensor, share: Tensor) -> Tensor:
    """silu(gate) * value * share of both [n, 2 * columns] (gate, then value) and share [n]: [n, columns]."""
    rows, columns = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, columns)
    if rows:
        block = min(1024, triton.next_power_of_2(columns))
        _gated[(rows, triton.cdiv(columns, block))](both, share, out, columns, block, num_warps=4)
    return out


@triton.jit
def _summed(pairs, places, own, out, size: tl.constexpr, each: tl.constexpr, some: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], dtype=tl.float32)
    for choice in tl.static_range(each):
        place = tl.load(places + row * each + choice)
        inside = at < size
        if some:
            # What lies behind the last local pair may be anything, not a number included: it is not read.
            inside = at < tl.where(place < tl.load(own), size, 0)
        total += tl.load(pairs + place * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, total.to(out.dtype.element_ty), mask=at < size)


def summed(pairs: Tensor, places: Tensor, own: Tensor | None) -> Tensor:
    """Each row's pairs, added in the order of `places`: pairs [n * k, size], places int64 [n, k] -> [n, size].

    own: int32 [1], how many of the pairs count, the first ones; None for all.
    """
    rows, each = places.shape
    size = pairs.shape[1]
    out = pairs.new_empty(rows, size)
    if rows:
        block = min(1024, triton.next_power_of_2(size))
        grid = (rows, triton.cdiv(size, block))
        _summed[grid](
            pairs, places, pairs if own is None else own, out, size, each, own is not None, block, num_warps=4
        )
    return out
