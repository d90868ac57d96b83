"""Collectives of one phase over shared memory, on CPU tensors.

Every member reduces in member order (accumulating 16-bit floats in float32), so results are bitwise equal on all
members and do not depend on timing, on chunking or on who reduced. Small payloads go *direct*: one step, then every
member reduces everything. Large ones are *split*: every member reduces its share and publishes that in a second step.
Payloads larger than a data slot go in chunks.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from kernel.comm.channel import Channel
from kernel.comm.parts import check_parts
from kernel.comm.shared_map import HEADER
from kernel.topology import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.comm.shared import Arena
    from kernel.request import Phase

SPLIT_BYTES: Final = 1 << 21
"""An all-reduce is split if it would otherwise read more than this beyond what a split one reads, (members - 2) x size.

Measured: adding that much takes about as long as a second step does."""
_CACHED: Final = 128
K = TypeVar("K")
V = TypeVar("V")
_WIDE: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class SharedCollectives:
    """`kernel.ports.Collectives` of one (arena, phase, rank).

    Each role's communicator counts its own steps, so P and D threads of one rank run concurrently; within one phase,
    calls come from one thread at a time. Dtypes: those that torch adds on CPU. Tensors must be equal-shaped on all
    members, with zero rows too (a matched call). Each method raises RankLost when the run is aborted or `close` is
    called, and Divergence when members call different things. split_bytes: see SPLIT_BYTES; equal on all ranks.
    """

    def __init__(self, arena: Arena, phase: Phase, rank: int, *, split_bytes: int = SPLIT_BYTES) -> None:
        self._members = {
            role: _Member(Channel(arena, region, rank), split_bytes)
            for role in Role
            if arena.world.canonical(role) is role and (region := arena.region(phase, role, rank)) is not None
        }
        self._canonical = {role: self._members.get(arena.world.canonical(role)) for role in Role}

    def all_reduce(self, role: Role, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group; same shape, and bitwise equal on all members."""
        member = self._canonical[role]
        return x if member is None else member.all_reduce(x.detach())

    def all_gather(self, role: Role, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate the members' equal-shaped parts along `dim`, in group order."""
        member = self._canonical[role]
        return x if member is None else member.all_gather(x.detach(), dim)

    def reduce_scatter(self, role: Role, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum over the group, then keep this member's rows; `sizes` are the members' row counts (may differ).

        Raises UsageError when they do not add up to the rows of x.
        """
        member = self._canonical[role]
        members = 1 if member is None else member.channel.size
        check_parts(role, x.shape[0], sizes, members)
        return x if member is None else member.reduce_scatter(x.detach(), tuple(sizes))

    def close(self) -> None:
        """Make calls in progress, and later ones, raise RankLost. Idempotent; callable from any thread."""
        for member in self._members.values():
            member.channel.close()


class _Member:
    """This rank in one communicator."""

    def __init__(self, channel: Channel, split_bytes: int) -> None:
        self.channel, self._split_bytes = channel, split_bytes
        self.capacity = channel.region.capacity
        self._slots: dict[tuple[int, torch.dtype, torch.Size], list[torch.Tensor]] = {}
        self._headers: dict[tuple[object, ...], bytes] = {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        extra = (self.channel.size - 2) * min(x.nbytes, self.capacity)
        if x.nbytes <= self.capacity and extra <= self._split_bytes:
            return _sum(self._publish(x, self._header(x, "all_reduce")))
        out, reduce = torch.empty(x.shape, dtype=x.dtype), self._split if extra > self._split_bytes else self._direct
        flat, target = x.contiguous().view(-1), out.view(-1)
        for start, stop in self._chunks(flat):
            reduce(flat[start:stop], target[start:stop], self._header(x, "all_reduce", None, start))
        return out

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if x.nbytes <= self.capacity:
            return torch.cat(self._publish(x, self._header(x, "all_gather", dim)), dim)
        flat = x.contiguous().view(-1)
        parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(self.channel.size)]
        for start, stop in self._chunks(flat):
            chunk = self._publish(flat[start:stop], self._header(x, "all_gather", dim, start))
            for part, piece in zip(parts, chunk, strict=True):
                part.view(-1)[start:stop] = piece
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        first = sum(sizes[: self.channel.index])
        last = first + sizes[self.channel.index]
        if x.nbytes <= self.capacity:
            return _sum([part[first:last] for part in self._publish(x, self._header(x, "reduce_scatter", sizes))])
        out = torch.empty((last - first, *x.shape[1:]), dtype=x.dtype)
        flat, target, width = x.contiguous().view(-1), out.view(-1), x.numel() // x.shape[0]
        for start, stop in self._chunks(flat):
            chunk = self._publish(flat[start:stop], self._header(x, "reduce_scatter", sizes, start))
            low, high = max(start, first * width), min(stop, last * width)
            if low < high:
                mine = _sum([piece[low - start : high - start] for piece in chunk])
                target[low - first * width : high - first * width] = mine
        return out

    def _publish(self, x: torch.Tensor, header: bytes) -> list[torch.Tensor]:
        """One step: x into this member's data slot, and every member's data slot as a tensor of x's shape."""
        parts = self._views(self.channel.parity, x.dtype, x.shape)
        parts[self.channel.index].copy_(x)
        self.channel.take(header)
        return parts

    def _direct(self, x: torch.Tensor, out: torch.Tensor, header: bytes) -> None:
        parts = self._publish(x, header)
        if x.dtype in _WIDE and len(parts) > 2:
            out.copy_(_sum(parts))
            return
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)

    def _split(self, x: torch.Tensor, out: torch.Tensor, header: bytes) -> None:
        size, index, count = self.channel.size, self.channel.index, x.numel()
        cuts = [count * i // size for i in range(size + 1)]
        mine = slice(cuts[index], cuts[index + 1])
        parts = self._publish(x, header)
        # Into the slot of the next step: this step's slots are still being read.
        results = self._views(self.channel.parity, x.dtype, x.shape)
        results[index][mine] = _sum([part[mine] for part in parts])
        self.channel.take()
        for low, high, result in zip(cuts, cuts[1:], results, strict=False):
            out[low:high] = result[low:high]

    def _chunks(self, flat: torch.Tensor) -> list[tuple[int, int]]:
        step = self.capacity // flat.element_size()
        return [(start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)]

    def _views(self, parity: int, dtype: torch.dtype, shape: torch.Size) -> list[torch.Tensor]:
        """Each member's data slot of `parity` as a tensor."""
        key = (parity, dtype, shape)
        views = self._slots.get(key)
        if views is None:
            memory, region, count = self.channel.arena.memory, self.channel.region, shape.numel()
            # Outside inference mode: they outlive the call, and tensors made inside cannot be written outside it.
            with torch.inference_mode(False):
                views = [
                    torch.frombuffer(memory, dtype=dtype, count=count, offset=region.data(index, parity)).view(shape)
                    if count
                    else torch.empty(shape, dtype=dtype)
                    for index in range(self.channel.size)
                ]
            _remember(self._slots, key, views)
        return views

    def _header(self, x: torch.Tensor, operation: str, more: int | tuple[int, ...] | None = None, at: int = 0) -> bytes:
        """What all members must agree on: the call, and the first element of the chunk."""
        key = (operation, x.dtype, x.shape, more, at)
        header = self._headers.get(key)
        if header is None:
            text = f"{operation} {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            if more is not None:
                text += f" rows {'+'.join(map(str, more))}" if isinstance(more, tuple) else f" dim {more}"
            header = (text + f" from {at}" * (at > 0)).encode()
            if len(header) > HEADER:
                header = header[: HEADER - 10] + b"..%08x" % zlib.crc32(header)
            header = header.ljust(HEADER, b"\0")
            _remember(self._headers, key, header)
        return header


def _remember(cache: dict[K, V], key: K, value: V) -> None:
    if len(cache) >= _CACHED:
        del cache[next(iter(cache))]
    cache[key] = value


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = _WIDE.get(dtype)
    if wide is None or len(parts) == 2:  # one addition rounds once anyway
        total = torch.add(parts[0], parts[1])
        for part in parts[2:]:
            total.add_(part)
        return total
    total = parts[0].to(wide)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)
