"""The process's one NVSHMEM runtime, initialised by us before any DeepEP buffer, and its mailboxes (paper section 5).

NVSHMEM counts its initialisations. Because ours is the first, a buffer that is built later joins this runtime, and a
buffer that is destroyed only takes its own count back: it cannot end the runtime under the other phase, or under a
captured graph. What DeepEP would set in the environment is read once, at the first initialisation, so it is set here.

NVSHMEM binds a process to one GPU and one world; there is one runtime a process, like the library behind it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import torch

from kernel.errors import PackageMissing, RankLost
from kernel.exchange.choose import INSTALL
from kernel.exchange.deep_ep import check_versions
from kernel.exchange.lifetime import Lifetime
from kernel.exchange.sizes import GRANULE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kernel.comm.peers import Peers

DEVICE_LIBRARY: Final = (3, 4, 5)
"""Inside DeepEP's wheel."""
QUEUE_DEPTH: Final = 1024
_TAG: Final = 1 << 32
_TEAMS: Final = 16


def environment(local_experts: int, depth: int = QUEUE_DEPTH) -> Mapping[str, str]:
    """What NVSHMEM reads when it starts. local_experts: D's queue pairs to each peer. depth: of a queue pair.

    IBGDA is asked for where there is no InfiniBand too: NVSHMEM says that it failed and goes on, and the device state
    that DeepEP's kernels look at is only there if it was asked for. NVLink multicast is off, as DeepEP requires.
    """
    return {
        "NVSHMEM_IB_ENABLE_IBGDA": "1",
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": str(local_experts),
        "NVSHMEM_QP_DEPTH": str(depth),
        "NVSHMEM_CUMEM_GRANULARITY": str(GRANULE),
        "NVSHMEM_DISABLE_NVLS": "1",
        "NVSHMEM_DISABLE_MNNVL": "1",
        "NVSHMEM_DISABLE_P2P": "0",
        "NVSHMEM_MAX_TEAMS": str(_TEAMS),
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    }


class Runtime:
    """NVSHMEM on this rank, its processing elements numbered as `peers`. All ranks construct it together.

    index: this rank's GPU. life: who can reach it; it ends when nobody can.
    Raises PackageMissing, VersionMismatch, RankLost where a peer does not come.
    """

    def __init__(self, peers: Peers, index: int, local_experts: int, depth: int = QUEUE_DEPTH) -> None:
        core, device = _library()
        major, minor, patch = (int(part) for part in str(core.get_version().libnvshmem_version).split("."))
        check_versions((major, minor, patch), DEVICE_LIBRARY, "DeepEP")
        os.environ.update(environment(local_experts, depth))
        torch.cuda.set_device(index)
        self.rank, self.size, self.index = peers.rank, peers.size, index
        unique = core.get_unique_id(empty=peers.rank != 0)
        words = peers.all_gather("nvshmem", unique._data.tobytes() if peers.rank == 0 else b"")[0]
        if peers.rank:
            import numpy

            unique._data.view(numpy.uint8).reshape(-1)[:] = numpy.frombuffer(words, dtype=numpy.uint8)
        try:
            mine = device(index)
            mine.set_current()
            core.init(device=mine, uid=unique, rank=peers.rank, nranks=peers.size, initializer_method="uid")
        except Exception as error:
            raise RankLost(f"rank {peers.rank} of {peers.size} could not join NVSHMEM: {error}") from error
        self._core: Any = core
        self._kept: list[Tensor] = []
        self.life = Lifetime(peers.rank, "the NVSHMEM runtime", self._finalize)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Symmetric memory, zeroed; allocated by all ranks together, kept until the runtime ends."""
        made: Tensor = self._core.tensor(tuple(shape), dtype=dtype)
        made.zero_()
        torch.cuda.synchronize(self.index)
        self._kept.append(made)
        return made

    def at(self, mine: Tensor, rank: int) -> Tensor:
        """Rank `rank`'s part of symmetric memory, which lies behind NVLink; `mine` itself for this rank."""
        if rank == self.rank:
            return mine
        theirs: Tensor = self._core.get_peer_tensor(mine, rank)
        return theirs

    def wait_at_least(self, word: Tensor, value: int, stream: Any) -> None:
        """Hold `stream` until `word` (int64 [1], symmetric) is `value` or more: by a kernel of one thread."""
        import nvshmem.bindings as raw
        from nvshmem.core.direct import ComparisonType

        raw.signal_wait_until_on_stream(word.data_ptr(), int(ComparisonType.CMP_GE), value, stream.cuda_stream)

    def _finalize(self) -> None:
        torch.cuda.set_device(self.index)
        torch.cuda.synchronize(self.index)
        for each in self._kept:
            self._core.free_tensor(each)
        self._kept.clear()
        self._core.finalize()


class Mailbox:
    """One word from each rank for each rank, in symmetric memory: the counts of one phase's notifications.

    A word is the operation's number (upper half) and the count: an aligned store of eight bytes arrives whole, so a
    word says by itself whether it is the one that is waited for. Two rows alternate. A rank writes row k again only
    when its operation k + 1 has been notified, thus k's data has been exchanged and k's words were read by everybody.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mine = runtime.tensor((2, runtime.size), torch.int64)
        self._slots = [runtime.at(self._mine, rank)[:, runtime.rank] for rank in range(runtime.size)]
        self._number = 0

    def post(self, counts: Tensor, stream: Any) -> Tensor:
        """Enqueue on `stream`, which is current: counts (int [ranks], one to each) go out, and everybody's arrive.

        The words that came for this rank, int64 [ranks], valid once `stream` is through; see `counts`.
        """
        self._number += 1
        row, tag = self._number % 2, self._number * _TAG
        tagged = counts.to(torch.int64) + tag
        for rank, slot in enumerate(self._slots):
            slot[row : row + 1].copy_(tagged[rank : rank + 1])
        words = self._mine[row]
        for rank in range(self._runtime.size):
            if rank != self._runtime.rank:  # the own word lies before this in the stream
                self._runtime.wait_at_least(words[rank : rank + 1], tag, stream)
        return words

    def counts(self, words: Sequence[int]) -> list[int]:
        """What came from each rank, out of the words of the newest operation. Raises RankLost for another one's."""
        for rank, word in enumerate(words):
            if word // _TAG != self._number:
                raise RankLost(
                    f"rank {rank} is at exchange {word // _TAG}, rank {self._runtime.rank} at {self._number}: their"
                    " layers do not match"
                )
        return [word % _TAG for word in words]


def _library() -> tuple[Any, Any]:
    try:
        import nvshmem.core as core
        from cuda.core import Device
    except ImportError as error:
        raise PackageMissing(
            f"--exchange deepep needs nvshmem4py ({error}): {INSTALL['nvshmem.core']}"
        ) from None
    return core, Device
