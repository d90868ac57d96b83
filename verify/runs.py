"""Run directories as arguments: which one is meant, and on which clock its ranks' records are told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.record import Recording

WRITERS: Final = "`turnstile rollout` or `turnstile.record.install`"
"""Of run directories."""


def has_rings(folder: Path) -> bool:
    """Whether a directory, or its `record` folder, holds a ring."""
    return bool(rings(folder))


def rings(folder: Path) -> list[Path]:
    """The ring files of a run's directory."""
    place = folder / "record" if (folder / "record").is_dir() else folder
    try:
        return [each for each in place.iterdir() if re.fullmatch(r"rank\d{1,9}\.ring", each.name)]
    except OSError:
        return []


def find(path: str, *, newest: bool = False) -> Path:
    """The run that `path` means: itself, or the only one in it.

    newest: of several, take the one that was started last, instead of refusing. Raises UsageError, one line.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"run {path!r}: no such directory: give one that {WRITERS} writes to")
    if has_rings(folder):
        return folder
    try:
        inside = sorted(each for each in folder.iterdir() if each.is_dir() and has_rings(each))
    except OSError as error:
        raise UsageError(f"run {path!r}: {error.strerror}: give a directory that can be read") from None
    if not inside:
        raise UsageError(
            f"run {path!r}: no rank<k>.ring in it: its ranks have not begun yet, or it is none that {WRITERS} writes to"
        )
    if len(inside) > 1 and not newest:
        raise UsageError(f"run {path!r}: {several(inside)}")
    return max(inside, key=lambda each: max(ring.stat().st_ctime for ring in rings(each)))


def several(inside: Sequence[Path]) -> str:
    """What to do about a directory of several runs."""
    names = ", ".join(each.name for each in inside[:6]) + (", ..." if len(inside) > 6 else "")
    return f"it holds {len(inside)} runs: name one of them: {names}"


def one_clock(recordings: Iterable[Recording]) -> bool:
    """Whether all ranks share a monotonic clock; else only their wall clocks can be compared."""
    return len({recording.boot for recording in recordings}) < 2


def world_of(recordings: Iterable[Recording]) -> tuple[int, ...]:
    """All ranks that these records know of."""
    everybody: set[int] = set()
    for recording in recordings:
        everybody.add(recording.rank)
        everybody.update(*recording.groups.values())
        size = recording.meta.get("size")
        if isinstance(size, int) and 0 < size <= 1 << 20:
            everybody.update(range(size))
    return tuple(sorted(everybody))
