"""Collectives over NCCL: communicators of their own for P and for D, one for each canonical role.

Each is enqueued on the *current* stream: torch's NCCL backend does so for operations that are not asynchronous, and
keeps no tensors then. So the phase's scope, or P's route, decides where a collective runs, and capture records it.

There is no process-wide state: no default process group is needed, and none is touched. NCCL itself has two
process-wide controls that the paper compares with, NCCL_LAUNCH_ORDER_IMPLICIT=1 and CUDA_DEVICE_MAX_CONNECTIONS=1; they
are read when NCCL and CUDA start, so they belong into the environment of the process.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
    ReduceScatterOptions,
)

from kernel.comm.parts import check_parts
from kernel.device.bounded import all_of
from kernel.device.faults import of_device
from kernel.device.occupancy import NCCL_CTAS
from kernel.errors import RankLost, UsageError
from kernel.program import collects
from kernel.request import Phase
from kernel.topology import Role, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch._C._distributed_c10d import Store

DEFAULT_GROUP: Final = "0"
"""What torch calls the process group that `init_process_group` makes."""
_GRACE_S: Final = 10.0
_WARM_ELEMENTS: Final = (1 << 6, 1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""NCCL takes another protocol, and so another kernel, by size, and connects peers as each is first used."""


class NcclWorld:
    """All communicators of this rank. Every rank constructs it at the same point, with the same arguments.

    store: a torch.distributed store that all ranks reach, used under a prefix; a later world needs a fresh one. index:
    this rank's GPU; NCCL wants one for each rank. max_ctas: most CTAs (about: SMs) of one collective; NCCL decides
    where None. timeout_s: NCCL's watchdog ends the process when a collective takes longer.
    Raises UsageError where torch has no NCCL, RankLost when a peer does not come.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        store: Store,
        index: int,
        *,
        max_ctas: int | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise UsageError(f"rank {rank} of {world.size}: torch {torch.__version__} has no GPU, or no NCCL, here")
        if max_ctas is not None and not 1 <= max_ctas <= 64:
            raise UsageError(f"--max-ctas {max_ctas}: NCCL takes 1 to 64")
        self.world, self._rank = world, rank
        self.device = torch.device("cuda", index)
        self.ctas = NCCL_CTAS if max_ctas is None else max_ctas
        """Most CTAs of one collective."""
        self._groups: dict[tuple[Phase, Role], Communicator] = {}
        torch.cuda.set_device(index)
        for phase in Phase:
            for role in Role:
                if world.canonical(role) is not role:
                    continue
                for members in world.groups[role]:
                    if len(members) > 1 and rank in members:
                        name = f"{phase}.{role} of {','.join(map(str, members))}"
                        self._groups[phase, role] = Communicator(
                            name, members, rank, store, self.device, phase is Phase.D, max_ctas, timeout_s
                        )
        # What an exchange leaves may be nothing, and then no kernel of a collective is ever resident.
        self._collectives = {
            phase: NcclCollectives(phase, rank, self._roles(phase), self.ctas * collects(world, phase))
            for phase in Phase
        }

    def collectives(self, phase: Phase) -> NcclCollectives:
        """The communicators that `phase` owns; the same object every time."""
        return self._collectives[phase]

    def communicator(self, phase: Phase, role: Role) -> Communicator | None:
        """That of `phase` for a canonical role; None where this rank is alone in it."""
        return self._groups.get((phase, self.world.canonical(role)))

    def warm(self, dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16)) -> None:
        """Use every communicator once with each operation, kind of kernel and type. All ranks together; waits."""
        for group in self._groups.values():
            for dtype in dtypes:
                for elements in _WARM_ELEMENTS:
                    part = torch.zeros(elements, dtype=dtype, device=self.device)
                    whole = torch.zeros(group.size * elements, dtype=dtype, device=self.device)
                    group.all_reduce(part)
                    group.all_gather(whole, part)
                    group.reduce_scatter(part, whole)
                    group.all_to_all(whole, whole.clone())
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Abort all communicators: whoever is in a collective, on the host or on the GPU, goes on. Idempotent.

        Graphs that hold collectives must be reset, before or meanwhile. Returns after 10 s at the latest.
        """
        for each in self._collectives.values():
            each.give_up()
        _abort([group for group in self._groups.values() if not group.closed])

    def _roles(self, phase: Phase) -> dict[Role, Communicator | None]:
        return {role: self._groups.get((phase, self.world.canonical(role))) for role in Role}


