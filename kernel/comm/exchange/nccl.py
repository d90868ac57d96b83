"""The expert exchange over NCCL's all-to-all: any number of hosts, and what several hosts fall back to.

It uses each phase's own communicator of all ranks, on which the program with an exchange has nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kernel.comm.exchange.group import LatencyOverGroup, NormalOverGroup
from kernel.comm.exchange.pair import Exchange
from kernel.device.worker import WorkerStream
from kernel.errors import RankLost, UsageError
from kernel.request import Phase
from kernel.topology import Role

if TYPE_CHECKING:
    from torch import Tensor

    from kernel.comm.exchange.wire import Matrix
    from kernel.comm.nccl import NcclWorld
    from kernel.exchange.shape import Shape
    from kernel.ports import Event


class CountsFetch:
    """Brings counts from the GPU to the host: a copy behind them on their stream, and a thread that waits for it.

    The thread sleeps in CUDA without the interpreter's lock, so that neither the loop nor another stream waits.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._thread = WorkerStream(Phase.P, f"rank{rank} counts", partial(torch.cuda.set_device, device))
        self._host: Tensor | None = None
        self._here = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def __call__(self, counts: Tensor) -> Event[Matrix]:
        """The numbers of int64 `counts`. One at a time, as one dispatch is pending at most."""
        if self._host is None:
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        host, here = self._host, self._here
        host.copy_(counts, non_blocking=True)
        here.record()

        def wait() -> Matrix:
            here.synchronize()
            matrix: Matrix = host.tolist()
            return matrix

        return self._thread.submit(wait, "counts")

    def close(self) -> None:
        """End the thread, once the GPU has let it go. Idempotent."""
        self._thread.stop(RankLost(f"rank {self._rank} closed its exchange before these counts were there"))


class NcclNormal(NormalOverGroup):
    """`kernel.ports.NormalExchange` over NCCL."""

    def close(self) -> None:
        """See the port."""
        super().close()
        if isinstance(self._fetch, CountsFetch):
            self._fetch.close()


def nccl(shape: Shape, dtype: torch.dtype, world: NcclWorld) -> Exchange:
    """The exchange over each phase's communicator of all ranks of `world`. Raises UsageError in a world of one rank."""
    prefill, decode = (world.communicator(phase, Role.TP) for phase in (Phase.P, Phase.D))
    if prefill is None or decode is None:
        raise UsageError("--exchange nccl: one rank has every expert at home: choose local, or none")
    fetch = CountsFetch(prefill.index, world.device)
    normal = NcclNormal(shape, prefill, dtype, fetch)
    return Exchange(normal, LatencyOverGroup(shape, decode, dtype, world.device))
