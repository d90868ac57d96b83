"""Which ranks of a stuck job were killed only after it had stopped: by whoever gave up on it, or by its launcher.

A record is closed by whoever returns or raises; one that is not was left by being killed. The thread of the record
writes down the time four times a second, so that it is known about when that was.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from kernel.record import Recording

TOGETHER_NS: Final = 2_000_000_000
"""Processes that were killed by one command, or one after the other by a launcher, died within this."""
BY_HAND: Final = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "or by os._exit")
"""What the endings have in them that others cause; a crash is the process's own."""
STOPPED: Final = "a stop signal or a debugger"
LATER: Final = ", after the job had stopped: what it stood in counts"
"""How a remark on such a rank goes on."""


class Death(NamedTuple):
    """How a rank ended. killed_ns: its last sign of life, if others may have killed it. gave_up_ns: when it raised an
    exception. Both since 1970, None where it did not. waits: whether a call of it was not over. beats: whether the
    last sign of life is that of a thread that does nothing else, so that the process died right after it.
    """

    killed_ns: int | None = None
    gave_up_ns: int | None = None
    waits: bool = False
    beats: bool = True


def death(recording: Recording, killed: bool, raised_ns: int | None, newest_ns: int | None, waits: bool) -> Death:
    """Of the process that wrote a ring. raised_ns, newest_ns: of its exception and its newest event, monotonic."""
    newest = recording.monotonic_ns if newest_ns is None else newest_ns
    last = recording.wall(max(newest, recording.beat_ns or 0))
    gave_up = None if raised_ns is None else recording.wall(raised_ns)
    return Death(last if killed else None, gave_up, waits, recording.beat_ns is not None)


def came_after(ranks: Mapping[int, Death], everybody: AbstractSet[int]) -> list[int]:
    """The ranks that were killed later than another one gave up or was killed, or all at one time.

    A kill of all ranks at once says nothing, as long as somebody was waiting for somebody then. Nor does one of all
    ranks of which nothing tells when they died.
    """
    killed = {rank: each.killed_ns for rank, each in ranks.items() if each.killed_ns is not None}
    dated = {rank: when for rank, when in killed.items() if ranks[rank].beats}
    gave_up = [each.gave_up_ns for each in ranks.values() if each.gave_up_ns is not None]
    first = min(dated.values(), default=0)
    later = [
        rank
        for rank, when in killed.items()
        if any(when > t for t in gave_up) or (rank in dated and when > first + TOGETHER_NS)
    ]
    if later or set(killed) != set(everybody) or len(killed) < 2:
        return sorted(later)
    return sorted(killed) if any(each.waits for each in ranks.values()) else []


def alive(recording: Recording) -> bool | None:
    """Whether the process that wrote a ring still runs; None where that cannot be seen from here."""
    try:
        here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    if not recording.boot or recording.boot != here:
        return None
    try:
        # A number may belong to another process by now; only its writer maps the ring.
        with open(f"/proc/{recording.pid}/maps", errors="replace") as maps:
            if any(line.rstrip().endswith(f"/{recording.path.name}") for line in maps):
                return True
    except PermissionError:
        return True
    except (FileNotFoundError, ProcessLookupError):
        pass
    except OSError:
        return None
    # A container that shares this directory has a name and process numbers of its own.
    return False if recording.host == platform.node() else None


def state_of(pid: int) -> str:
    """The letter of a process's state (`T`: stopped by a signal, `t`: by a debugger); "" where it cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0] if ")" in text else ""


def held(recording: Recording, running: Callable[[Recording], bool | None]) -> bool:
    """Whether a signal or a debugger holds the process that writes a ring: nothing of it goes on, whatever it is in."""
    return recording.closed_ns is None and bool(running(recording)) and state_of(recording.pid) in ("T", "t")
