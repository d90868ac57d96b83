"""A small world whose ranks write real records, one step at a time, in the order that a test draws.

A rank has a host and one device stream, both generators: a step runs to the next `yield`, which gives a condition to
wait for. As in the kernel, a call or an arrival is recorded before it is made, and its end after it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.record import Kind, Recorder, ring_path
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

CALLS = 2
"""Collectives of one D iteration."""


def always() -> bool:
    return True


class LiveWorld:
    """`size` ranks of `rounds` rounds. fences: ranks that wait for their own D before the rendezvous that the others
    launch D after, from round `since` on: with some of them, and not all, the world hangs there.
    """

    def __init__(
        self, out: Path, size: int, rounds: int, fences: Sequence[int] = (), since: int = 1, capacity: int = 4096
    ) -> None:
        self.size, self.rounds = size, rounds
        self.fences, self.since = frozenset(fences), since
        self.recs = [
            Recorder(
                ring_path(out, rank), rank=rank, groups={"D.TP": range(size)}, meta={"size": size},
                capacity=capacity, strings=1 << 14,
            )
            for rank in range(size)
        ]  # fmt: skip
        self.arrived = [0] * size
        self.queued: list[list[int]] = [[] for _ in range(size)]
        """D iterations that each stream has to do."""
        self.started: list[set[int]] = [set() for _ in range(size)]
        self.done: list[set[int]] = [set() for _ in range(size)]
        self.stopped: set[int] = set()
        self.ended = [False] * size
        actors = [self._host(rank) for rank in range(size)] + [self._stream(rank) for rank in range(size)]
        self._actors = dict(enumerate(actors))
        self._until: dict[int, Callable[[], bool]] = dict.fromkeys(self._actors, always)

    def ready(self) -> list[int]:
        """Actors that can make a step."""
        return [at for at, until in self._until.items() if at % self.size not in self.stopped and until()]

    def step(self, choice: int) -> bool:
        """One step of one that can; False where none can."""
        ready = self.ready()
        if not ready:
            return False
        at = ready[choice % len(ready)]
        try:
            self._until[at] = next(self._actors[at])
        except StopIteration:
            del self._actors[at], self._until[at]
        return True

    def close(self) -> None:
        """Give the rings' maps back."""
        for rec in self.recs:
            rec.close()

    # -- one rank -------------------------------------------------------------------------------------------------

    def _host(self, rank: int) -> Iterator[Callable[[], bool]]:
        rec = self.recs[rank]
        for number in range(self.rounds):
            odd = rank in self.fences and number >= self.since
            if odd:
                yield from self._launch(rank, number)
                yield from self._wait(rank, number)
            yield from self._exchange(rank, 2 * number + 1, "pre-d")
            if not odd:
                yield from self._launch(rank, number)
            if number:
                yield from self._wait(rank, number - 1)
            yield from self._exchange(rank, 2 * number + 2, "post-d")
        yield lambda: not self.queued[rank]
        rec.close()
        self.ended[rank] = True

    def _launch(self, rank: int, number: int) -> Iterator[Callable[[], bool]]:
        rec, label = self.recs[rank], f"D {number}"
        rec.event(Kind.SUBMIT, Phase.D, "D", round_=number, a=4, b=2, site=rec.site(label))
        for call in range(CALLS):
            seq = number * CALLS + call + 1
            rec.event(Kind.ENQUEUE, Phase.D, "D", rec.group("D.TP"), seq, a=4, b=rec.site("AR"), site=rec.site("x 1"))
            yield always
        self.queued[rank].append(number)
        yield always

    def _wait(self, rank: int, number: int) -> Iterator[Callable[[], bool]]:
        rec = self.recs[rank]
        rec.event(Kind.HOST_WAIT_ENTER, b=rec.site(f"D {number}"))
        yield lambda: number in self.done[rank]
        yield always  # it is through, and has not said so
        rec.event(Kind.HOST_WAIT_LEAVE, b=rec.site(f"D {number}"))

    def _exchange(self, rank: int, number: int, tag: str) -> Iterator[Callable[[], bool]]:
        rec = self.recs[rank]
        rec.event(Kind.EXCHANGE_ENTER, seq=number, b=rec.site(tag))
        yield always
        self.arrived[rank] = number
        yield lambda: min(self.arrived) >= number
        yield always
        rec.event(Kind.EXCHANGE_LEAVE, seq=number, b=rec.site(tag))

    def _stream(self, rank: int) -> Iterator[Callable[[], bool]]:
        rec = self.recs[rank]
        while not self.ended[rank]:
            yield lambda: bool(self.queued[rank]) or self.ended[rank]
            if not self.queued[rank]:
                return
            number = self.queued[rank][0]
            label = rec.site(f"D {number}")
            rec.event(Kind.WORK_START, Phase.D, "D", a=4, b=2, site=label)
            for call in range(CALLS):
                seq = number * CALLS + call + 1
                rec.event(Kind.START, Phase.D, "D", rec.group("D.TP"), seq, a=4, b=rec.site("AR"))
                yield always
                self.started[rank].add(seq)
                yield lambda seq=seq: all(seq in one for one in self.started)  # type: ignore[misc]
                rec.event(Kind.FINISH, Phase.D, "D", rec.group("D.TP"), seq, a=4, b=rec.site("AR"))
                yield always
            self.queued[rank].pop(0)
            self.done[rank].add(number)
            yield always
            rec.event(Kind.WORK_FINISH, Phase.D, "D", a=4, b=2, site=label)
