"""The writing side: one ring file a rank, filled without locks by the loop thread and the stream workers."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import platform
import sys
import threading
import time
import zlib
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel.errors import UsageError
from kernel.record.layout import (
    BEAT_AT,
    CLOSED_AT,
    EVENT,
    FORMAT,
    HEADER_AT,
    HOST,
    LENGTH,
    MAGIC,
    MAX_CAPACITY,
    MAX_HEADER,
    MAX_STRING,
    MAX_STRINGS,
    PHASE_BITS,
    PREAMBLE,
    SIZES,
    STREAM_BITS,
    USED_AT,
    WORD,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PAGE = 4096
_SIZES = int(Kind.SIZES)
FULL = "(string table full)"


class GraphCall(NamedTuple):
    """One collective of a captured graph: operation, name of its group, logical size."""

    op: str
    group: str
    size: int


def ring_path(run: str | os.PathLike[str], rank: int) -> Path:
    """Where rank `rank` of the run in directory `run` keeps its ring."""
    return Path(run) / "record" / f"rank{rank}.ring"


class Recorder:
    """Appends events to a new ring file at `path` (mode 0400: written here only), replacing an older one there.

    rank: of this process. groups: name of each communicator -> its member ranks, in group order; the same name with
    other members is another communicator. meta: whatever a reader should know, as JSON: `world`, `size`, `policy`,
    `versions`. capacity: events kept, 72 bytes each. strings: bytes for call sites and names. clock: monotonic
    nanoseconds, virtual in the simulated world.

    Thread-safe without a lock on the path of an event: under the interpreter lock, taking an index and packing a slot
    are one step each. Between them another thread may run, so a reader can find a gap, which it counts. Not to be used
    by a forked child.
    Raises UsageError when the file cannot be made: its blocks are taken here, since a full disk would otherwise kill
    the process at some later event. A file that somebody shortens all the same (its mode stops everybody but root) is
    given up by the next `beat`, `site` or `close`, in a line on standard error; an event written before that, behind
    the new end of the file, ends the process by SIGBUS. Deleting the file, or its directory, harms nobody.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        groups: Mapping[str, Sequence[int]],
        meta: Mapping[str, Any] | None = None,
        capacity: int = 65536,
        strings: int = 1 << 20,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise UsageError(f"record {path}: capacity {capacity} must be in 1..{MAX_CAPACITY} events")
        if not PAGE <= strings <= MAX_STRINGS:
            raise UsageError(f"record {path}: a string table of {strings} bytes must be in {PAGE}..{MAX_STRINGS}")
        self.path, self.rank = Path(path), rank
        self._groups = {name: number for number, name in enumerate(groups, 1)}
        header = json.dumps(
            {
                "rank": rank,
                "pid": os.getpid(),
                "host": platform.node(),
                "boot": _boot_id(),
                "python": platform.python_version(),
                **_anchor(clock),
                "groups": {name: list(members) for name, members in groups.items()},
                "meta": dict(meta or {}),
            }
        ).encode()
        if len(header) > MAX_HEADER:
            raise UsageError(f"record {path}: a header of {len(header)} bytes is over {MAX_HEADER}: shorten its meta")
        self._strings_at = HEADER_AT + len(header)
        self._strings_end = self._strings_at + strings
        self._events_at = -(-self._strings_end // PAGE) * PAGE
        self._capacity, self._clock = capacity, clock
        fixed = PREAMBLE.pack(MAGIC, FORMAT, EVENT.size, capacity, len(header), strings, self._events_at)
        first = (fixed + LENGTH.pack(zlib.crc32(fixed + header))).ljust(HEADER_AT, b"\0") + header
        self._size = self._events_at + capacity * EVENT.size
        try:
            self._map = _create(self.path, first, self._size)
        except OSError as error:
            raise UsageError(f"record {path}: {error.strerror}: choose another directory with --out") from None
        self._tick, self._pack = count(1).__next__, EVENT.pack_into
        self._there: Callable[[], int] = self._map.size
        self._ids: dict[str | tuple[str, str, int], int] = {"": 0}
        self._used, self._strings, self._lock = 0, 0, threading.Lock()
        self._full = self.site(FULL)

    def group(self, name: str) -> int:
        """The number of a group of the table, as `event` wants it. Raises UsageError for an unknown one."""
        try:
            return self._groups[name]
        except KeyError:
            raise UsageError(f"group {name!r} is not in the record's table: it has {', '.join(self._groups)}") from None

    def site(self, text: str) -> int:
        """The id of a string: a call site ("file:line function") or a name. The same text has the same id.

        Texts are meant to repeat. When the table is full, new ones get the id of a string that says so.
        """
        known = self._ids.get(text)
        return self._intern(text, text) if known is None else known

    def here(self, depth: int = 1) -> int:
        """The id of the caller's own call site, `depth` frames up."""
        frame = sys._getframe(depth)
        code = frame.f_code
        key = (code.co_filename, code.co_qualname, frame.f_lineno)
        known = self._ids.get(key)
        return self._intern(key, f"{key[0]}:{key[2]} {key[1]}") if known is None else known

    def graph(self, calls: Sequence[GraphCall]) -> int:
        """The id that stands for a captured graph's collectives, in order: b of GRAPH_CAPTURE and GRAPH_LAUNCH."""
        return self.site(json.dumps([list(call) for call in calls], separators=(",", ":")))

    def event(
        self,
        kind: Kind,
        phase: str | None = None,
        stream: str = HOST,
        group: int = 0,
        seq: int = 0,
        round_: int = 0,
        epoch: int = -1,
        a: int = 0,
        b: int = 0,
        site: int = 0,
        time_ns: int = 0,
    ) -> int:
        """Append one event, in 0.6 to 0.7 microseconds on a quiet core.

        phase: D, P or None. stream: role of the stream it was put on, D, P or HOST. group: number from `group`, 0 for
        none. seq: count of that communicator's collectives, or as the kind says. a, b: unsigned, see `Kind`. site: id
        of its call site. time_ns: when it happened, on the recorder's clock, for what becomes known later; 0 for now.
        Returns its number. Raises struct.error or KeyError for values out of range; late events after `close` are
        written all the same.
        """
        stamp = self._tick()
        self._pack(
            self._map,
            self._events_at + stamp % self._capacity * 72,
            stamp,
            time_ns or self._clock(),
            seq,
            round_,
            epoch,
            a,
            b,
            site,
            group,
            kind,
            PHASE_BITS[phase] | STREAM_BITS[stream],
            stamp,
        )
        return stamp - 1

    def write(self, kind: int, group: int, seq: int, round_: int, epoch: int, a: int, b: int, site: int) -> int:
        """`event` without a phase or stream, all of it by place: in half of the time."""
        stamp = self._tick()
        at = self._events_at + stamp % self._capacity * 72
        self._pack(self._map, at, stamp, self._clock(), seq, round_, epoch, a, b, site, group, kind, 0, stamp)
        return stamp - 1

    def beat(self) -> None:
        """Say that this process runs Python."""
        if self._there() < self._size:
            self._cut()
        WORD.pack_into(self._map, BEAT_AT, max(1, self._clock()))

    def sizes(self, group: int, seq: int, sizes: Sequence[int], kind: int = _SIZES) -> None:
        """Note the members' row counts of collective (group, seq), in group order: one event for each eight.

        kind: another one that is laid out alike.
        """
        for start in range(0, len(sizes), 8):
            part = sizes[start : start + 8]
            stamp = self._tick()
            SIZES.pack_into(
                self._map,
                self._events_at + stamp % self._capacity * 72,
                stamp,
                self._clock(),
                seq,
                *part,
                *(0,) * (8 - len(part)),
                start,
                group,
                kind,
                len(part),
                stamp,
            )

    def close(self) -> None:
        """Mark the record as ended in order, and write it to disk. Idempotent; other threads may still write."""
        if self._there() < self._size:
            self._cut()
        if WORD.unpack_from(self._map, CLOSED_AT)[0] == 0:
            WORD.pack_into(self._map, CLOSED_AT, max(1, self._clock()))
        self._map.flush()

    def _cut(self) -> None:
        """Write to memory from here on: somebody has shortened the file, and what is past its end kills who touches it.

        Its size is looked at by `beat`, `close` and for new strings, not before each event: that look lets go of the
        interpreter lock, which would cost a busy rank more than the event does. A program that is stuck and beats is
        safe, then; one that writes an event before the next beat is not. Nothing that is free prevents that: memory
        that cannot be shortened (sealed, or without a name) is gone when the process dies, which is when it is needed,
        and writing by system calls lets go of the interpreter lock at every event.
        """
        self._map = mmap.mmap(-1, self._size)
        self._there = lambda: self._size
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"record {self.path}: somebody truncated it: nothing more is recorded", file=sys.stderr, flush=True)

    def _intern(self, key: str | tuple[str, str, int], text: str) -> int:
        data = LENGTH.pack(0) + text.encode(errors="replace")[:MAX_STRING]
        with self._lock:
            if (known := self._ids.get(key)) is not None:
                return known
            at = self._strings_at + self._used
            if at + len(data) > self._strings_end:
                return self._full
            if self._there() < self._size:
                self._cut()
            self._map[at : at + len(data)] = LENGTH.pack(len(data) - LENGTH.size) + data[LENGTH.size :]
            self._used += len(data)
            # The entry is whole before it counts: a reader looks at `used` only.
            WORD.pack_into(self._map, USED_AT, self._used)
            self._strings += 1
            self._ids[key] = self._strings
            return self._strings


