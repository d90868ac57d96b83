"""Where the present attempt of a job begins in a log: torchrun starts its workers again when one has failed, and what
they wrote before is not of those that run now.

    [rank1]: ValueError: boom
    W1130 10:00:02 .. torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 71 closing signal SIGTERM
    E1130 10:00:02 .. torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) ...
    [rank0]: step 0

When torchrun gives up, which it says, nothing is started again: then the last attempt is the one that has ended. The
folders `attempt_0`, `attempt_1` that its --log-dir makes tell the same of whole logs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from verify.readers.lines import file_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_AGENT: Final = re.compile(r"torch[./]distributed[./]elastic")
_STOPS: Final = re.compile(r"closing signal SIG|\bfailed \(exitcode: ")
_GIVES_UP: Final = re.compile(
    r"(ChildFailedError|SignalException)\b|^Root Cause \(first observed failure\)|shutting down workers"
)
_NOBODYS: Final = re.compile(r"^\s*$|^\*{5,}$|^Setting OMP_NUM_THREADS")
"""Lines that torchrun writes without saying so."""
_FOLDER: Final = re.compile(r"attempt_(\d{1,6})")
NEEDLES: Final = (b"closing signal SIG", b"failed (exitcode: ")


class Attempt(NamedTuple):
    """The present attempt in a log. begins: its first line, from 1 on. stopped: the last line in which torchrun said
    that it ends its workers, 0 where it never did. silent: nothing was written after that, so that it is not known
    whether they were started again.
    """

    begins: int = 1
    stopped: int = 0
    silent: bool = False


def attempt_in(what: str, path: Path) -> Attempt:
    """Of a log. Raises UsageError, one line, for what cannot be read."""
    about = path.stat() if path.exists() else None
    return _attempt(what, path, None if about is None else (about.st_ino, about.st_size, about.st_mtime_ns))


@lru_cache(maxsize=4096)
def _attempt(what: str, path: Path, _: tuple[int, ...] | None) -> Attempt:
    if not any(_AGENT.search(line) for _, line in file_lines(what, path, NEEDLES)):
        return Attempt()
    stops: list[int] = []
    """Of several lines that follow one another, the last one."""
    written, given_up = True, False
    for number, line in file_lines(what, path):
        if _AGENT.search(line) and _STOPS.search(line):
            if not written:
                stops.pop()
            stops.append(number)
            written, given_up = False, False
        elif stops and _GIVES_UP.search(line):
            given_up = True
        elif not given_up and not _AGENT.search(line) and not _NOBODYS.match(line):
            # A traceback of torchrun's own comes before the exception that says that it gives up.
            written = written or not _own(line)
    if given_up:
        stops = stops[:-1]
        return Attempt(stops[-1] + 1, stops[-1]) if stops else Attempt()
    if written:
        return Attempt(stops[-1] + 1, stops[-1])
    last = stops[-2] + 1 if len(stops) > 1 else 1
    return Attempt(last, stops[-1], silent=True)


def _own(line: str) -> bool:
    """Whether a line may be of a traceback of torchrun itself."""
    return line.startswith(("Traceback (most recent call last)", "  "))


def present_lines(what: str, path: Path, needles: Sequence[bytes] = ()) -> Iterator[tuple[int, str]]:
    """As `verify.readers.lines.file_lines`, without what earlier attempts wrote."""
    begins = attempt_in(what, path).begins
    return (each for each in file_lines(what, path, needles) if each[0] >= begins)


def newest(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The logs without those in folders of earlier attempts of one run, and a line for each run that has such."""
    last: dict[Path, int] = {}
    for path in paths:
        if (found := _folder_of(path)) is not None:
            last[found[0]] = max(found[1], last.get(found[0], 0))
    old = [path for path in paths if (found := _folder_of(path)) is not None and found[1] < last[found[0]]]
    lines = []
    for run, number in last.items():
        left_out = sum((found := _folder_of(path)) is not None and found[0] == run for path in old)
        if left_out:
            logs = f"{left_out} log{'s' if left_out > 1 else ''}"
            lines.append(f"{run.name}: {logs} of attempts before attempt_{number}: left out")
    return [path for path in paths if path not in set(old)], lines


def of_present(logs: Mapping[str, list[Path]]) -> list[str]:
    """Leave out logs of earlier attempts; what to say of these, and of parts of others that are not read.

    logs: by reader; changed in place.
    """
    everything = list(dict.fromkeys(path for paths in logs.values() for path in paths))
    kept, lines = newest(everything)
    for paths in logs.values():
        paths[:] = [path for path in paths if path in set(kept)]
    for path in kept:
        attempt = attempt_in("log", path)
        if attempt.silent:
            again = "whether it has started them again is not in it"
            lines.append(f"{path.name}: torchrun ended its workers (line {attempt.stopped}): {again}")
        if attempt.begins > 1:
            again = f"torchrun has started its workers again (line {attempt.begins - 1})"
            lines.append(f"{path.name}: {again}: what they wrote before is left out")
    return lines


def restarted(path: Path) -> bool:
    """Whether a log may lack what it was recognised by, as only an earlier attempt has it."""
    return attempt_in("log", path).begins > 1


def _folder_of(path: Path) -> tuple[Path, int] | None:
    """The run and the attempt that a log is of, by the folders of torchrun's --log-dir."""
    for folder in path.resolve().parents[:2]:
        if found := _FOLDER.fullmatch(folder.name):
            return folder.parent, int(found[1])
    return None
