"""The launcher's ear: a rank that has said nothing for too long is taken for lost, whatever keeps it from speaking.

Ranks beat by themselves (`heart`). Nothing is concluded from a time in which the launcher itself did not run.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANK_TIMEOUT_S: Final = 10.0
"""The default."""
STOPPED: Final = frozenset("Tt")
"""States of a process in `/proc` that stands still."""
BEATS: Final = 5
"""Beats within a timeout; at least one a second."""
AWAY_S: Final = 900.0
"""For a rank that said that its loop would be held: weights of tens of gigabytes, and kernels compiled at first use."""


def every_s(timeout_s: float) -> float:
    """Between two beats of a rank. timeout_s: 0 for never."""
    return min(1.0, timeout_s / BEATS) if timeout_s else 1.0


class Pulse:
    """When each rank was heard last. timeout_s: 0 for never. clock: monotonic seconds."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self.every_s, self._clock = timeout_s, every_s(timeout_s), clock
        self.moved: dict[int, int] = {}
        """How far each rank has come."""
        self.at: dict[int, str] = {}
        """Where each stood when it was heard last, as a clause."""
        self._due: dict[int, float] = {}
        self._looked = clock()

    def expect(self, rank: int, patience_s: float | None = None) -> None:
        """A rank is to be heard from now on; for the first time within `patience_s` (None: the timeout)."""
        self._due[rank] = self._clock() + (patience_s or self.timeout_s)
        self.at.setdefault(rank, " while it started")

    def forget(self, rank: int) -> None:
        """A rank has ended, or is known to be lost."""
        self._due.pop(rank, None)

    def hear(self, rank: int, message: dict[str, Any]) -> bool:
        """Take a message of a rank; whether it was a beat, and nobody else's business."""
        if rank in self._due:
            self._due[rank] = self._clock() + (AWAY_S if "away" in message else self.timeout_s)
        if "ready" in message:
            self.at[rank] = ""  # until its next beat
        if "beat" not in message:
            return False
        self.moved[rank], self.at[rank] = message["beat"], message["at"]
        return True

    def late(self) -> list[int]:
        """Ranks that are silent for too long now; each is told once."""
        now = self._clock()
        missed, self._looked = now - self._looked - self.every_s, now
        if missed > self.every_s:  # stopped, or kept busy: what they sent meanwhile is still to be read
            for rank in self._due:
                self._due[rank] = max(self._due[rank], now + self.timeout_s)
        late = [rank for rank, due in sorted(self._due.items()) if now >= due] if self.timeout_s else []
        if late:  # ranks of one host fall silent together, but a beat apart
            late = [rank for rank, due in sorted(self._due.items()) if now >= due - 1.5 * self.every_s]
        for rank in late:
            self.forget(rank)
        return late

    async def watch(self, lost: Callable[[list[int]], None]) -> None:
        """Call `lost` with ranks that have become late; never returns."""
        self._looked = self._clock()
        while True:
            await asyncio.sleep(self.every_s)
            if late := self.late():
                lost(late)

    def why(self, ranks: Sequence[int], where: str = "", pids: Sequence[int] = ()) -> str:
        """What is said of ranks that are lost. where: their host; pids: on this host, those of their processes."""
        one = len(ranks) == 1
        names = ", ".join(map(str, ranks))
        states = {_state(pid) for pid in pids}
        how = ""
        if states and states <= STOPPED:
            how = ", stopped by SIGSTOP or a debugger,"
        elif states == {"R"}:
            how = ", whose loop is held by code that computes,"
        return (
            f"{'rank' if one else 'ranks'} {names}{where}{how} {'has' if one else 'have'} not answered for"
            f" {self.timeout_s:g} s"
        )


def stopped(pid: int) -> bool:
    """Whether a process of this host stands still by SIGSTOP or under a debugger."""
    return _state(pid) in STOPPED


def _state(pid: int) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    return ""
