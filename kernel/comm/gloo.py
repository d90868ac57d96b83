"""Collectives over torch.distributed's gloo: for several hosts, and the oracle of the shared-memory ones.

One process group for each (phase, canonical role, group), made in one global order on all ranks. On one host shared
memory is faster by two orders of magnitude.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from kernel.comm.parts import check_parts
from kernel.device.compat import gather_into
from kernel.errors import RankLost, UsageError
from kernel.request import Phase
from kernel.topology import Role, World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POLL_S: Final = 1e-4
_WIDE: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class GlooWorld:
    """All process groups of this rank. Every rank constructs it at the same point, with the same arguments.

    The default process group must have been initialised (`torch.distributed.init_process_group`) with world.size ranks;
    it stays the caller's. timeout_s: a collective that takes longer fails.
    """

    def __init__(self, world: World, rank: int, timeout_s: float = 1800.0) -> None:
        if not dist.is_initialized() or dist.get_world_size() != world.size or dist.get_rank() != rank:
            raise UsageError(
                f"rank {rank} of {world.size}: gloo needs torch.distributed initialised for them; start with torchrun"
            )
        self._groups: dict[tuple[Phase, Role], Any] = {}
        for phase in Phase:
            for role in Role:
                if world.canonical(role) is not role:
                    continue
                for members in world.groups[role]:
                    if len(members) > 1:
                        group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_s), backend="gloo")
                        if rank in members:
                            self._groups[phase, role] = group
        self._world, self._rank = world, rank

    def collectives(self, phase: Phase) -> GlooCollectives:
        """The communicators that `phase` owns."""
        groups = {role: self._groups.get((phase, self._world.canonical(role))) for role in Role}
        return GlooCollectives(phase, self._rank, groups)

    def close(self) -> None:
        """Destroy the groups, when all ranks are through with them. Idempotent."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            dist.destroy_process_group(group)


class GlooCollectives:
    """`kernel.ports.Collectives` of one phase over `groups` (None for a role in which this rank is alone)."""

    def __init__(self, phase: Phase, rank: int, groups: dict[Role, Any]) -> None:
        self._phase, self._rank, self._groups = phase, rank, groups
        self._gather_into = gather_into()
        self._closed = False

    def all_reduce(self, role: Role, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group; same shape, and bitwise equal on all members. 16-bit floats are added in float32."""
        group = self._groups[role]
        if group is None:
            return x
        out = x.detach().to(_WIDE.get(x.dtype, x.dtype), copy=True, memory_format=torch.contiguous_format)
        # A call without data is still a matched call, and gloo refuses empty tensors: one element stands in for it.
        data = out if out.numel() else out.new_zeros(1)
        self._wait(dist.all_reduce(data, group=group, async_op=True), role, "all_reduce")
        return out.to(x.dtype)

    def all_gather(self, role: Role, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate the members' equal-shaped parts along `dim`, in group order."""
        group = self._groups[role]
        if group is None:
            return x
        size = dist.get_world_size(group)
        flat = x.detach().contiguous().view(-1)
        data = flat if flat.numel() else x.new_zeros(1)
        out = data.new_empty(size * data.numel())
        self._wait(self._gather_into(out, data, group=group, async_op=True), role, "all_gather")
        parts = out.view(size, -1)[:, : flat.numel()]
        return torch.cat([part.view(x.shape) for part in parts], dim)

    def reduce_scatter(self, role: Role, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum over the group, then keep this member's rows; `sizes` are the members' row counts (may differ).

        gloo has no reduce-scatter of unequal parts, so this is an all-reduce and a copy of own rows.
        Raises UsageError when the sizes do not add up to the rows of x.
        """
        group = self._groups[role]
        members = 1 if group is None else dist.get_world_size(group)
        check_parts(role, x.shape[0], sizes, members)
        if group is None:
            return x
        index = dist.get_rank(group)
        start = sum(sizes[:index])
        return self.all_reduce(role, x)[start : start + sizes[index]].clone()

    def close(self) -> None:
        """Make a call in progress, and later ones, raise RankLost; the groups belong to `GlooWorld`. Idempotent."""
        self._closed = True

    def _wait(self, work: Any, role: Role, operation: str) -> None:
        where = f"rank {self._rank} in {operation} over {role} of {self._phase}"
        wait_for(work, where, lambda: self._closed, "its communicators were closed")


def wait_for(work: Any, where: str, closed: Callable[[], bool], why: str) -> None:
    """Until gloo's `work` has ended. Raises RankLost when it fails, and, with `why`, once `closed()` is true."""
    try:
        while not work.is_completed():
            if closed():
                raise RankLost(f"{where} was given up: {why}")
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:  # gloo's only kind; its text names the address of the peer
        raise RankLost(f"{where} failed: {str(error).splitlines()[0]}") from None
