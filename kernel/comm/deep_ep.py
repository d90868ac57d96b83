"""The expert exchange by DeepEP's unmodified package: P's normal path and D's low-latency path (paper section 5).

Two buffers share nothing that a kernel changes: each has its memory, workspace, counters, barrier signals and stream.
P's buffer uses NVLink memory alone, D's symmetric memory of the one NVSHMEM runtime that `kernel.comm.nvshmem` owns.

P's dispatch is split without DeepEP's help. `notify` counts rows on P's stream and sends the counts through a mailbox
in symmetric memory on a stream of its own; they come to the host by a thread that waits without the interpreter's lock.
`submit` then passes DeepEP the exact number of rows as its worst case: with one it does not wait on the CPU (which it
would with the lock held), and what comes has exactly that size. DeepEP's own notification runs again inside.

D runs in hook mode: its kernels are on the current stream, so that a graph captures them, and no stream is shared.
Read against tokenspeed-deepep 1.2.1.post20251110.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kernel.comm.exchange.latency import GraphStates
from kernel.comm.exchange.nccl import CountsFetch
from kernel.comm.exchange.normal import Data, NormalStates, value_of
from kernel.comm.exchange.pair import Exchange
from kernel.comm.nvshmem import QUEUE_DEPTH, Mailbox, Runtime
from kernel.comm.peers import Peers
from kernel.errors import PackageMissing, UsageError
from kernel.exchange import deep_ep as limits
from kernel.exchange.choose import INSTALL
from kernel.exchange.states import LowLatency, Normal, Place
from kernel.ports import Received

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.comm.exchange.wire import Matrix
    from kernel.exchange.shape import Shape
    from kernel.ports import Event

_SEND: Final = {2: (24, 10), 4: (6, 9), 8: (6, 4)}
"""Rows that a channel of (dispatch, combine) sends at once, by ranks: DeepEP's own tuning for NVLink."""
_CHUNK: Final = 256


@dataclass(frozen=True, slots=True)
class Configs:
    """Of P's two kernels, as DeepEP makes them."""

    dispatch: Any
    combine: Any


def library() -> Any:
    """The package deep_ep. Raises PackageMissing, saying what to install."""
    try:
        import deep_ep
    except ImportError as error:
        raise PackageMissing(f"--exchange deepep needs deep_ep ({error}): {INSTALL['deep_ep']}") from None
    return deep_ep


def build(
    shape: Shape,
    store: Any,
    rank: int,
    index: int,
    *,
    num_sms: int = limits.NUM_SMS,
    nccl: int = 0,
    depth: int = QUEUE_DEPTH,
) -> Exchange:
    """Both phases' exchanges on GPU `index`. All ranks call it together with one shape, before a graph is captured.

    store: a torch.distributed store that all ranks reach. num_sms: SMs of P's kernels, even. nccl: CTAs of NCCL's
    largest collective beside them, for the budget.
    Raises UsageError (the rule of DeepEP that is broken, and the knob), PackageMissing, VersionMismatch, RankLost.
    """
    package = library()
    peers = Peers(store, rank, shape.ranks, "expert exchange")
    processors = torch.cuda.get_device_properties(index).multi_processor_count
    limits.check(shape, num_sms=num_sms, sms=processors, nccl=nccl, queue_depth=depth)
    _reachable(peers, index)
    runtime = Runtime(peers, index, shape.local, depth)
    low_latency = DeepEpLowLatency(shape, package, peers, index)
    normal = DeepEpNormal(shape, package, peers, runtime, num_sms)
    return Exchange(normal, low_latency, runtime.life)


class PendingDispatch:
    """`kernel.ports.Pending`."""

    __slots__ = ("event", "experts", "layout", "number", "place", "rows")

    def __init__(
        self, number: int, place: Place, rows: int, experts: Tensor, layout: Any, event: Event[Matrix]
    ) -> None:
        self.number, self.place, self.rows = number, place, rows
        self.experts, self.layout, self.event = experts, layout, event


class _Buffered:
    """What owns a buffer of DeepEP. buffer: DeepEP's own; None once closed."""

    buffer: Any
    _index: int

    def _destroy(self) -> None:
        """Let the buffer go; it goes when all peers have. Idempotent."""
        if self.buffer is not None:
            torch.cuda.set_device(self._index)  # of this thread: closing has one of its own
            buffer, self.buffer = self.buffer, None
            buffer.destroy()


