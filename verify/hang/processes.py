"""What the processes of a job do now, where they run on this host: found by their pids, or by their own records."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from kernel.record import read
from verify import runs
from verify.attach import ring_paths
from verify.live.outside import beyond
from verify.live.threads import Moves, moves
from verify.readers.installed import is_installed
from verify.readers.killed import alive

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kernel.record import Recording
    from verify.live.outside import Outside
    from verify.live.threads import See
    from verify.readers.found import Found

WATCH: Final = "turnstile record"
"""Name of the thread of a record (`kernel.comm.tap.watch`)."""
LATER: Final = 1 << 62
"""No event has such a number: of a ring, only what it says of itself is read."""


def look_at(paths: Sequence[str], pids: Collection[int], found: Found) -> See:
    """Looks at the processes that were given, and at those whose rings lie in the folders that were.

    A rank of `turnstile rollout` makes its calls from the threads that its record shows, and from no other one.
    """

    @cache
    def recordings() -> dict[int, Recording]:
        known: dict[int, Recording] = {}
        for path in paths:
            for ring in runs.rings(Path(path)) if Path(path).is_dir() else [Path(path)] * path.endswith(".ring"):
                with suppress(UsageError):
                    recording = read(ring, since=LATER)
                    known[recording.rank] = recording
        return known

    def look(ranks: Collection[int]) -> Mapping[int, Moves]:
        seen: dict[int, Moves] = {}
        given = {stack.rank: stack.pid for stack in found.stacks if stack.rank is not None and stack.pid in set(pids)}
        for rank in ranks:
            pid, recording = given.get(rank), recordings().get(rank)
            if pid is not None and recording is None:
                recording = _own(pid)
            if recording is not None and not is_installed(recording):
                seen[rank] = Moves(locked=False)
                continue
            if pid is None and recording is not None and recording.closed_ns is None and alive(recording):
                pid = recording.pid
            if pid is not None and (now := moves(pid, _of_python(found, pid))) is not None:
                now = now if now.locked else now._replace(outside=_beyond(pid))
                # What has moved since its record was read stands elsewhere than that shows.
                if recording is None or found.moved_ns is None or _newest_ns(recording) <= found.moved_ns:
                    seen[rank] = now
        return seen

    return look


def _of_python(found: Found, pid: int) -> frozenset[int]:
    """Threads of a process that run code of Python, by its stacks; not the one of the record, which only ticks."""
    mine = (each for each in found.stacks if each.pid == pid and each.frames and each.thread != WATCH)
    return frozenset(each.tid for each in mine if each.tid is not None)


@cache
def _beyond(pid: int) -> Outside | None:
    """What is asked once: every process of the host may have to be looked at for it."""
    return beyond(pid)


def _newest_ns(recording: Recording) -> int:
    """When a ring's newest event was written, as nanoseconds since 1970; 0 where there is none."""
    with suppress(UsageError):
        count = read(recording.path, since=LATER).dropped
        return max((recording.wall(event.time_ns) for event in read(recording.path, since=count - 2).events), default=0)
    return 0


def _own(pid: int) -> Recording | None:
    """What the ring that a process has mapped says of itself."""
    for ring in ring_paths(pid):
        with suppress(UsageError):
            return read(ring, since=LATER)
    return None