class Communicator:
    """One NCCL communicator, connected at once. What it does is enqueued on the current stream of the calling thread.

    It is a process group with one backend, as torch.distributed makes them, but in no registry.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        store: Store,
        device: torch.device,
        urgent: bool,
        max_ctas: int | None,
        timeout_s: float,
    ) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        self.name, self.size, self.index = name, len(members), list(members).index(rank)
        self.closed = False
        self._device = device
        self.store: Any = PrefixStore(f"nccl {name}/", store)
        mine = self.store
        options: Any = ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        options._timeout = timedelta(seconds=timeout_s)
        options.global_ranks_in_group = list(members)
        options.group_name = name
        options.config.blocking = 1
        if max_ctas is not None:
            options.config.min_ctas, options.config.max_ctas = 1, max_ctas
        try:
            self._backend: Any = ProcessGroupNCCL(PrefixStore("cuda/", mine), self.index, self.size, options)
            group_class: Any = dist.ProcessGroup
            self._group: Any = group_class(mine, self.index, self.size)
            self._group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
            self._group.bound_device_id = device
            self._backend._set_sequence_number_for_group()
            self._group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._backend)
            self._group._set_group_name(name)
            self._group._set_group_desc("turnstile")
            self._backend.eager_connect_single_device(device)
        except RuntimeError as error:
            if of_device(error) and "NCCL" not in str(error):
                raise
            raise RankLost(f"rank {rank} could not open NCCL communicator {name}: {_reason(error)}") from None
        self._reduce = AllreduceOptions()
        self._gather = AllgatherOptions()
        self._scatter = ReduceScatterOptions()
        self._exchange = AllToAllOptions()
        options_of: tuple[Any, ...] = (self._reduce, self._gather, self._scatter, self._exchange)
        for each in options_of:
            each.asyncOp = False

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum, in place."""
        self._enqueued(self._group.allreduce([x], self._reduce))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """All members' x, one after the other, into `out`; both contiguous."""
        self._enqueued(self._group._allgather_base(out, x, self._gather))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The sum's part of this member into `out`; both contiguous, x of `size` equal parts."""
        self._enqueued(self._group._reduce_scatter_base(out, x, self._scatter))

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> None:
        """Parts of x along dimension 0 to each member; those of each member into `out`. No sizes: equal parts."""
        self._enqueued(self._group.alltoall_base(out, x, list(received), list(sent), self._exchange))

    def registered(self) -> str:
        """The name by which torch's symmetric memory finds this group, in torch's registry from now on.

        Its NVSHMEM backend also asks for the group of all ranks, by the name that the default group has. Where there is
        no default group, that is this one: only a group of all ranks may be registered.
        """
        from torch._C import _distributed_c10d

        register: Any = _distributed_c10d
        register._register_process_group(self.name, self._group)
        try:
            register._resolve_process_group(DEFAULT_GROUP)
        except (RuntimeError, ValueError, KeyError, LookupError):
            register._register_process_group(DEFAULT_GROUP, self._group)
        return self.name

    def abort(self) -> None:
        """End it, whatever state its peers are in."""
        self.closed = True
        torch.cuda.set_device(self._device)
        self._backend.abort()

    def _enqueued(self, work: Any) -> None:
        if work is not None:  # a backend that has not put it on the current stream itself
            work.wait()


