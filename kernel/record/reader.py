"""The reading side: from another process, whatever state the writer is in, and from files that are cut or foreign."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import time
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel.errors import UsageError
from kernel.record.layout import (
    BEAT_AT,
    CLOSED_AT,
    CRC_AT,
    EVENT,
    FORM,
    FORMAT,
    HEADER_AT,
    LANES,
    LENGTH,
    LISTS,
    MAGIC,
    MAX_CAPACITY,
    MAX_HEADER,
    MAX_STRINGS,
    PLACES,
    PREAMBLE,
    SIZES,
    TEXTS,
    USED_AT,
    WORD,
    Kind,
)
from kernel.record.writer import GraphCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.request import Phase

STAMPS = struct.Struct("<Q56xQ")
KINDS = {int(kind): kind for kind in Kind}
TRIES = 8
"""Snapshots of a ring that a fast writer laps completely while it is read."""
COPIED = 1 << 28
"""Bytes of rings that are held as they are, undecoded."""


class Event(NamedTuple):
    """One event. number: its place among all events of the rank, from 0. group: name, "" for none. site: call site.

    text: the string that b names, for kinds that have one. The rest as in `Recorder.event`.
    """

    number: int
    time_ns: int
    kind: Kind
    phase: Phase | None
    stream: str
    group: str
    seq: int
    round: int
    epoch: int
    a: int
    b: int
    site: str
    text: str


@dataclass(frozen=True)
class Recording:
    """What one ring file held when it was read.

    events: in order; `dropped` older ones are gone (overwritten, or asked not to be read), and `torn` between them
    could not be read: being written just now, cut off, or damaged. truncated: the file is shorter than it was made.
    groups: name -> members. meta: what the run said about itself. wall_ns, monotonic_ns: one moment on both clocks.
    boot: ranks that share it share the monotonic clock. closed_ns: when it was closed in order, None if it was not.
    beat_ns: when the process last ran Python to say so, None where nobody does. strings: the table, by id.
    read_ns: when it was read, on this host's monotonic clock.
    """

    path: Path
    rank: int
    pid: int
    host: str
    boot: str
    python: str
    wall_ns: int
    monotonic_ns: int
    groups: dict[str, tuple[int, ...]]
    meta: dict[str, Any]
    capacity: int
    events: list[Event]
    dropped: int
    torn: int
    truncated: bool
    closed_ns: int | None
    beat_ns: int | None = None
    strings: tuple[str, ...] = ()
    read_ns: int = 0

    def wall(self, time_ns: int) -> int:
        """An event's time as nanoseconds since 1970, which hosts share as well as their clocks agree."""
        return time_ns - self.monotonic_ns + self.wall_ns

    def graph(self, event: Event) -> tuple[GraphCall, ...]:
        """The collectives of a GRAPH_CAPTURE or GRAPH_LAUNCH, in order; () where the file has lost them."""
        try:
            return tuple(GraphCall(str(op), str(group), int(size)) for op, group, size in json.loads(event.text))
        except (ValueError, TypeError, RecursionError):
            return ()

    @cached_property
    def sizes(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """(group, seq) -> row counts of its members, for collectives with uneven parts."""
        parts: dict[tuple[str, int], dict[int, int]] = {}
        for event in self.events:
            if event.kind is Kind.SIZES:
                rows = map(int, event.text.split(","))
                parts.setdefault((event.group, event.seq), {}).update(enumerate(rows, event.a))
        # One that lost its first or a middle part is no list of members.
        return {
            key: tuple(found[member] for member in range(len(found)))
            for key, found in parts.items()
            if found.keys() == set(range(len(found)))
        }


def read(path: str | os.PathLike[str], *, since: int = -1) -> Recording:
    """Read a ring file; its writer may be running, stuck or dead.

    since: leave out events up to this index (to follow a run). Takes memory for `capacity` events, nothing else of the
    file's choosing. Raises UsageError, one line, when it is no ring, or its header is cut or damaged.
    """
    return _decoded(_copied(Path(path)), since)


def read_run(run: str | os.PathLike[str], *, since: int = -1) -> dict[int, Recording]:
    """Every ring of a run directory (or of its `record` folder), by rank.

    A rank that never started has none. The files are copied one right after the other, before any is decoded, which
    takes far longer: what they tell is of one moment. Raises UsageError when there is no ring, or one of them is
    unusable.
    """
    folder = Path(run)
    if (folder / "record").is_dir():
        folder = folder / "record"
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        raise unusable(folder, getattr(error, "strerror", None) or str(error)) from None
    rings = {int(match[1]): name for name in names if (match := re.fullmatch(r"rank(\d{1,9})\.ring", name))}
    recordings: dict[int, Recording] = {}
    copies: list[tuple[int, _Copy]] = []
    for number, (rank, name) in enumerate(rings.items(), 1):
        copies.append((rank, _copied(folder / name)))
        if number == len(rings) or sum(copy.taken for _, copy in copies) > COPIED:
            for expected, copy in copies:
                recordings[expected] = recording = _decoded(copy, since)
                if recording.rank != expected:
                    raise unusable(copy.path, f"it says that it is of rank {recording.rank}")
            copies = []
    if not recordings:
        raise unusable(folder, "no rank<k>.ring in it")
    return recordings


def unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"record {str(path)!r}: {why}: give a run directory that `turnstile rollout` wrote")


