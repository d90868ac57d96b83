"""One member's end of a shared-memory communicator: numbered steps that all members pass together. No tensors here.

A step publishes what a member wrote, and ends once all members have published theirs. What is published at step s lies
in the header and data slot of parity s % 2. Two parities are enough: a member overwrites step s at step s+2, having
passed step s+1, where all members have arrived only after they had finished reading step s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kernel.comm.futex import LOOKS, Fence, Futex, give_way
from kernel.comm.shared_map import HEADER, Region
from kernel.errors import Divergence, RankLost

if TYPE_CHECKING:
    from kernel.comm.shared import Arena

RECHECK_S: Final = 0.05
"""How often a sleeper looks again by itself. Wake-ups are not lost; this bounds the damage should one be."""


class Channel:
    """Member `rank` of `region`. One thread at a time takes steps; `close` may come from any.

    step: the last one taken. A new channel over a region goes on where the members' last ones ended.
    """

    def __init__(self, arena: Arena, region: Region, rank: int) -> None:
        self.arena, self.region, self.rank = arena, region, rank
        self.index, self.size = region.members.index(rank), len(region.members)
        at = region.arrivals // 8
        self._arrivals = arena.u64[at : at + self.size]
        self._bell = arena.u32[region.bell // 4 : region.bell // 4 + 1]
        self._headers = [
            arena.bytes[region.headers(p) : region.headers(p) + HEADER * self.size] for p in range(2)
        ]
        self._futex = Futex(arena.address + region.bell)
        self._fence = Fence()
        self._closed = False
        self.step = self._arrivals[self.index]

    @property
    def parity(self) -> int:
        """Where to write for the next step."""
        return (self.step + 1) & 1

    def take(self, header: bytes | None = None) -> int:
        """Publish the next step and wait until all members have; its parity, where their data can now be read.

        header: HEADER bytes that must be equal on all members; None where the step before has compared them.
        Raises Divergence when they differ, RankLost when the run is aborted or this end is closed meanwhile.
        """
        step = self.step + 1
        parity = step & 1
        if self._closed or self.arena.aborted is not None:
            self._give_up(step)
        if header is not None:
            start = self.index * HEADER
            self._headers[parity][start : start + HEADER] = header
        self._fence()  # data before the counter
        self._arrivals[self.index] = step
        self._fence()  # our counter before theirs: of the members, at least the last one here sees all
        if self._arrived(step):
            self._ring(step)
        else:
            self._sleep(step)
        self._fence()  # the counters before the data
        self.step = step
        if header is not None and self._headers[parity] != header * self.size:
            self._mismatch(parity)
        return parity

    def close(self) -> None:
        """Make a step in progress, and every later one, raise RankLost. Idempotent."""
        if not self._closed:
            self._closed = True
            self.arena.disturb(self.region)

    def _arrived(self, step: int) -> bool:
        return min(self._arrivals.tolist()) >= step

    def _ring(self, step: int) -> None:
        # Every ring stores a value that no ring stored before. So a sleeper that saw an older one cannot sleep through
        # it, and two members that ring at once need no atomic addition.
        self._bell[0] = (step * self.size + self.index) << 1 & 0xFFFFFFFF
        self._futex.wake()

    def _sleep(self, step: int) -> None:
        for _ in range(LOOKS):
            give_way()
            if self._arrived(step):
                return
        while True:
            seen = self._bell[0]
            self._fence()  # the bell before the counters: whoever completes them after our look rings a new value
            if self._arrived(step):
                return
            if self._closed or self.arena.aborted is not None:
                self._give_up(step)
            self._futex.wait(seen, RECHECK_S)

    def _give_up(self, step: int) -> None:
        doing = f"rank {self.rank} in step {step} of {self.region}"
        self.arena.check(doing)
        raise RankLost(f"{doing} was given up: its communicators were closed")

    def _mismatch(self, parity: int) -> None:
        block = bytes(self._headers[parity])
        said = [block[i * HEADER : (i + 1) * HEADER].rstrip(b"\0").decode(errors="replace") for i in range(self.size)]
        usual = max(said, key=said.count)
        odd = tuple(m for m, text in zip(self.region.members, said, strict=True) if text != usual)
        detail = "; ".join(f"rank {m}: {text}" for m, text in zip(self.region.members, said, strict=True))
        raise Divergence(odd, self.step, f"collective of {self.region}", detail)
