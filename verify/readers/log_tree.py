"""The folder that torchrun's --log-dir makes: which of its logs are those of the ranks that run now.

    DIR/<run>/attempt_<n>/<local rank>/stdout.log, stderr.log

DIR holds a folder for each start of torchrun. An attempt begins when torchrun starts its workers again, so that the
highest number is of those that run, or ran last.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from kernel.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_ATTEMPT: Final = re.compile(r"attempt_(\d{1,6})")
_STREAMS: Final = ("stdout.log", "stderr.log")


class Logs(NamedTuple):
    """files: of the newest attempt, in the order of its ranks. attempt: its folder. older: those of earlier ones."""

    files: tuple[Path, ...]
    attempt: Path
    older: tuple[Path, ...] = ()


def logs_below(folder: Path) -> Logs | None:
    """The logs of the newest attempt below a folder: torchrun's own, that of a run, or of one attempt. None for what is
    no such folder. Raises UsageError for one of several runs.
    """
    if files := _of_attempt(folder):
        return Logs(files, folder)
    if attempts := _attempts(folder):
        newest = attempts[-1]
        return Logs(_of_attempt(newest), newest, tuple(attempts[:-1]))
    runs = [each for each in _folders(folder) if _attempts(each)]
    if len(runs) > 1:
        newest = max(runs, key=lambda each: each.stat().st_mtime)
        raise UsageError(f"{folder}: logs of {len(runs)} starts of torchrun: name one of them; the newest is {newest}")
    return logs_below(runs[0]) if runs else None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:
        return []


def _attempts(folder: Path) -> list[Path]:
    """The attempts of a run that have logs, by their numbers."""
    found = [(int(number[1]), each) for each in _folders(folder) if (number := _ATTEMPT.fullmatch(each.name))]
    return [each for _, each in sorted(found) if _of_attempt(each)]


def _of_attempt(folder: Path) -> tuple[Path, ...]:
    ranks = [each for each in _folders(folder) if each.name.isascii() and each.name.isdigit()]
    ranks.sort(key=lambda each: int(each.name[:9]))
    return tuple(log for rank in ranks for name in _STREAMS if (log := rank / name).is_file())
