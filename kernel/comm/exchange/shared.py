"""A wire through the shared memory of one host: each rank publishes its messages, and peers copy out what is theirs.

P's counts travel on a channel and a thread of their own: while they do, P's stream, D's and the loop go on.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernel.comm.channel import Channel
from kernel.comm.shared_map import HEADER
from kernel.device.worker import WorkerStream
from kernel.errors import RankLost
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.comm.exchange.wire import Matrix
    from kernel.comm.shared import Arena
    from kernel.ports import Event


class SharedWire:
    """`kernel.comm.exchange.wire.Wire` of one (arena, phase, rank).

    Calls come from one thread at a time, the phase's, `close` from any.
    """

    def __init__(self, arena: Arena, phase: Phase, rank: int) -> None:
        self.rank, self.size = rank, arena.world.size
        self._rows = Channel(arena, arena.exchange(phase, "rows"), rank)
        self._memory = memoryview(arena.memory)
        self._counts: Channel | None = None
        self._background: WorkerStream | None = None
        if phase is Phase.P:
            self._counts = Channel(arena, arena.exchange(phase, "counts"), rank)
            self._background = WorkerStream(phase, f"rank{rank} counts", _nothing)

    def announce(self, counts: Sequence[int], label: str) -> Event[Matrix]:
        """See `Wire`."""
        assert self._background is not None, "only P announces"
        return self._background.submit(partial(self._told, list(counts), _header(label)), label)

    def move(self, messages: Tensor, matrix: Matrix, label: str) -> Tensor:
        """See `Wire`. In as many steps as the rank that sends most needs."""
        width, region, me = messages.shape[1], self._rows.region, self.rank
        header = _header(f"{label}, {width} bytes x {matrix}")
        step = region.capacity
        out = torch.empty((sum(row[me] for row in matrix), width), dtype=torch.uint8)
        mine, theirs = messages.contiguous().view(-1), out.view(-1)
        for low in range(0, width * max(map(sum, matrix)), step):
            part = mine[low : low + step]
            parity = self._rows.parity
            if part.numel():
                self._slot(me, parity, part.numel()).copy_(part)
            self._rows.take(header)
            at = 0
            for source, row in enumerate(matrix):
                # Where this rank's bytes lie among those that `source` sends, and among those that arrive here.
                start, length = width * sum(row[:me]), width * row[me]
                first, last = max(low, start), min(low + step, start + length)
                if first < last:
                    slot = self._slot(source, parity, last - low)
                    theirs[at + first - start : at + last - start] = slot[first - low : last - low]
                at += length
        return out

    def gather(self, messages: Tensor, label: str) -> Tensor:
        """See `Wire`."""
        flat, step = messages.contiguous().view(-1), self._rows.region.capacity
        header = _header(f"{label}, {list(messages.shape)}")
        out = torch.empty((self.size, flat.numel()), dtype=torch.uint8)
        for low in range(0, flat.numel(), step):
            part, parity = flat[low : low + step], self._rows.parity
            self._slot(self.rank, parity, part.numel()).copy_(part)
            self._rows.take(header)
            for source in range(self.size):
                out[source, low : low + step] = self._slot(source, parity, part.numel())
        return out.view(self.size, *messages.shape)

    def close(self) -> None:
        """See `Wire`."""
        self._rows.close()
        if self._counts is not None and self._background is not None:
            self._counts.close()
            self._background.stop(RankLost(f"rank {self.rank} closed its exchange before these counts were there"))

    def _slot(self, member: int, parity: int, length: int) -> Tensor:
        at = self._rows.region.data(member, parity)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=length, offset=at)

    def _told(self, counts: list[int], header: bytes) -> list[list[int]]:
        """On the background thread: publish own counts, wait for everybody's."""
        channel = self._counts
        assert channel is not None
        words, region, size = channel.arena.u64, channel.region, self.size

        def at(member: int) -> slice:
            start = region.data(member, parity) // 8
            return slice(start, start + size)

        parity = channel.parity
        mine = at(self.rank)
        for place, count in zip(range(mine.start, mine.stop), counts, strict=True):
            words[place] = count
        channel.take(header)
        return [words[at(member)].tolist() for member in range(size)]


def _header(text: str) -> bytes:
    """What all members must agree on, quoted when they do not."""
    header = text.encode()
    if len(header) > HEADER:
        header = header[: HEADER - 10] + b"..%08x" % zlib.crc32(header)
    return header.ljust(HEADER, b"\0")


def _nothing() -> Any:
    """The thread needs no preparation."""
