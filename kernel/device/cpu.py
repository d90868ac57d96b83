"""One rank's device in the CPU world: two worker threads as streams, and torch's CPU operations as kernels."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from kernel.comm.route import WorkerRoute
from kernel.device.worker import Completion, Watch, WorkerStream
from kernel.errors import RankLost
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from kernel.ports import Collectives, ExpertExchange

T = TypeVar("T")
_GRACE_S: Final = 10.0


class TorchLayout:
    """`kernel.ports.Layout` on torch tensors. Only `place` of all rows shares memory with its argument."""

    def place(self, x: torch.Tensor, start: int, total: int) -> torch.Tensor:
        """Zeros of `total` rows with x at row `start`; x itself where it is all of them."""
        if x.shape[0] == total:
            return x
        out = x.new_zeros((total, *x.shape[1:]))
        out[start : start + x.shape[0]] = x
        return out

    def take(self, x: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The rows [start, stop) of each range, concatenated."""
        if len(ranges) == 1:
            start, stop = ranges[0]
            return x[start:stop].clone()
        if not ranges:
            return x[:0].clone()
        return torch.cat([x[start:stop] for start, stop in ranges])


class _ProducerStream(WorkerStream):
    """P's stream: a submission brings along the places that were reserved for it."""

    route: WorkerRoute

    def submit(self, work: Callable[[], T], label: str) -> Completion[T]:
        return super().submit(self.route.bind(work), label)


class CpuDevice:
    """`kernel.ports.Device` of the CPU world.

    collectives: each phase's communicators; owned, closed with the device. threads: torch threads of each stream.
    watch: told of every job that starts and finishes on a stream, routed collectives among D's. expert_exchange: owned
    too.
    Streams are used from the event loop; work runs on the threads `rank<k> D` and `rank<k> P`.
    """

    def __init__(
        self,
        rank: int,
        collectives: Mapping[Phase, Collectives],
        *,
        threads: int = 1,
        watch: Watch | None = None,
        expert_exchange: ExpertExchange | None = None,
    ) -> None:
        self.rank = rank
        self.expert_exchange = expert_exchange
        self.layout = TorchLayout()
        self.deferred = True
        self._collectives = dict(collectives)
        prepare = partial(torch.set_num_threads, threads)  # a setting of each thread
        self._decode = WorkerStream(Phase.D, f"rank{rank} D", prepare, watch)
        self._prefill = _ProducerStream(Phase.P, f"rank{rank} P", prepare, watch)
        self._route = WorkerRoute(self._decode.put, partial(self.scope, Phase.P))
        self._prefill.route = self._route

    def stream(self, phase: Phase) -> WorkerStream:
        """The stream that `phase` owns."""
        return self._decode if phase is Phase.D else self._prefill

    def route(self) -> WorkerRoute:
        """P's places on D's stream. Reserve a segment's places right before submitting it to P's stream."""
        return self._route

    def collectives(self, phase: Phase) -> Collectives:
        """The communicators that `phase` owns."""
        return self._collectives[phase]

    @contextmanager
    def scope(self, phase: Phase) -> Generator[None]:
        """Inference mode on, autocast off, for this thread; both as before at the end, whatever model code left."""
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            yield

    async def close(self) -> None:
        """End the streams: work not begun raises RankLost, and so do collectives in progress. Idempotent.

        Returns when both threads have ended, at the latest after 10 s (a thread stuck elsewhere dies with the process).
        """
        error = RankLost(f"rank {self.rank}'s device was closed before this work began")
        streams = (self._decode, self._prefill)
        for stream in streams:
            stream.stop(error)
        for communicators in self._collectives.values():
            communicators.close()
        if self.expert_exchange is not None:
            self.expert_exchange.close()
        try:
            async with asyncio.timeout(_GRACE_S):
                for stream in streams:
                    await stream.ended.wait()
                    stream.join()
        except TimeoutError:
            pass
