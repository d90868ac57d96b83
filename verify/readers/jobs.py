"""Which rings are of one job: a directory may hold those of an earlier one, and people name the wrong directory.

Two rings are of different jobs where the jobs have different numbers of ranks, or where one ended long before the other
began. Ranks of one job start together, give or take what it takes to load a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kernel.errors import UsageError
from kernel.record.foreign import groups_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from kernel.record import Recording

APART_S: Final = 1800.0
"""For so long torch lets a rank wait for others that have not started yet."""


def of_one_job(
    recordings: Mapping[int, Recording], running: Callable[[Recording], bool | None]
) -> tuple[dict[int, Recording], list[str]]:
    """Of the rings of one directory, those of the job that runs, else of the newest one, and a line for each other.

    running: whether the process of a ring runs, None where that cannot be seen. Raises UsageError, one line, where
    two jobs write to the directory at once.
    """
    foreign = of_other_jobs(recordings, running)
    for other in foreign.values():
        if other.runs:
            both = f"{other.path} and {other.newest}"
            raise UsageError(f"{both} are of two jobs that run: {other.why}: name the record of one")
    kept = {rank: each for rank, each in recordings.items() if rank not in foreign}
    return kept, [f"{other.line}: not used" for other in foreign.values()]


class Other(NamedTuple):
    """A ring that is of another job than the others of its directory. why: how that shows. runs: whether its process
    does. path, newest: its file, and that of the job which counts.
    """

    rank: int
    why: str
    runs: bool
    path: Path
    newest: Path

    @property
    def line(self) -> str:
        """What people are told of it."""
        is_of = "another job that runs as well" if self.runs else "another job"
        return f"rank {self.rank}: its ring is {'' if self.runs else 'stale, '}of {is_of}: {self.why}"


def of_other_jobs(
    recordings: Mapping[int, Recording], running: Callable[[Recording], bool | None]
) -> dict[int, Other]:
    """Of the rings of one directory, by rank, those that are not of the job that runs, else not of the newest one.

    running: as `of_one_job`.
    """
    live = {rank for rank, each in recordings.items() if each.closed_ns is None and running(each) is True}
    found: dict[int, Other] = {}
    if recordings:
        newest = recordings[max(live or recordings, key=lambda rank: recordings[rank].wall_ns)]
        for rank, each in sorted(recordings.items()):
            if why := difference(each, newest):
                found[rank] = Other(rank, why, rank in live, each.path, newest.path)
    return found


def refuse_two(records: Iterable[tuple[Path, Recording]]) -> None:
    """Raise UsageError, one line, where records that were named together are of two jobs."""
    first: tuple[Path, Recording] | None = None
    for path, recording in records:
        first = first or (path, recording)
        if path != first[0] and (why := difference(recording, first[1])):
            raise UsageError(f"{first[0]} and {path} are of two jobs: {why}: name the record of one")


def difference(one: Recording, other: Recording) -> str:
    """Why two rings cannot be of one job; "" where they may be."""
    sizes = _size(one), _size(other)
    if None not in sizes and sizes[0] != sizes[1]:
        return f"rank {one.rank} is one of {sizes[0]}, rank {other.rank} one of {sizes[1]}"
    early, late = sorted((one, other), key=lambda each: each.wall_ns)
    # Only what was closed has ended for sure: what has been silent for an hour may be stuck.
    if early.closed_ns is None:
        return ""
    apart = (late.wall_ns - early.wall(early.closed_ns)) / 1e9
    return f"rank {early.rank} ended {apart:.0f} s before rank {late.rank} began" if apart > APART_S else ""


def _size(recording: Recording) -> int | None:
    """How many ranks its job has, as far as it knows."""
    size = recording.meta.get("size")
    if isinstance(size, int) and 0 < size <= 1 << 20:
        return size
    groups = groups_of(recording.strings).values()
    return next((len(group.ranks) for group in groups if group.name == "default_pg" and group.ranks), None)
