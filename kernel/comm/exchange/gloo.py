"""A wire over torch.distributed's gloo: several hosts, and the oracle of shared memory.

P has one process group for its counts, on a thread of its own, and one for its rows; D has one.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kernel.comm.gloo import wait_for
from kernel.device.compat import gather_into
from kernel.device.worker import WorkerStream
from kernel.errors import RankLost, UsageError
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.comm.exchange.wire import Matrix
    from kernel.ports import Event


class GlooWire:
    """`kernel.comm.exchange.wire.Wire` of one phase. All ranks construct P's, then D's, at the same point.

    The default process group must have been initialised with all ranks; it stays the caller's.
    """

    def __init__(self, phase: Phase, timeout_s: float = 1800.0) -> None:
        if not dist.is_initialized():
            raise UsageError("--exchange gloo needs torch.distributed initialised: start the ranks with torchrun")
        self.rank, self.size, self._phase = dist.get_rank(), dist.get_world_size(), phase
        self._closed = False
        self._gather_into = gather_into()
        make = partial(dist.new_group, timeout=timedelta(seconds=timeout_s), backend="gloo")
        self._rows = make()
        self._counts = make() if phase is Phase.P else None
        self._background = WorkerStream(phase, f"rank{self.rank} counts", _nothing) if phase is Phase.P else None

    def announce(self, counts: Sequence[int], label: str) -> Event[Matrix]:
        """See `Wire`."""
        assert self._background is not None, "only P announces"
        return self._background.submit(partial(self._told, list(counts), label), label)

    def move(self, messages: Tensor, matrix: Matrix, label: str) -> Tensor:
        """See `Wire`."""
        width = messages.shape[1]
        sent = list(matrix[self.rank])
        received = [row[self.rank] for row in matrix]
        out = messages.new_empty((sum(received), width))
        if any(map(sum, matrix)):  # else nobody calls; whoever has nothing himself still does
            work = dist.all_to_all_single(
                out.view(-1),
                messages.contiguous().view(-1),
                [width * each for each in received],
                [width * each for each in sent],
                group=self._rows,
                async_op=True,
            )
            self._wait(work, label)
        return out

    def gather(self, messages: Tensor, label: str) -> Tensor:
        """See `Wire`."""
        out = messages.new_empty((self.size * messages.numel(),))
        work = self._gather_into(out, messages.contiguous().view(-1), group=self._rows, async_op=True)
        self._wait(work, label)
        return out.view(self.size, *messages.shape)

    def close(self) -> None:
        """See `Wire`. The groups end with the process, so that no rank waits for another to end."""
        self._closed = True
        if self._background is not None:
            self._background.stop(RankLost(f"rank {self.rank} closed its exchange before these counts were there"))

    def _told(self, counts: list[int], label: str) -> list[list[int]]:
        mine = torch.tensor(counts, dtype=torch.int64)
        out = mine.new_empty(self.size * self.size)
        self._wait(self._gather_into(out, mine, group=self._counts, async_op=True), label)
        matrix: list[list[int]] = out.view(self.size, self.size).tolist()
        return matrix

    def _wait(self, work: Any, label: str) -> None:
        where = f"rank {self.rank} in {label} of {self._phase}"
        wait_for(work, where, lambda: self._closed, "its exchange was closed")


def _nothing() -> None:
    """The thread needs no preparation."""
