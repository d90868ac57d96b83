"""D's expert exchange over torch's symmetric memory and NVSHMEM: one message a chosen expert, and no host wait.

`all_to_all_vdev_2d` sorts what it receives by local expert, then by rank, and leaves its splits and offsets on the
device; `all_to_all_vdev_2d_offset` takes the results back by them. All buffers are allocated once: a graph finds them
where they were. A peer reads a send buffer behind the barrier that opens each operation, so it may be written again
after the operation that follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore

from kernel.comm.exchange.latency import GraphStates
from kernel.comm.exchange.nccl import nccl
from kernel.comm.exchange.pair import Exchange
from kernel.comm.nccl import DEFAULT_GROUP
from kernel.errors import PackageMissing, RankLost
from kernel.exchange.choose import INSTALL
from kernel.exchange.sizes import symmetric_rows
from kernel.exchange.states import LowLatency, Place
from kernel.ports import Received
from kernel.request import Phase
from kernel.topology import Role

if TYPE_CHECKING:
    from torch import Tensor

    from kernel.comm.nccl import Communicator, NcclWorld
    from kernel.exchange.shape import Shape


class Symmetric(Protocol):
    """Symmetric memory of a group, and two operations on it. Splits: int64 [experts], or [2, experts] with offsets."""

    rank: int

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory at which all members have one; collective."""

    def spread(self, x: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor) -> None:
        """Rows of x, sorted by expert, to their experts' ranks; there by local expert, then by rank."""

    def collect(self, x: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor) -> None:
        """The way back: rows of x where `splits` says, to their sources in the order in which they were sent."""


class SymmetricLatency(GraphStates):
    """`kernel.ports.LowLatencyExchange` over symmetric memory. Results come back unweighted and are weighted here."""

    def __init__(self, shape: Shape, memory: Symmetric, dtype: torch.dtype) -> None:
        self._shape, self._memory = shape, memory
        self.states = LowLatency(memory.rank, shape.decode_rows)
        pairs, most = symmetric_rows(shape)
        self._sent, self._back = (memory.empty((pairs, shape.hidden), dtype) for _ in range(2))
        self._here, self._results = (memory.empty((most, shape.hidden), dtype) for _ in range(2))
        self._splits = memory.empty((shape.experts,), torch.int64)
        self._arrived, self._returned = (memory.empty((2, shape.experts), torch.int64) for _ in range(2))
        device = self._sent.device
        self._places = torch.arange(most, device=device)
        self._ones = torch.ones((most, 1), dtype=dtype, device=device)
        self._order: Tensor | None = None
        self._weights: Tensor | None = None
        self._closed = False

    def dispatch(self, place: Place, rows: Tensor, experts: Tensor, weights: Tensor) -> Received:
        """See the port. All places of the buffer are returned; those that hold nothing have experts -1."""
        self._open(place)
        shape = self._shape
        self.states.dispatch(place, rows.shape[0])
        flat = experts.flatten()
        # Pairs for nobody sort behind all others and are not sent.
        keys, order = flat.masked_fill(flat < 0, shape.experts).sort(stable=True)
        self._sent[: flat.shape[0]] = rows.index_select(0, order.div(shape.topk, rounding_mode="floor"))
        bounds = torch.searchsorted(keys, torch.arange(shape.experts + 1, device=keys.device))
        self._splits.copy_(bounds[1:] - bounds[:-1])
        self._order, self._weights = order, weights.masked_fill(experts < 0, 0)
        self._memory.spread(self._sent, self._here, self._splits, self._arrived)
        ends = self._arrived[0].cumsum(0)
        segment = torch.searchsorted(ends, self._places, right=True)
        local = segment.div(shape.ranks, rounding_mode="floor")
        local = local.masked_fill(self._places >= ends[-1], -1).unsqueeze(1)
        return Received(self._here, local, self._ones)

    def combine(self, place: Place, results: Tensor) -> Tensor:
        """See the port."""
        self._open(place)
        self.states.combine(place)
        order, weights = self._order, self._weights
        assert order is not None
        assert weights is not None
        self._results.copy_(results)
        self._memory.collect(self._results, self._back, self._arrived, self._returned)
        found = torch.empty((order.shape[0], results.shape[1]), dtype=torch.float32, device=results.device)
        found.index_copy_(0, order, self._back[: order.shape[0]].float())
        # Behind the last message lies whatever was in memory.
        chosen = found.view(*weights.shape, results.shape[1])
        scaled = torch.where(weights.unsqueeze(-1) != 0, chosen * weights.unsqueeze(-1).float(), 0)
        return scaled.sum(1).to(results.dtype)

    def close(self) -> None:
        """See the port. The memory goes with the process's runtime."""
        self.states.close(aborts=True)
        self._closed = True

    def _open(self, place: Place) -> None:
        if self._closed:
            raise RankLost(f"rank {self._memory.rank} at {place.of_d} of D was given up: its exchange was closed")


class TorchSymmetric:
    """`Symmetric` over torch.distributed._symmetric_memory with its NVSHMEM backend, between the members of `group`."""

    def __init__(self, group: Communicator, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        if not symm_mem.is_nvshmem_available() or not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset"):
            raise PackageMissing(f"--exchange symm: torch {torch.__version__} lacks it: {INSTALL['symm_mem']}")
        self.rank, self._group, self._device = group.index, group.registered(), device
        self._symm: Any = symm_mem
        self._ops: Any = torch.ops.symm_mem
        self._symm.set_backend("NVSHMEM")
        for name in (self._group, DEFAULT_GROUP):
            introduce(name, group.index, group.size, group.store)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Symmetric`."""
        made: Tensor = self._symm.empty(shape, dtype=dtype, device=self._device)
        self._symm.rendezvous(made, group=self._group)
        return made

    def spread(self, x: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor) -> None:
        """See `Symmetric`."""
        self._ops.all_to_all_vdev_2d(x, out, splits, out_splits, self._group)

    def collect(self, x: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor) -> None:
        """See `Symmetric`."""
        self._ops.all_to_all_vdev_2d_offset(x, out, splits, out_splits, self._group)


def introduce(name: str, rank: int, size: int, store: Any) -> None:
    """Tell torch's symmetric memory of a group by itself. Newer versions look into the registry of groups instead.

    Others ask torch.distributed for the group's ranks, which knows of none that it has not made.
    """
    import torch.distributed._symmetric_memory as symm_mem
    from torch._C._distributed_c10d import _SymmetricMemory

    known: dict[str, Any] = getattr(symm_mem, "_group_name_to_store", {})
    if name not in known:
        known[name] = PrefixStore("symmetric memory/", store)
        _SymmetricMemory.set_group_info(name, rank, size, known[name])


def symm(shape: Shape, dtype: torch.dtype, world: NcclWorld) -> Exchange:
    """D over symmetric memory; P, whose sizes the host knows, over NCCL. Raises PackageMissing."""
    made = nccl(shape, dtype, world)
    decode = world.communicator(Phase.D, Role.TP)
    assert decode is not None
    memory = TorchSymmetric(decode, world.device)
    return Exchange(made.normal, SymmetricLatency(shape, memory, dtype))
