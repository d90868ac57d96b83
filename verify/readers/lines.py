"""Text evidence line by line, in bounded memory, whatever the file holds."""

from __future__ import annotations

import filecmp
import os
import re
import stat
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

BLOCK = 1 << 20
LONGEST = 1 << 16
"""Bytes of a line that are looked at; the rest of a longer one is passed over."""
MOST = 200_000
"""Lines that a reader keeps of one file: far more than any job writes of a hang, and little enough to hold."""
SEATS = 1 << 19
"""Members of all communicators together that are looked at: far more than any job has, and little enough to hold."""
BIGGEST = 1 << 26
"""Bytes of a file that has to be read whole (JSON)."""

_PROGRESS = re.compile(r"(?!wandb:).{0,200}\b(?:step|epoch|iter(?:ation)?)\b\W{0,4}\d", re.IGNORECASE)
"""A line of a rank that goes on: its exception was caught and logged, or it was started again."""

PREFIX = re.compile(r"^(?:\s*\[(?:rank|default)\s?\d{1,7}\]:\s?){1,3}")
"""What stands before a line in a log of several ranks: torch's own, torchrun's, or both."""
_RANK_PREFIX = re.compile(r"\[rank\s?(\d{1,7})\]:")
_ROLE_PREFIX = re.compile(r"\[default\s?(\d{1,7})\]:")
"""torchrun's, with the number within a host: see `Numbers`."""
_OF_ALL = re.compile(r"\(default_pg\) Rank (\d{1,7})\]")
"""In the group of all ranks, a watchdog's number is the global one."""
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|r)[_\-.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_STREAM_NAMES = frozenset({"stderr.log", "stdout.log", "stderr", "stdout", "error.json"})


def unusable(what: str, path: Path, why: str, do: str) -> UsageError:
    """The one line about a file that cannot be used."""
    return UsageError(f"{what} {str(path)!r}: {' '.join(why.split())[:200]}: {do}")


def file_lines(what: str, path: Path, needles: Sequence[bytes] = ()) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of the lines of a file; with needles only of those that hold one of them.

    Holds one block and one line. A line is cut at `LONGEST` bytes, undecodable bytes are replaced. what: how errors
    name the kind of evidence. Raises UsageError, one line, for what cannot be read or is no file.
    """
    fd = _open(what, path)
    number, rest, skipping = 1, b"", False
    try:
        while block := os.read(fd, BLOCK):
            data = rest + block
            *whole, rest = data.split(b"\n")
            if not needles or any(needle in data for needle in needles):
                for line in whole:
                    if not skipping and (not needles or any(needle in line for needle in needles)):
                        yield number, line[:LONGEST].decode(errors="replace").rstrip("\r")
                    number, skipping = number + 1, False
            else:
                number, skipping = number + len(whole), skipping and not whole
            if len(rest) > LONGEST:
                if not skipping and (not needles or any(needle in rest for needle in needles)):
                    yield number, rest[:LONGEST].decode(errors="replace")
                    skipping = True
                # Its last bytes may be the beginning of a needle.
                rest = rest[-64:]
        if rest and not skipping and (not needles or any(needle in rest for needle in needles)):
            yield number, rest.decode(errors="replace").rstrip("\r")
    except OSError as error:
        raise unusable(what, path, error.strerror or str(error), "give a file that can be read") from None
    finally:
        os.close(fd)


def holds(path: Path, head: bytes, needles: Sequence[bytes]) -> bool:
    """Whether a text file holds one of `needles` anywhere. head: its first bytes, which tell text from binary."""
    if b"\0" in head:
        return False
    if any(needle in head for needle in needles):
        return True
    try:
        return next(file_lines("log", path, needles), None) is not None
    except UsageError:
        return False


def whole_file(what: str, path: Path) -> bytes:
    """All of a file. Raises UsageError for one above `BIGGEST` bytes, or that cannot be read."""
    fd = _open(what, path)
    parts, size = [], 0
    try:
        while part := os.read(fd, BLOCK):
            parts.append(part)
            size += len(part)
            if size > BIGGEST:
                raise unusable(what, path, f"over {BIGGEST >> 20} MiB", "give the file of one process or one query")
    except OSError as error:
        raise unusable(what, path, error.strerror or str(error), "give a file that can be read") from None
    finally:
        os.close(fd)
    return b"".join(parts)


def distinct(paths: Sequence[Path]) -> list[Path]:
    """The files without copies of one another, byte for byte: what they tell would be counted twice."""
    sizes: dict[int, list[Path]] = {}
    for path in paths:
        same = sizes.setdefault(path.stat().st_size if path.exists() else -1, [])
        if not any(filecmp.cmp(path, other, shallow=False) for other in same):
            same.append(path)
    kept = {path for same in sizes.values() for path in same}
    return [path for path in dict.fromkeys(paths) if path in kept]


def named(paths: Sequence[Path]) -> str:
    """Several files by name, in few words."""
    return ", ".join(path.name for path in paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def goes_on(line: str) -> bool:
    """Whether a line of a rank's says that it goes on, as lines of a loop do."""
    return _PROGRESS.match(PREFIX.sub("", line)) is not None


class Numbers(NamedTuple):
    """What `[default1]:` stands for in one log, by its own lines. ranks: number within the host -> the global rank that
    lines with that prefix tell, always the same one. untold: numbers of which no line tells it.
    """

    ranks: Mapping[int, int]
    untold: frozenset[int]


def numbers_of(path: Path) -> Numbers:
    """Those of a log. Raises UsageError where it cannot be read."""
    about = path.stat()
    return _numbers(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=64)
def _numbers(path: Path, _size: int, _written_ns: int) -> Numbers:
    told: dict[int, set[int]] = {}
    for _, line in file_lines("log", path, (b"[default",)):
        if found := _ROLE_PREFIX.search(line):
            mine = told.setdefault(int(found[1]), set())
            mine.update(int(rank[1]) for rank in (_RANK_PREFIX.search(line), _OF_ALL.search(line)) if rank)
    ranks = {number: next(iter(mine)) for number, mine in told.items() if len(mine) == 1}
    return Numbers(ranks, frozenset(told) - ranks.keys())


_HOSTS: Final[ContextVar[frozenset[Path]]] = ContextVar("logs of several hosts", default=frozenset())


@contextmanager
def of_hosts(paths: Iterable[Path]) -> Iterator[None]:
    """While this lasts, these are logs of several hosts: a number within a host is no rank there."""
    before = _HOSTS.set(frozenset(paths))
    try:
        yield
    finally:
        _HOSTS.reset(before)


def rank_in(line: str, path: Path) -> int | None:
    """The global rank of a line in a log of several ranks, by its `[rank3]:` prefix, else by the file's name.

    `[default1]:` alone is a number within a host: the rank is what other lines of that number tell; where none does, it
    is taken for the rank itself in the only log there is (`verify.readers.gather` says so), and for none in one of
    several (`of_hosts`).
    """
    if found := _RANK_PREFIX.search(line):
        return int(found[1])
    if found := _ROLE_PREFIX.search(line):
        number = int(found[1])
        with suppress(OSError, UsageError):
            if (rank := numbers_of(path).ranks.get(number)) is not None:
                return rank
        if path not in _HOSTS.get():
            return number
    return rank_of_file(path)


def rank_of_file(path: Path) -> int | None:
    """The rank that a file's name tells: `rank3.log`, or `3/stderr.log`, as torchrun lays them out."""
    if found := _RANK_IN_NAME.findall(path.name):
        return int(found[-1])
    if path.name in _STREAM_NAMES and path.parent.name.isascii() and path.parent.name.isdigit():
        return int(path.parent.name[:7])
    return None


def _open(what: str, path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block here
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise unusable(what, path, why, "give a file that can be read") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise unusable(what, path, "not a file", "give a file that can be read")
    except BaseException:
        os.close(fd)
        raise
    return fd


def brief(text: str, most: int = 70) -> str:
    """What an exception says, in one line: its first sentence, without the line of the library and the peer's port.

    `RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:5851. This is ..`
    becomes `RuntimeError: Connection closed by peer`.
    """
    text = re.sub(r"\[/[^\]]*\]\s*", "", " ".join(text.split()))
    text = re.sub(r"\s*\[[\da-fA-F.:]+\]:\d+", "", text).split(". ")[0].rstrip(". ")
    return text if len(text) <= most else f"{text[: most - 2]}.."