class Head(NamedTuple):
    """What a ring file says about itself when it is made. said: the fields of the header, its groups apart."""

    capacity: int
    strings_at: int
    room: int
    events_at: int
    groups: dict[str, tuple[int, ...]]
    said: dict[str, Any]


def read_head(path: Path, fd: int) -> Head:
    """The fixed part of a ring file. Raises UsageError when it is no ring, or this part is cut or damaged."""
    fixed = read_bytes(fd, 0, HEADER_AT)
    if not fixed.startswith(MAGIC):
        raise unusable(path, "not a ring file")
    if len(fixed) < HEADER_AT:
        raise unusable(path, "cut off inside its header")
    _, version, size, capacity, length, room, events_at = PREAMBLE.unpack_from(fixed)
    if version != FORMAT:
        raise unusable(path, f"format {version}, and this version reads format {FORMAT}")
    if not (
        size == EVENT.size
        and 1 <= capacity <= MAX_CAPACITY
        and length <= MAX_HEADER
        and room <= MAX_STRINGS
        and HEADER_AT + length + room <= events_at <= HEADER_AT + MAX_HEADER + 2 * MAX_STRINGS
    ):
        raise unusable(path, "its header is damaged")
    header = read_bytes(fd, HEADER_AT, length)
    if len(header) < length:
        raise unusable(path, "cut off inside its header")
    if zlib.crc32(fixed[: PREAMBLE.size] + header) != LENGTH.unpack_from(fixed, CRC_AT)[0]:
        raise unusable(path, "its header is damaged")
    said = _header(path, header)
    groups = {name: tuple(members) for name, members in said.pop("groups").items()}
    return Head(capacity, HEADER_AT + length, room, events_at, groups, said)


class _Copy(NamedTuple):
    """A ring file's bytes at one moment: its slots twice, the words of its beginning, its strings."""

    path: Path
    head: Head
    first: bytes
    second: bytes
    fixed: bytes
    strings: bytes
    size: int
    read_ns: int

    @property
    def taken(self) -> int:
        """What it takes of memory."""
        return len(self.first) + len(self.second) + len(self.strings)


def _copied(path: Path) -> _Copy:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block here
    except (OSError, ValueError) as error:
        raise unusable(path, getattr(error, "strerror", None) or str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise unusable(path, "not a file")
        head = read_head(path, fd)
        length = head.capacity * EVENT.size
        first, second = read_bytes(fd, head.events_at, length), read_bytes(fd, head.events_at, length)
        now = time.monotonic_ns()
        # Strings after events: an event's strings are in the table before the event is written.
        fixed = read_bytes(fd, 0, HEADER_AT)
        used = min(WORD.unpack_from(fixed, USED_AT)[0], head.room)
        return _Copy(
            path, head, first, second, fixed, read_bytes(fd, head.strings_at, used), os.fstat(fd).st_size, now
        )
    except OSError as error:
        raise unusable(path, error.strerror or str(error)) from None
    finally:
        os.close(fd)


def _decoded(copy: _Copy, since: int) -> Recording:
    head = copy.head
    slots, stamped = _slots(copy)
    for _ in range(TRIES - 1):
        if slots or not stamped:
            break
        copy = _copied(copy.path)
        slots, stamped = _slots(copy)
    closed, beat = (WORD.unpack_from(copy.fixed, at)[0] for at in (CLOSED_AT, BEAT_AT))
    strings = ["", *parse_strings(copy.strings)]
    names = ["", *head.groups]
    decoded = (decode(slots[stamp], strings, names) for stamp in sorted(slots) if stamp - 1 > since)
    events = [event for event in decoded if event is not None]
    newest = max(slots, default=0) - 1
    oldest = events[0].number if events else newest + 1
    return Recording(
        path=copy.path,
        groups=head.groups,
        capacity=head.capacity,
        events=events,
        dropped=oldest,
        torn=max(0, newest + 1 - oldest - len(events)),
        truncated=copy.size < head.events_at + head.capacity * EVENT.size,
        closed_ns=closed or None,
        beat_ns=beat or None,
        strings=tuple(strings),
        read_ns=copy.read_ns,
        **head.said,
    )


def _header(path: Path, data: bytes) -> dict[str, Any]:
    """The header's fields, with the types that `Recording` promises."""
    kinds: dict[str, type] = {
        "rank": int,
        "pid": int,
        "host": str,
        "boot": str,
        "python": str,
        "wall_ns": int,
        "monotonic_ns": int,
        "groups": dict,
        "meta": dict,
    }
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, dict)
        or any(not isinstance(found.get(name), kind) for name, kind in kinds.items())
        or not all(
            isinstance(members, list) and all(isinstance(member, int) for member in members)
            for members in found["groups"].values()
        )
    ):
        raise unusable(path, "its header is not that of a ring")
    return {name: found[name] for name in kinds}


