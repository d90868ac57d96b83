"""Which ranks of a stuck job were killed only after it had stopped: by whoever gave up on it, or by its launcher.

A record is closed by whoever returns or raises; one that is not was left by being killed. The thread of the record
writes down the time four times a second, so that it is known about when that was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from kernel.record import Recording
    from verify.readers.installed import _Rank

TOGETHER_NS: Final = 2_000_000_000
"""Processes that were killed by one command, or one after the other by a launcher, died within this."""
BY_HAND: Final = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "or by os._exit")
"""What the endings have in them that others cause; a crash is the process's own."""


def came_after(ranks: Mapping[int, _Rank], everybody: AbstractSet[int]) -> list[int]:
    """The ranks that were killed later than another one gave up or was killed, or all at one time.

    A kill of all ranks at once says nothing, as long as somebody was waiting for somebody then.
    """
    killed = {
        rank: last_ns(each.ring.recording, each)
        for rank, each in ranks.items()
        if each.left is not None and each.runs is False and any(how in each.left.operation for how in BY_HAND)
    }
    if not killed:
        return []
    first = min(killed.values())
    gave_up = [
        each.ring.recording.wall(raised.time_ns)
        for each in ranks.values()
        if (raised := each.ring.raised.get(0)) is not None
    ]
    later = [rank for rank, when in killed.items() if when > first + TOGETHER_NS or any(when > t for t in gave_up)]
    if later or set(killed) != set(everybody) or len(killed) < 2:
        return sorted(later)
    return sorted(killed) if any(not item.done for each in ranks.values() for item in each.ring.items) else []


def last_ns(recording: Recording, rank: _Rank) -> int:
    """The last sign of life of a process, in nanoseconds since 1970."""
    newest = rank.ring.newest.time_ns if rank.ring.newest is not None else recording.monotonic_ns
    return recording.wall(max(newest, recording.beat_ns or 0))