class NullRecorder(Recorder):
    """Records nothing, at the price of a call."""

    def __init__(self) -> None:
        self.path, self.rank = Path(os.devnull), 0

    def group(self, name: str) -> int:
        """0."""
        return 0

    def site(self, text: str) -> int:
        """0."""
        return 0

    def here(self, depth: int = 1) -> int:
        """0."""
        return 0

    def graph(self, calls: Sequence[GraphCall]) -> int:
        """0."""
        return 0

    def event(
        self,
        kind: Kind,
        phase: str | None = None,
        stream: str = HOST,
        group: int = 0,
        seq: int = 0,
        round_: int = 0,
        epoch: int = -1,
        a: int = 0,
        b: int = 0,
        site: int = 0,
        time_ns: int = 0,
    ) -> int:
        """0."""
        return 0

    def write(self, kind: int, group: int, seq: int, round_: int, epoch: int, a: int, b: int, site: int) -> int:
        """0."""
        return 0

    def beat(self) -> None:
        """Nothing."""

    def sizes(self, group: int, seq: int, sizes: Sequence[int], kind: int = _SIZES) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _create(path: Path, first: bytes, size: int) -> mmap.mmap:
    """A file of `size` bytes that starts with `first`; it takes its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _reserve(fd, size)
        mapped = mmap.mmap(fd, size)
        mapped[: len(first)] = first
        # Nobody but this mapping has to write to it, and what shortens it kills who does.
        os.fchmod(fd, 0o400)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return mapped


def _reserve(fd: int, size: int) -> None:
    """Give the file `size` bytes, with disk blocks behind them where the file system can say so."""
    os.ftruncate(fd, size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise


def _anchor(clock: Callable[[], int]) -> dict[str, int]:
    """One moment on both clocks, from the closest of a few tries (a preempted one would be off by milliseconds)."""
    tries = []
    for _ in range(5):
        before, wall, after = clock(), time.time_ns(), clock()
        tries.append((after - before, wall, (before + after) // 2))
    _, wall, monotonic = min(tries)
    return {"wall_ns": wall, "monotonic_ns": monotonic}


def _boot_id() -> str:
    """Of the running kernel, "" where there is none: ranks with the same one share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