def _slots(copy: _Copy) -> tuple[dict[int, bytes], bool]:
    """Stamp -> slot, for the slots that are whole and of the newest lap; and whether any had its stamps.

    A slot counts when two readings of it, one after the other, are equal and its two stamps agree. A writer stamps the
    front first and the back last, so the second reading of a slot that was being overwritten during the first one
    differs from it, or has two stamps.
    """
    first, second, capacity = copy.first, copy.second, copy.head.capacity
    stamped = False
    slots = {}
    for stamp, slot in whole(first, capacity):
        stamped = True
        if second[slot : slot + EVENT.size] == first[slot : slot + EVENT.size]:
            slots[stamp] = second[slot : slot + EVENT.size]
    newest = max(slots, default=0)
    return {stamp: slot for stamp, slot in slots.items() if stamp > newest - capacity}, stamped


def whole(data: bytes, capacity: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """(stamp, offset) of the slots whose stamps agree with each other and with their place. first: that of the data."""
    end = len(data) // EVENT.size * EVENT.size
    for place, (front, back) in enumerate(STAMPS.iter_unpack(memoryview(data)[:end]), first):
        if front == back and front and front % capacity == place:
            yield front, (place - first) * EVENT.size


def parse_strings(data: bytes) -> list[str]:
    """The whole entries of a part of the string table, in order; the ids of the table count from 1."""
    strings, at = [], 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        strings.append(data[at : at + length].decode(errors="replace"))
        at += length
    return strings


def decode(slot: bytes, strings: list[str], groups: list[str]) -> Event | None:
    """None for a slot that holds no event (damaged)."""
    stamp, time_ns, seq, round_, epoch, a, b, site, group, kind, lane, _ = EVENT.unpack(slot)
    name = groups[group] if group < len(groups) else f"?{group}"
    if kind in LISTS:
        _, _, _, *sizes, first, _, _, many, _ = SIZES.unpack(slot)
        text = ",".join(map(str, sizes[:many]))
        return Event(stamp - 1, time_ns, KINDS[kind], None, "host", name, seq, 0, -1, first, many, "", text)
    if kind not in KINDS or lane not in LANES:
        return None
    phase, stream = LANES[lane]
    text = _string(strings, b) if kind in TEXTS else ""
    at = _string(strings, site)
    if text[:1] == FORM or at[:1] == FORM:
        numbers = (round_, epoch, a, b)
        text, at = _filled(text, numbers), _filled(at, numbers)
    return Event(stamp - 1, time_ns, KINDS[kind], phase, stream, name, seq, round_, epoch, a, b, at, text)


def _filled(text: str, numbers: tuple[int, ...]) -> str:
    if text[:1] != FORM:
        return text
    for place, number in zip(PLACES, numbers, strict=True):
        text = text.replace(place, str(number), 1)
    return text[1:]


def _string(strings: list[str], number: int) -> str:
    return strings[number] if number < len(strings) else f"?{number}"


def read_bytes(fd: int, at: int, size: int) -> bytes:
    """Up to `size` bytes at `at`, fewer at the end of the file. Not through a mapping: a file may shrink meanwhile."""
    parts = []
    while size > 0 and (part := os.pread(fd, size, at)):
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)
