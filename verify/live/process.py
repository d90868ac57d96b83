"""What the processes of a run do, as /proc has it: nobody is asked, and nothing in them is touched."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kernel.record import Recording

GONE: Final = frozenset({"", "Z", "X"})
"""States of a process that has ended, whether or not its parent has looked at it since."""


def boot_id() -> str:
    """Of the running system, "" where it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def process_state(pid: int, recorded_ns: int) -> str | None:
    """One letter for what process `pid` does, R, S, D, T, ...; "" where it is gone, None where it cannot be told.

    A process that was started after `recorded_ns` (monotonic) has only got the number of one that is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        letter, ticks = fields[0], int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except (OSError, ValueError, IndexError):
        return None
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    began_s = ticks / os.sysconf("SC_CLK_TCK") - asleep
    return letter if began_s < recorded_ns / 1e9 + 1 else ""


def writer_state(recording: Recording, boot: str) -> str | None:
    """That of the process that writes a ring; None where it runs on another host, or cannot be seen from here.

    boot: `boot_id` of this system.
    """
    if not boot or recording.boot != boot:
        return None
    state = process_state(recording.pid, recording.monotonic_ns)
    # A container that shares this directory has a name and process numbers of its own.
    return None if state == "" and recording.host != platform.node() else state