class DeepEpNormal(NormalStates, _Buffered):
    """`kernel.ports.NormalExchange` by a buffer of NVLink memory. Everything is enqueued behind the current stream."""

    def __init__(self, shape: Shape, package: Any, peers: Peers, runtime: Runtime, num_sms: int) -> None:
        self._shape, self._index = shape, runtime.index
        send = _SEND[shape.ranks]
        self.configs = Configs(*(package.Config(num_sms, each, _CHUNK, 6, 128) for each in send))
        self.nbytes = max(
            each.get_nvl_buffer_size_hint(shape.row_bytes, shape.ranks)
            for each in (self.configs.dispatch, self.configs.combine)
        )
        """NVLink memory, in bytes."""
        self.buffer = package.Buffer(
            None, num_nvl_bytes=self.nbytes, low_latency_mode=False, explicitly_destroy=True, comm=peers
        )
        self.states = Normal(peers.rank, shape.prefill_rows)
        self._mailbox = Mailbox(runtime)
        self._fetch = CountsFetch(peers.rank, torch.device("cuda", runtime.index))
        stream: Any = torch.cuda.Stream
        self._side = stream(runtime.index)
        """Where counts wait for their peers: P's stream does not."""
        self._handle: Any = None
        self._room = 0

    def notify(self, place: Place, experts: Tensor) -> PendingDispatch:
        """See the port."""
        count = experts.shape[0]
        number = self.states.notify(place, count)
        if not count:  # DeepEP's kernels want a row: one that nobody gets
            experts = experts.new_full((1, self._shape.topk), -1)
        layout = self.buffer.get_dispatch_layout(experts, self._shape.experts)
        self._side.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(self._side):
            event = self._fetch(self._mailbox.post(layout[0], self._side))
        layout[0].record_stream(self._side)
        self._last = pending = PendingDispatch(number, place, count, experts, layout, event)
        return pending

    def arriving(self, pending: PendingDispatch) -> Sequence[int]:
        """See the port. The event's value is the words that came for this rank alone."""
        return self._mailbox.counts(value_of(pending.event))

    def submit(self, pending: PendingDispatch, rows: Tensor, weights: Tensor) -> Received:
        """See the port."""
        self.states.submit(pending.number, counted=pending.event.done())
        arriving = sum(self.arriving(pending))
        self._room = max(1, arriving)
        per_rank, _, per_expert, in_rank, _ = pending.layout
        experts = pending.experts
        if not rows.shape[0]:
            rows, weights = rows.new_zeros((1, self._shape.hidden)), weights.new_zeros((1, self._shape.topk))
        data = self._data = Data()
        came, chosen, shares, _, self._handle, _ = self.buffer.dispatch(
            rows.contiguous(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=experts,
            topk_weights=weights.float().contiguous(),
            num_worst_tokens=self._room,
            config=self.configs.dispatch,
        )
        data.ends_behind(came)
        return Received(came[:arriving], chosen[:arriving], shares[:arriving].to(rows.dtype))

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """See the port."""
        pending = self._last
        self.states.combine(place)
        assert pending is not None
        if results.shape[0] < self._room:
            results = results.new_zeros((self._room, self._shape.hidden))
        total: Tensor = self.buffer.combine(results.contiguous(), self._handle, config=self.configs.combine)[0]
        self._handle = None
        return total[: pending.rows]

    def close(self) -> None:
        """See the port. Peers take part."""
        self._fetch.close()
        self._destroy()


class DeepEpLowLatency(GraphStates, _Buffered):
    """`kernel.ports.LowLatencyExchange` by a buffer of symmetric memory.

    What comes lies by expert, in `local x (ranks x rows)` places of which each expert's first ones are taken; `combine`
    weights results at their source. Results of at most two operations may be held: the buffer has two halves.
    """

    def __init__(self, shape: Shape, package: Any, peers: Peers, index: int) -> None:
        self._shape, self._index = shape, index
        self.nbytes = package.Buffer.get_low_latency_rdma_size_hint(
            shape.decode_rows, shape.hidden, shape.ranks, shape.experts
        )
        """Symmetric memory, in bytes."""
        self.buffer = package.Buffer(
            None,
            num_rdma_bytes=self.nbytes,
            low_latency_mode=True,
            num_qps_per_rank=shape.local,
            explicitly_destroy=True,
            comm=peers,
        )
        self.states = LowLatency(peers.rank, shape.decode_rows)
        places = torch.arange(shape.ranks * shape.decode_rows, device=f"cuda:{index}")
        self._places = places.unsqueeze(0)
        self._numbers = torch.arange(shape.local, device=f"cuda:{index}").unsqueeze(1)
        self._ones = torch.ones((shape.local * places.numel(), 1), dtype=torch.bfloat16, device=f"cuda:{index}")
        self._sent: tuple[Tensor, Tensor, Any, int] | None = None

    def dispatch(self, place: Place, rows: Tensor, experts: Tensor, weights: Tensor) -> Received:
        """See the port."""
        shape, count = self._shape, rows.shape[0]
        self.states.dispatch(place, count)
        if not count:
            rows, weights = rows.new_zeros((1, shape.hidden)), weights.new_zeros((1, shape.topk))
            experts = experts.new_full((1, shape.topk), -1)
        came, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            rows.contiguous(), experts, shape.decode_rows, shape.experts, use_fp8=shape.fp8, return_recv_hook=True
        )
        hook()
        self._sent = (experts, weights.float().contiguous(), handle, count)
        taken = torch.where(self._places < counts.unsqueeze(1), self._numbers, -1).view(-1, 1)
        if shape.fp8:
            came = _whole(*came)
        return Received(came.view(-1, shape.hidden), taken, self._ones, grouped=True)

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """See the port."""
        self.states.combine(place)
        assert self._sent is not None
        shape = self._shape
        experts, weights, handle, count = self._sent
        self._sent = None
        parts = results.contiguous().view(shape.local, -1, shape.hidden)
        total, _, hook = self.buffer.low_latency_combine(parts, experts, weights, handle, return_recv_hook=True)
        hook()
        mine: Tensor = total[:count]
        return mine

    def close(self) -> None:
        """See the port. Peers take part."""
        self.states.close()
        self._destroy()


def _whole(rows: Tensor, scales: Tensor) -> Tensor:
    """8-bit rows [e, m, hidden] with a scale for each 128 numbers, as bfloat16."""
    wide = rows.to(torch.float32).view(*rows.shape[:2], -1, 128) * scales.unsqueeze(-1)
    return wide.view(rows.shape).to(torch.bfloat16)


def _reachable(peers: Peers, index: int) -> None:
    """Raise UsageError unless this GPU reads every peer's memory. All are on one host: `limits` refuses others."""
    for rank, other in enumerate(peers.all_gather("its GPU", index)):
        if rank != peers.rank and (other == index or not torch.cuda.can_device_access_peer(index, other)):
            raise UsageError(
                f"rank {peers.rank} on GPU {index} cannot read the memory of rank {rank} on GPU {other}: DeepEP needs"
                " NVLink between all GPUs; choose --exchange nccl"
            )
