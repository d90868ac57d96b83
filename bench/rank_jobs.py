"""What ranks do in bench_rendezvous.py and bench_collectives.py: functions for `tests.ranks.Ranks`, ours beside gloo's.

Both sides run in the same processes, one block after the other, and a rank's first calls of a block do not count: the
ranks arrive at it apart.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from kernel.comm.rendezvous import SharedRendezvous
from kernel.comm.shm_collectives import SharedCollectives
from kernel.comm.tcp_rendezvous import TcpRendezvous
from kernel.device.compat import gather_into
from kernel.request import Phase
from kernel.topology import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import Me

FIRST: Final = 2
OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter")


async def begin(me: Me, store: str) -> None:
    """Connect this rank in every way. store: a file that all ranks use and nobody did before."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed: Any = dist  # it does not say that it exports its stores
    files = distributed.FileStore(store, me.world.size)
    dist.init_process_group("gloo", store=files, rank=me.rank, world_size=me.world.size)
    port = 0 if me.rank == 0 else int(files.get("port"))
    me.keep["tcp"] = await TcpRendezvous.open(
        me.rank, me.world.size, "bench", port=port, listening=lambda chosen: files.set("port", str(chosen))
    )
    me.keep["shared"] = SharedRendezvous(me.arena, me.rank)
    me.keep["collectives"] = SharedCollectives(me.arena, Phase.D, me.rank)


async def exchanges(me: Me, way: str, count: int, payload: int) -> tuple[list[int], float]:
    """Nanoseconds of each of `count` all-rank rendezvous by `way` (shared, tcp or gloo), one right after the other, and
    the CPU time of one, of all threads of this rank.
    """
    taken, cpu = [], time.process_time_ns()
    rendezvous, data = me.keep.get(way), bytes(payload)
    for _ in range(FIRST + count):
        start = time.perf_counter_ns()
        if rendezvous is None:
            dist.barrier()
        else:
            await rendezvous.exchange("bench", data)
        taken.append(time.perf_counter_ns() - start)
    return taken[FIRST:], (time.process_time_ns() - cpu) / (FIRST + count)


def collective(me: Me, way: str, operation: str, size: int, count: int) -> list[int]:
    """Nanoseconds of each of `count` calls. size: bytes of the whole tensor, float32: what an all-reduce sums, an
    all-gather makes and a reduce-scatter is given on each rank.
    """
    call = _ours(me, operation, size // 4) if way == "shared" else _gloos(me, operation, size // 4)
    taken = []
    with torch.inference_mode():
        for _ in range(FIRST + count):
            start = time.perf_counter_ns()
            call()
            taken.append(time.perf_counter_ns() - start)
    return taken[FIRST:]


def agree(me: Me, operation: str, size: int) -> float:
    """The largest difference between our result and gloo's."""
    source = torch.Generator().manual_seed(me.rank)
    fill = torch.randn(size // 4, generator=source)
    return float((_ours(me, operation, size // 4, fill)() - _gloos(me, operation, size // 4, fill)()).abs().max())


def _ours(me: Me, operation: str, numbers: int, fill: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    members = me.world.size
    given = torch.ones(numbers) if fill is None else fill
    shared: SharedCollectives = me.keep["collectives"]
    if operation == "all_reduce":
        return lambda: shared.all_reduce(Role.TP, given)
    if operation == "all_gather":
        part = given[: numbers // members].clone()
        return lambda: shared.all_gather(Role.TP, part)
    rows = given.view(members, -1)
    return lambda: shared.reduce_scatter(Role.TP, rows, [1] * members).view(-1)


def _gloos(me: Me, operation: str, numbers: int, fill: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    """gloo as it is called at its best: in place, into tensors that are there."""
    members = me.world.size
    given = torch.ones(numbers) if fill is None else fill.clone()
    out, part = torch.empty(numbers), torch.empty(numbers // members)

    def call() -> torch.Tensor:
        if operation == "all_reduce":
            dist.all_reduce(given)
            return given
        if operation == "all_gather":
            gather(out, given[: numbers // members])
            return out
        scatter(part, given)
        return part

    gather = gather_into()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call
