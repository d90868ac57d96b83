"""Collectives of one phase over shared memory, on CPU tensors.

Every member reduces in member order (accumulating 16-bit floats in float32), so results are bitwise equal on all
members and do not depend on timing, on chunking or on who reduced. Small payloads go *direct*: one step, then every
member reduces everything. Large ones are *split*: every member reduces its share and publishes that in a second step.
Payloads larger than a data slot go in chunks.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import torch

from kernel.comm.channel import Channel
from kernel.comm.shared_map import HEADER
from kernel.errors import UsageError
from kernel.topology import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.comm.shared import Arena
    from kernel.request import Phase

SPLIT_BYTES: Final = 1 << 17
"""All-reduce payloads above this, in groups of more than two, are split (measured: a second step costs less there)."""
_PLANS: Final = 128
_WIDE: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class SharedCollectives:
    """`kernel.ports.Collectives` of one (arena, phase, rank).

    Each role's communicator counts its own steps, so P and D threads of one rank run concurrently; within one phase,
    calls come from one thread at a time. Dtypes: those that torch adds on CPU. Tensors must be equal-shaped on all
    members, with zero rows too (a matched call). Each method raises RankLost when the run is aborted or `close` is
    called, and Divergence when members call different things.
    """

    def __init__(self, arena: Arena, phase: Phase, rank: int) -> None:
        self._members = {
            role: _Member(Channel(arena, region, rank))
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
        if len(sizes) != members or sum(sizes) != x.shape[0]:
            raise UsageError(
                f"reduce_scatter over {role} of {x.shape[0]} rows with sizes {list(sizes)}: give one size for each of"
                f" {members} members, {x.shape[0]} in total"
            )
        return x if member is None else member.reduce_scatter(x.detach(), sizes)

    def close(self) -> None:
        """Make calls in progress, and later ones, raise RankLost. Idempotent; callable from any thread."""
        for member in self._members.values():
            member.channel.close()


class _Plan:
    """What calls of one operation, dtype and shape have in common: the header, and views of the data slots."""

    def __init__(self, member: _Member, text: str, x: torch.Tensor) -> None:
        self.text, self.header = text, _header(text)
        self.direct = x.nbytes <= member.capacity
        self.parts: list[list[torch.Tensor]] = []
        if self.direct:
            self.parts = [member.views(parity, x.dtype, tuple(x.shape)) for parity in range(2)]


class _Member:
    """This rank in one communicator."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.capacity = channel.region.capacity
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        plan = self._plan(x, "all_reduce")
        if plan.direct and (self.channel.size == 2 or x.nbytes <= SPLIT_BYTES):
            return self._sum(self._publish(plan, x))
        flat, out = x.contiguous().view(-1), torch.empty(x.shape, dtype=x.dtype)
        for start, stop in self._chunks(flat):
            self._reduce_chunk(plan, flat[start:stop], out.view(-1)[start:stop], start)
        return out

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        plan = self._plan(x, "all_gather", f"dim {dim}")
        if plan.direct:
            return torch.cat(self._publish(plan, x), dim)
        flat = x.contiguous().view(-1)
        parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(self.channel.size)]
        for start, stop in self._chunks(flat):
            chunk = self._publish_chunk(plan, flat[start:stop], start)
            for part, piece in zip(parts, chunk, strict=True):
                part.view(-1)[start:stop] = piece
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        plan = self._plan(x, "reduce_scatter", "rows " + "+".join(map(str, sizes)))
        first = sum(sizes[: self.channel.index])
        last = first + sizes[self.channel.index]
        if plan.direct:
            return self._sum([part[first:last] for part in self._publish(plan, x)])
        flat, out = x.contiguous().view(-1), torch.empty((last - first, *x.shape[1:]), dtype=x.dtype)
        width = flat.numel() // x.shape[0]
        for start, stop in self._chunks(flat):
            chunk = self._publish_chunk(plan, flat[start:stop], start)
            low, high = max(start, first * width), min(stop, last * width)
            if low < high:
                mine = [piece[low - start : high - start] for piece in chunk]
                out.view(-1)[low - first * width : high - first * width] = self._sum(mine)
        return out

    def views(self, parity: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """Each member's data slot as a tensor of `shape`."""
        count = 1
        for length in shape:
            count *= length
        # Outside inference mode: these outlive the call, and tensors made inside cannot be written outside it.
        with torch.inference_mode(False):
            if count == 0:
                return [torch.empty(shape, dtype=dtype) for _ in range(self.channel.size)]
            memory, region = self.channel.arena.memory, self.channel.region
            return [
                torch.frombuffer(memory, dtype=dtype, count=count, offset=region.data(index, parity)).view(shape)
                for index in range(self.channel.size)
            ]

    def _plan(self, x: torch.Tensor, operation: str, more: str = "") -> _Plan:
        key = (operation, x.dtype, x.shape, more)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            dtype = str(x.dtype).removeprefix("torch.")
            text = f"{operation} {dtype}{list(x.shape)} {more}".rstrip()
            plan = self._plans[key] = _Plan(self, text, x)
        return plan

    def _publish(self, plan: _Plan, x: torch.Tensor) -> list[torch.Tensor]:
        channel = self.channel
        plan.parts[channel.parity][channel.index].copy_(x)
        return plan.parts[channel.take(plan.header)]

    def _publish_chunk(self, plan: _Plan, chunk: torch.Tensor, start: int) -> list[torch.Tensor]:
        parts = self.views(self.channel.parity, chunk.dtype, (chunk.numel(),))
        parts[self.channel.index].copy_(chunk)
        self.channel.take(_header(f"{plan.text} from {start}"))
        return parts

    def _reduce_chunk(self, plan: _Plan, chunk: torch.Tensor, out: torch.Tensor, start: int) -> None:
        size, index, count = self.channel.size, self.channel.index, chunk.numel()
        cuts = [count * i // size for i in range(size + 1)]
        mine = slice(cuts[index], cuts[index + 1])
        parts = self._publish_chunk(plan, chunk, start)
        results = self.views(self.channel.parity, chunk.dtype, (count,))
        results[index][mine] = self._sum([part[mine] for part in parts])
        self.channel.take()
        for low, high, result in zip(cuts, cuts[1:], results, strict=False):
            out[low:high] = result[low:high]

    def _chunks(self, flat: torch.Tensor) -> list[tuple[int, int]]:
        step = self.capacity // flat.element_size()
        return [(start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)]

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
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


def _header(text: str) -> bytes:
    data = text.encode()
    if len(data) > HEADER:
        data = data[: HEADER - 12] + b"..%08x" % zlib.crc32(data)
    return data.ljust(HEADER, b"\0")
