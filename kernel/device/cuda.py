"""One rank's device in the CUDA world: two streams of one GPU, P's of low and D's of high priority, and P's route.

The event loop's thread does the host enqueue of both phases, in place (`deferred` is False). Process-wide controls of
the paper's comparison, NCCL_LAUNCH_ORDER_IMPLICIT and CUDA_DEVICE_MAX_CONNECTIONS, are read as CUDA and NCCL start, so
whoever starts the process sets them.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch

from kernel.comm.nccl import NcclCollectives
from kernel.device import occupancy
from kernel.device.bounded import all_of
from kernel.device.cpu import TorchLayout
from kernel.device.cuda_graph import CudaGraph
from kernel.device.cuda_route import CudaRoute
from kernel.device.cuda_stream import CudaStream, timing_event
from kernel.device.device_clock import DeviceClock
from kernel.device.faults import Faults
from kernel.errors import RankLost, UsageError
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from kernel.device.worker import Watch
    from kernel.ports import Collectives, ExpertExchange

_GRACE_S: Final = 10.0


class CudaDevice:
    """`kernel.ports.Device` on GPU `index`.

    collectives: each phase's communicators; owned, closed with the device. watch: told of every submission that starts
    and finishes, with the device's times. prefill_sms: SMs that P's kernels may use (a green context); None for all.
    expert_exchange: owned too; exchange: its kernels on a GPU of so many SMs, for the budget.
    Raises UsageError when there is no such GPU, or what must be resident together does not fit on it.
    """

    def __init__(
        self,
        rank: int,
        index: int,
        collectives: Mapping[Phase, Collectives],
        *,
        watch: Watch | None = None,
        prefill_sms: int | None = None,
        exchange: Callable[[int], Iterable[occupancy.Kernel]] | None = None,
        expert_exchange: ExpertExchange | None = None,
    ) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not 0 <= index < count:
            raise UsageError(f"rank {rank} wants GPU {index}, and torch {torch.__version__} sees {count} of them")
        self.rank, self.torch_device = rank, torch.device("cuda", index)
        self.layout = TorchLayout()
        self.deferred = False
        self.expert_exchange = expert_exchange
        self._collectives = dict(collectives)
        torch.cuda.set_device(index)
        self.budget = self._afford(exchange, prefill_sms)
        """SMs in the worst case."""
        self._green: Any = None
        least, greatest = torch.cuda.current_stream(index).priority_range()
        self._streams = {
            Phase.P: _stream(self.torch_device, least)
            if prefill_sms is None
            else self._confined(prefill_sms),
            Phase.D: _stream(self.torch_device, greatest),
        }
        self._pools: dict[Phase, Any] = {}
        self._graphs: WeakSet[CudaGraph] = WeakSet()
        mine = self._collectives[Phase.P]
        at_home = isinstance(mine, NcclCollectives)
        if isinstance(mine, NcclCollectives):
            mine.allocate_on(self._streams[Phase.P])
        self._route = CudaRoute(self._streams[Phase.P], self._streams[Phase.D], keep=not at_home)
        self._faults, self._clock = Faults(rank), DeviceClock(self._mark)
        make = partial(
            CudaStream,
            faults=self._faults,
            clock=self._clock,
            prepare=partial(torch.cuda.set_device, index),
            watch=watch,
        )
        self._decode, self._prefill = (
            make(
                Phase.D,
                self._streams[Phase.D],
                f"rank{rank} D",
                current=partial(torch.cuda.stream, self._streams[Phase.D]),
                before=self._route.before_decode,
            ),
            make(
                Phase.P,
                self._streams[Phase.P],
                f"rank{rank} P",
                current=partial(torch.cuda.stream, self._streams[Phase.P]),
                after=self._route.after_prefill,
            ),
        )

    def stream(self, phase: Phase) -> CudaStream:
        """The stream that `phase` owns."""
        return self._decode if phase is Phase.D else self._prefill

    def torch_stream(self, phase: Phase) -> torch.cuda.Stream:
        """The same, as torch knows it."""
        return self._streams[phase]

    def route(self) -> CudaRoute:
        """P's places on D's stream. Reserve a segment's places right before submitting it to P's stream."""
        return self._route

    def collectives(self, phase: Phase) -> Collectives:
        """The communicators that `phase` owns."""
        return self._collectives[phase]

    @contextmanager
    def scope(self, phase: Phase) -> Generator[None]:
        """Inference mode, this GPU, the phase's stream, no autocast; all as before at the end."""
        with (
            torch.inference_mode(),
            torch.cuda.device(self.torch_device),
            torch.cuda.stream(self._streams[phase]),
            torch.autocast("cuda", enabled=False),
        ):
            yield

    def graph(self, phase: Phase) -> CudaGraph:
        """A graph of `phase`, in the pool that the phase's graphs share. Dropped with the device.

        Graphs of communicators must go before these can be closed, so make them here, or `reset` them yourself.
        """
        if phase not in self._pools:
            self._pools[phase] = torch.cuda.graph_pool_handle()
        made = CudaGraph(self._streams[phase], self._pools[phase])
        self._graphs.add(made)
        return made

    async def close(self) -> None:
        """End the streams: work that has not finished raises RankLost, and collectives in progress are aborted.

        Returns when the GPU is through, at the latest after about 20 s (what is stuck then dies with the process).
        Idempotent.
        """
        error = RankLost(f"rank {self.rank}'s device was closed before this work had finished")
        streams = (self._decode, self._prefill)
        for stream in streams:
            stream.stop(error)
        # At once: a communicator does not end before the graphs that hold it, nor a graph that hangs before those end.
        calls = [(f"close {phase}", each.close) for phase, each in self._collectives.items()]
        calls += [("reset graph", graph.reset) for graph in list(self._graphs)]
        await asyncio.to_thread(all_of, calls, _GRACE_S + 1)
        if self.expert_exchange is not None:  # which refuses to go while graphs hold pointers into it
            last = [("close the expert exchange", self.expert_exchange.close)]
            await asyncio.to_thread(all_of, last, _GRACE_S + 1)
        try:
            async with asyncio.timeout(_GRACE_S):
                for stream in streams:
                    await stream.ended.wait()
        except TimeoutError:
            pass

    # -- inside -------------------------------------------------------------------------------------------------

    def _mark(self) -> torch.cuda.Event:
        event = timing_event()
        event.record(self._streams[Phase.D])
        event.synchronize()
        return event

    def _afford(
        self, exchange: Callable[[int], Iterable[occupancy.Kernel]] | None, prefill_sms: int | None
    ) -> occupancy.Budget:
        sms = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
        ctas = {phase: getattr(each, "ctas", 0) for phase, each in self._collectives.items()}
        kernels = occupancy.collectives(ctas[Phase.D], ctas[Phase.P], routed=True)
        kernels += exchange(sms) if exchange is not None else ()
        return occupancy.check(sms, kernels, prefill_sms=prefill_sms, where=f"rank {self.rank}: ")

    def _confined(self, sms: int) -> torch.cuda.Stream:
        from torch.cuda import green_contexts

        create = getattr(green_contexts.GreenContext, "create", None)
        if not green_contexts.SUPPORTED or create is None or not hasattr(green_contexts.GreenContext, "Stream"):
            raise UsageError(f"--prefill-sms {sms}: torch {torch.__version__} makes no streams of green contexts")
        self._green = create(sms, self.torch_device.index)  # its streams live as long as it does
        made = self._green.Stream()
        # Whatever class of stream that is, as one of torch.cuda.
        cls: Any = torch.cuda.Stream
        found: torch.cuda.Stream = cls(
            stream_id=made.stream_id, device_index=made.device_index, device_type=made.device_type
        )
        return found


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