class NcclCollectives:
    """`kernel.ports.Collectives` of one phase over `groups` (None for a role in which this rank is alone).

    Every call enqueues and returns. NCCL adds in an order of its own, the same on all members; 16-bit floats are
    rounded on the way. A call whose tensors are empty on all members enqueues nothing.
    """

    def __init__(self, phase: Phase, rank: int, groups: dict[Role, Communicator | None], ctas: int) -> None:
        self._phase, self._rank, self._groups = phase, rank, groups
        self._home: torch.cuda.Stream | None = None
        self._closed = False
        self.ctas = ctas if any(group is not None for group in groups.values()) else 0
        """SMs that one of them may hold while it waits for its peers; 0 when there are no peers."""

    def allocate_on(self, stream: torch.cuda.Stream) -> None:
        """Allocate results on `stream` from now on, whichever stream they are computed on.

        For P: it frees what D's stream has written, and what it frees must come back to its own stream.
        """
        self._home = stream

    def all_reduce(self, role: Role, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group; same shape, and bitwise equal on all members."""
        group = self._groups[role]
        if group is None:
            return x
        out = self._empty(x, x.shape)
        out.copy_(x)
        self._run(role, "all_reduce", out, lambda: group.all_reduce(out))
        return out

    def all_gather(self, role: Role, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate the members' equal-shaped parts along `dim`, in group order."""
        group = self._groups[role]
        if group is None:
            return x
        at = dim % x.dim()
        part = x.contiguous()
        shape = (*x.shape[:at], group.size * x.shape[at], *x.shape[at + 1 :])
        result = self._empty(x, shape)
        # In dimension 0 the parts lie behind each other already.
        flat = result.view(-1) if at == 0 else x.new_empty(group.size * x.numel())
        self._run(role, "all_gather", part, lambda: group.all_gather(flat, part.view(-1)))
        if at and x.numel():
            split = (*x.shape[:at], group.size, *x.shape[at:])
            result.view(split).copy_(flat.view(group.size, *x.shape).movedim(0, at))
        return result

    def reduce_scatter(self, role: Role, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum over the group, then keep this member's rows; `sizes` are the members' row counts (may differ).

        NCCL wants equal parts. Unequal ones are padded to the largest, which moves at most twice the rows that are
        there, or, where padding would move more, they are summed whole as an all-reduce. All members know the sizes,
        so all of them choose alike, and nothing waits.
        Raises UsageError when the sizes do not add up to the rows of x.
        """
        group = self._groups[role]
        members = 1 if group is None else group.size
        check_parts(role, x.shape[0], sizes, members)
        if group is None:
            return x
        mine = sizes[group.index]
        rows = padded(sizes)
        if rows == 0:
            start = sum(sizes[: group.index])
            return self.all_reduce(role, x)[start : start + mine]
        whole = x.contiguous()
        if any(size != rows for size in sizes):
            whole = x.new_empty((members * rows, *x.shape[1:]))
            for index, part in enumerate(torch.split(x, list(sizes))):
                if part.shape[0]:  # the rows behind it hold anything, and nobody keeps their sum
                    whole[index * rows : index * rows + part.shape[0]] = part
        out = self._empty(x, (rows, *x.shape[1:]))
        self._run(role, "reduce_scatter", whole, lambda: group.reduce_scatter(out.view(-1), whole.view(-1)))
        return out[:mine]

    def give_up(self) -> None:
        """Make later calls raise RankLost, without ending anything."""
        self._closed = True

    def close(self) -> None:
        """Abort this phase's communicators, so that whoever waits in them goes on; later calls raise RankLost.

        Returns after 10 s at the latest. Idempotent.
        """
        self.give_up()
        groups = {id(group): group for group in self._groups.values() if group is not None and not group.closed}
        _abort(list(groups.values()))

    def _run(self, role: Role, operation: str, data: torch.Tensor, enqueue: Callable[[], None]) -> None:
        where = f"rank {self._rank} in {operation} over {role} of {self._phase}"
        if self._closed:
            raise RankLost(f"{where} was given up: its communicators were closed")
        if data.numel() == 0:
            return
        try:
            enqueue()
        except RuntimeError as error:
            if self._closed or not of_device(error):
                raise RankLost(f"{where} failed: {_reason(error)}") from None
            raise

    def _empty(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        home: AbstractContextManager[Any] = nullcontext() if self._home is None else torch.cuda.stream(self._home)
        with home:
            return like.new_empty(shape)


def padded(sizes: Sequence[int]) -> int:
    """Rows of each part when parts of `sizes` rows are padded to equal ones; 0 where that moves over twice the rows."""
    rows = max(sizes)
    return rows if len(sizes) * rows <= 2 * sum(sizes) else 0


def _abort(groups: Iterable[Communicator]) -> None:
    """Abort all of them at once, since one may wait for another, and wait for that, but not for ever."""
    all_of([(f"abort {group.name}", group.abort) for group in groups], _GRACE_S)


def _reason(error: BaseException) -> str:
    """The line that says why, of what NCCL's wrapper puts into many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = [line for line in lines if line.startswith("Last error:")]
    following = lines[lines.index(last[0]) + 1 :] if last else []
    return (following or lines or [type(error).__name__])[0]
