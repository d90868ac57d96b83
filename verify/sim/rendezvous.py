"""`kernel.ports.Rendezvous` of all simulated ranks, and how late ranks may be for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kernel.errors import Divergence, RankLost, UsageError
from verify.sim.waits import Wait

if TYPE_CHECKING:
    from verify.sim.kernels import Entry
    from verify.sim.launches import Launches
    from verify.sim.scheduler import Scheduler

LIMIT = 4000
"""Bytes of a payload."""

Skew = Callable[[int, int], int]
"""Nanoseconds by which rank r's n-th arrival is late."""


def uniform_skew(most_ns: int, seed: int) -> Skew:
    """Each arrival late by 0 .. most_ns, drawn for each rank from a stream of its own."""
    streams: dict[int, random.Random] = {}

    def late(rank: int, _: int) -> int:
        stream = streams.setdefault(rank, random.Random(f"{seed} {rank}"))
        return stream.randint(0, most_ns)

    return late


class _Exchange:
    """The n-th exchange of all ranks."""

    def __init__(self, hall: Hall, number: int) -> None:
        self.hall, self.number = hall, number
        self.tags: dict[int, str] = {}
        self.payloads: dict[int, bytes] = {}
        self.waiters: dict[int, Wait] = {}
        self.posted = 0
        self.done = False
        self.error: Exception | None = None
        self.answers: list[bytes] = []
        self.arrivals: list[int] = []

    def __str__(self) -> str:
        return f"rendezvous {self.number}"

    def act(self) -> None:
        """Everybody is here, and the latency is over: let them go."""
        self.complete()

    def post(self) -> None:
        """One more rank has arrived."""
        hall = self.hall
        hall.scheduler.progress += 1
        self.posted += 1
        if hall.scheduler.trace is not None:
            self.arrivals.append(hall.scheduler.trace.now)
        if self.posted < hall.size:
            return
        if hall.latency_ns:
            hall.scheduler.alarm(hall.scheduler.now_ns + hall.latency_ns, self)
        else:
            self.complete()

    def complete(self) -> None:
        """Release everybody: with all payloads, or with an error."""
        if self.done:
            return
        self.done = True
        del self.hall.open[self.number]
        if self.error is None:
            self._agree()
        for rank in sorted(self.waiters):
            waiter = self.waiters[rank]
            if not waiter.done():
                waiter.causes = tuple(self.arrivals)
                waiter.set_result(None)

    def _agree(self) -> None:
        ranks = range(self.hall.size)
        tags = [self.tags[rank] for rank in ranks]
        self.answers = [self.payloads[rank] for rank in ranks]
        if len(set(tags)) > 1:
            usual = max(tags, key=tags.count)
            odd = tuple(rank for rank in ranks if tags[rank] != usual)
            shown = ", ".join(f"rank {rank}: {tag}" for rank, tag in enumerate(tags))
            self.error = Divergence(odd, self.number, "rendezvous tag", shown)

    def lose(self, rank: int) -> None:
        """`rank` will never come."""
        tag = next(iter(self.tags.values()))
        self.error = RankLost(f"rank {rank} ended while others wait for it in rendezvous {tag!r}, number {self.number}")
        self.complete()


class _Latecomer:
    """A rank that is late for its exchange."""

    def __init__(self, meeting: _Exchange, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def __str__(self) -> str:
        return f"rank {self._rank} at {self._meeting}"

    def act(self) -> None:
        self._meeting.post()


class Hall:
    """Where all ranks of a world meet. latency_ns: from the last arrival to the release of all."""

    def __init__(self, size: int, scheduler: Scheduler, latency_ns: int = 0, skew: Skew | None = None) -> None:
        self.size, self.scheduler, self.latency_ns, self.skew = size, scheduler, latency_ns, skew
        self.open: dict[int, _Exchange] = {}
        self.gone: set[int] = set()

    def arrive(self, number: int, rank: int, tag: str, payload: bytes) -> tuple[_Exchange, Wait]:
        """`rank` joins exchange `number`, late by its skew."""
        meeting = self.open.get(number)
        if meeting is None:
            meeting = self.open[number] = _Exchange(self, number)
        meeting.tags[rank], meeting.payloads[rank] = tag, payload
        waiter = meeting.waiters[rank] = Wait()
        waiter.what = f"rendezvous {tag!r} (number {number})"
        late = self.skew(rank, number) if self.skew is not None else 0
        if self.gone:
            meeting.lose(min(self.gone))
        elif late:
            self.scheduler.alarm(self.scheduler.now_ns + late, _Latecomer(meeting, rank))
        else:
            meeting.post()
        return meeting, waiter

    def leave(self, rank: int) -> None:
        """`rank` has detached: exchanges that it has not joined can never complete. Idempotent."""
        self.gone.add(rank)
        for meeting in list(self.open.values()):
            if rank not in meeting.tags:
                meeting.lose(rank)

    def waits(self) -> Iterator[str]:
        """Exchanges for which somebody is missing, in words."""
        for meeting in self.open.values():
            here = sorted(meeting.tags)
            missing = [rank for rank in range(self.size) if rank not in meeting.tags]
            if missing:
                yield (
                    f"rendezvous {meeting.tags[here[0]]!r} (number {meeting.number}): rank"
                    f" {', '.join(map(str, here))} here, rank {', '.join(map(str, missing))} missing"
                )


class SimRendezvous:
    """One rank's end. n counts its exchanges from 0; the n-th of each rank belong together."""

    def __init__(self, hall: Hall, rank: int, log: list[Entry] | None = None) -> None:
        self._hall, self._rank, self._log = hall, rank, log
        self.host: Launches | None = None
        self._count = 0
        self._pending = ""

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """See the port. Raises UsageError for a payload over 4,000 bytes, or before an earlier exchange has ended."""
        hall, rank = self._hall, self._rank
        if len(payload) > LIMIT:
            raise UsageError(f"rank {rank} rendezvous {tag!r}: a payload of {len(payload)} bytes; at most {LIMIT} fit")
        if self._pending:
            raise UsageError(f"rank {rank} rendezvous {tag!r} while {self._pending!r} is pending: await one at a time")
        number, self._count, self._pending = self._count, self._count + 1, tag
        while self.host:
            clear = Wait()
            clear.what = "room in the launch queue"
            self.host.clear.append(partial(clear.set_result, None))
            await clear
        self._note("arrive", tag)
        meeting, waiter = hall.arrive(number, rank, tag, bytes(payload))
        try:
            await waiter
        finally:
            self._pending = ""
        self._note("leave", tag)
        if meeting.error is not None:
            raise meeting.error
        return list(meeting.answers)

    def close(self) -> None:
        """Detach: ranks that wait for this one get RankLost."""
        self._hall.leave(self._rank)

    def _note(self, what: str, tag: str) -> None:
        scheduler = self._hall.scheduler
        if self._log is not None:
            self._log.append((scheduler.now_ns, what, "host", tag))
        if scheduler.trace is not None:
            scheduler.trace.note(self._rank, what, "host", tag)
