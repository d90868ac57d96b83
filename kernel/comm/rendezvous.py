"""The all-rank control phase on one host: bytes through shared memory, wake-ups through eventfds.

An exchange costs a rank one write of its slot and one scan of everybody's counters. Whoever finds all counters there
rings everybody else's eventfd, which wakes their event loops; the others sleep meanwhile. Slots are double-buffered: a
fast rank writes exchange k+1 while a slow one still reads exchange k, and it cannot reach k+2 before everybody has
arrived at k+1, that is, has read k. For several hosts see `kernel.comm.tcp_rendezvous`.
"""

from __future__ import annotations

import asyncio
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kernel.comm.futex import LOOKS, Fence, give_way
from kernel.errors import Divergence, RankLost, UsageError

if TYPE_CHECKING:
    from kernel.comm.shared import Arena

PAYLOAD: Final = 4000
"""Bytes of one rank's payload, at most."""
TAG: Final = 128
"""Bytes of a tag, at most."""
_HEAD: Final = struct.Struct("=QII")
_DATA_AT: Final = 160


class SharedRendezvous:
    """`kernel.ports.Rendezvous` of one rank of an arena. Belongs to one event loop, uvloop or asyncio's own.

    deadline_s: an exchange that takes longer raises RankLost naming who did not arrive (None: wait for ever).
    recheck_s: how often a waiter looks by itself, should a wake-up be lost.
    """

    def __init__(
        self, arena: Arena, rank: int, *, deadline_s: float | None = None, recheck_s: float = 0.005
    ) -> None:
        self._arena, self.rank, self.size = arena, rank, arena.map.size
        self._deadline_s, self._recheck_s = deadline_s, recheck_s
        where = arena.map
        at = where.exchange_arrivals // 8
        self._arrivals = arena.u64[at : at + self.size]
        self._slots = [[where.exchange_slot(r, parity) for r in range(self.size)] for parity in range(2)]
        self._others = tuple(r for r in range(self.size) if r != rank)
        self._fence = Fence()
        self._round = self._arrivals[rank]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._give_up_at: float | None = None
        self._doing = ""

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """Wait until every rank has arrived with the same tag; all payloads in rank order.

        Raises UsageError when tag or payload are too long, Divergence when tags differ, RankLost when the run was
        aborted or the deadline has passed.
        """
        name = check_sizes(tag, payload)
        if self.size == 1:
            self._round = self._arrivals[0] = self._round + 1
            if self._arena.aborted is not None:
                self._arena.check(f"rank {self.rank} in exchange {self._round} ({tag})")
            return [payload]
        if self._waiter is not None:
            raise RuntimeError(f"rank {self.rank} exchanges {tag!r} while {self._doing}: await one exchange at a time")
        arena, number = self._arena, self._round + 1
        self._doing = f"rank {self.rank} in exchange {number} ({tag})"
        arena.check(self._doing)
        self._round = number
        slots = self._slots[number & 1]
        at, memory = slots[self.rank], arena.bytes
        _HEAD.pack_into(arena.memory, at, number, len(payload), len(name))
        memory[at + _HEAD.size : at + _HEAD.size + len(name)] = name
        memory[at + _DATA_AT : at + _DATA_AT + len(payload)] = payload
        self._fence()  # the slot before the counter
        self._arrivals[self.rank] = number
        self._fence()  # our counter before theirs
        if self._arrived():
            arena.ring(self._others)
        elif not self._soon():
            await self._wait()
        self._fence()  # the counters before the slots
        tags, payloads = [], []
        for at in slots:
            written, length, name_length = _HEAD.unpack_from(arena.memory, at)
            assert written == number, f"slot of exchange {number} holds {written}"
            tags.append(bytes(memory[at + _HEAD.size : at + _HEAD.size + name_length]))
            payloads.append(bytes(memory[at + _DATA_AT : at + _DATA_AT + length]))
        compare_tags(number, tags)
        return payloads

    def close(self) -> None:
        """Detach from the event loop; an exchange in progress raises RankLost. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._arena.bell(self.rank))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(RankLost(f"{self._doing} was given up: its rendezvous was closed"))

    def _arrived(self) -> bool:
        return min(self._arrivals.tolist()) >= self._round

    def _soon(self) -> bool:
        """Look for some ten microseconds whether everybody arrives, which costs the loop less than going to sleep."""
        for _ in range(LOOKS):
            give_way()
            if self._arrived():
                return True
        return False

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self._arena.bell(self.rank), self._rung)
        self._give_up_at = None if self._deadline_s is None else loop.time() + self._deadline_s
        self._waiter = loop.create_future()
        self._timer = loop.call_later(self._recheck_s, self._recheck, loop)
        try:
            await self._waiter
        finally:
            self._timer.cancel()
            self._waiter = None

    def _rung(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._arena.bell(self.rank))
        self._look()

    def _recheck(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._look():
            self._timer = loop.call_later(self._recheck_s, self._recheck, loop)

    def _look(self) -> bool:
        """Whether the waiter, if any, is through."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return True
        self._fence()
        if self._arrived():
            waiter.set_result(None)
        elif (reason := self._arena.aborted) is not None:
            waiter.set_exception(RankLost(f"{self._doing} was given up: {reason}"))
        elif self._give_up_at is not None and asyncio.get_running_loop().time() >= self._give_up_at:
            late = [r for r, arrived in enumerate(self._arrivals.tolist()) if arrived < self._round]
            waiter.set_exception(missed(self._doing, late, self._deadline_s or 0.0))
        else:
            return False
        return True


def check_sizes(tag: str, payload: bytes) -> bytes:
    """The encoded tag. Raises UsageError when it or the payload is too long."""
    name = tag.encode()
    if len(name) > TAG or len(payload) > PAYLOAD:
        raise UsageError(
            f"exchange {tag[:40]!r} of {len(payload)} bytes: a tag has at most {TAG} bytes, a payload {PAYLOAD}"
        )
    return name


def compare_tags(number: int, tags: list[bytes]) -> None:
    """Raise Divergence, naming ranks and tags, unless all tags of exchange `number` are equal."""
    if any(tag != tags[0] for tag in tags):
        usual = max(tags, key=tags.count)
        odd = tuple(rank for rank, tag in enumerate(tags) if tag != usual)
        detail = ", ".join(f"rank {rank} {tag.decode(errors='replace')!r}" for rank, tag in enumerate(tags))
        raise Divergence(odd, number, "rendezvous tag", detail)


def missed(doing: str, late: list[int], deadline_s: float) -> RankLost:
    """The error for ranks that did not arrive in time."""
    names = ", ".join(map(str, late))
    return RankLost(
        f"{doing}: rank {names} did not arrive within {deadline_s:g} s; see what it does with `turnstile hang`"
    )
