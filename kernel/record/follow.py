"""Following a ring: each look reads the slots that were written since the last one, and nothing else of the file.

A ring does not say how far its writer is, so a look reads on from the newest event that it knows: `AHEAD` slots at a
time, until a stretch holds nothing new. An event may be there before an older one, whose thread was interrupted
between taking its number and writing it: the older one is then awaited, and handed out by the look that finds it. A
writer that has gone once around the ring since the last look has overwritten what was not read: the look then reads
the whole ring, and says that what it hands out does not go on from what came before.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernel.record.layout import BEAT_AT, CLOSED_AT, EVENT, HEADER_AT, KIND_AT, USED_AT, WORD, Kind
from kernel.record.reader import Recording, decode, parse_strings, read, read_bytes, read_head, unusable, whole

if TYPE_CHECKING:
    from kernel.record.reader import Event, Head

HELD: Final = 1 << 13
"""Events that `hold` keeps for the next look, the newest ones."""
AHEAD: Final = 256
"""Slots of one read. No thread falls back so far behind the others that so many later events hide its own."""


class Look(NamedTuple):
    """What one look found. recording: its `events` are those that no look before had, in order of their numbers;
    `torn` counts those that are still awaited, or were lost between others.

    fresh: they do not go on from the looks before: it is the first look, another ring has taken the file's place, or
    the writer has lapped the reader. `recording.events` is then all that the ring holds.
    """

    recording: Recording
    fresh: bool


class RingFollower:
    """Follows the ring file at `path`, and whichever ring takes its place. Keeps the file open between looks."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = -1
        self._inode = (0, 0)
        self._forget()

    def _forget(self) -> None:
        self._head: Head | None = None
        self._recording: Recording | None = None
        self._strings = [""]
        self._table: tuple[str, ...] = ("",)
        self._used = 0
        self._next = 0
        """Stamp of the next event: that of the newest one, plus one."""
        self._awaited: set[int] = set()
        """Stamps below `_next` that no look has found yet."""
        self._held: dict[int, bytes] = {}
        """Stamp -> slot, of what was read and not handed out yet."""
        self._anew: Look | None = None
        """What precedes them, and was not handed out either."""
        self._moved = -1

    def look(self) -> Look:
        """Read what is new. Raises UsageError, one line, when the file is no ring, or is gone and was never read.

        A ring whose file was taken away is followed on while it is open.
        """
        self.hold()
        assert self._head is not None
        assert self._recording is not None
        names = ["", *self._head.groups]
        if self._held:
            self._grow_strings(self._head)
        events: list[Event] = []
        for stamp in sorted(self._held):
            if (event := decode(self._held[stamp], self._strings, names)) is not None:
                events.append(event)
        first, self._anew, self._held = self._anew, None, {}
        if first is None:
            return Look(replace(self._recording, events=events, strings=self._table), fresh=False)
        events = [*first.recording.events, *events]
        return Look(replace(self._recording, events=events, strings=self._table), fresh=True)

    def hold(self) -> tuple[int, bool]:
        """Read what is new and keep it for the next look, which is cheaper than to look. Raises UsageError as `look`.

        Returns the number of the newest event that is more than a remark (-1: none), and whether the ring was closed.
        Of more than `HELD` events the newest are kept, and the next look is then fresh.
        """
        try:
            changed = self._open()
            if changed or self._head is None or self._recording is None:
                self._whole()
            else:
                self._step(self._head, self._recording)
        except OSError as error:
            raise unusable(self.path, error.strerror or str(error)) from None
        assert self._recording is not None
        return self._moved, self._recording.closed_ns is not None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Whether the file is another one than before; it is open then."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            if self._fd < 0:
                raise
            return False
        if self._fd >= 0 and (found.st_dev, found.st_ino) == self._inode:
            return False
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block here
        self.close()
        self._fd = fd
        self._forget()
        opened = os.fstat(fd)
        if not stat.S_ISREG(opened.st_mode):
            raise unusable(self.path, "not a file")
        self._inode = (opened.st_dev, opened.st_ino)
        return True

    def _whole(self) -> None:
        """Take everything that the ring holds."""
        self._forget()
        self._head = read_head(self.path, self._fd)
        closed = self._words()[1]  # before the events: what is closed has written its last one
        recording = read(f"/proc/self/fd/{self._fd}" if os.path.isdir("/proc/self/fd") else self.path)
        self._grow_strings(self._head)
        events = recording.events
        if events:
            self._next = events[-1].number + 2
            there = {event.number + 1 for event in events}
            self._awaited = {stamp for stamp in range(max(1, self._next - AHEAD), self._next) if stamp not in there}
            self._awaited -= set(range(events[0].number + 1))
            # Behind a gap that nobody will fill (the writer was faster than the reading) is as good as overwritten.
            for at in range(len(events) - 1, 0, -1):
                gap = range(events[at - 1].number + 2, events[at].number + 1)
                if gap and not self._awaited.issuperset(gap):
                    events = events[at:]
                    break
        else:
            self._next = 1
        self._moved = max((event.number for event in events if event.kind is not Kind.MARK), default=-1)
        self._recording = replace(
            recording,
            path=self.path,
            events=[],
            dropped=events[0].number if events else recording.dropped,
            closed_ns=closed or None,
            torn=len(self._awaited),
        )
        self._anew = Look(replace(self._recording, events=events), fresh=True)

    def _step(self, head: Head, before: Recording) -> None:
        """Take what is new."""
        _, closed, beat = self._words()
        slots: dict[int, bytes] = {}
        while True:
            found, lapped = self._stretch(head, self._next, min(AHEAD, head.capacity))
            if lapped:
                self._whole()
                return
            if not found:
                break
            newest = max(found)
            self._awaited.update(stamp for stamp in range(self._next, newest) if stamp not in found)
            self._next = newest + 1
            slots |= found
        for stamp in sorted(self._awaited):
            late, overwritten = self._stretch(head, stamp, 1)
            if stamp in late or overwritten or stamp <= self._next - 1 - head.capacity:
                self._awaited.discard(stamp)
                slots |= late
        for stamp in sorted(slots, reverse=True):
            if slots[stamp][KIND_AT] != Kind.MARK:
                self._moved = max(self._moved, stamp - 1)
                break
        self._held |= slots
        beat_ns = beat or None
        now, torn = time.monotonic_ns(), len(self._awaited)
        self._recording = replace(before, closed_ns=closed or None, torn=torn, beat_ns=beat_ns, read_ns=now)
        if len(self._held) > HELD:
            kept = sorted(self._held)[-(HELD // 2) :]
            self._held = {stamp: self._held[stamp] for stamp in kept}
            # As a ring that holds no more than these.
            self._recording = replace(self._recording, dropped=kept[0] - 1)
            self._anew = Look(self._recording, fresh=True)

    def _stretch(self, head: Head, first: int, count: int) -> tuple[dict[int, bytes], bool]:
        """Stamp -> slot of those of the events first, ..., first + count - 1 that are whole, and whether one of these
        places holds an event of a later lap. A slot counts when two readings of it are equal (`reader._slots`)."""
        place = first % head.capacity
        parts = [(place, min(count, head.capacity - place)), (0, count - min(count, head.capacity - place))]
        found: dict[int, bytes] = {}
        lapped = False
        for start, length in parts:
            if not length:
                continue
            at = head.events_at + start * EVENT.size
            one = read_bytes(self._fd, at, length * EVENT.size)
            wanted = [(stamp, slot) for stamp, slot in whole(one, head.capacity, start) if stamp >= first]
            if not wanted:
                continue
            two = read_bytes(self._fd, at, length * EVENT.size)
            for stamp, slot in wanted:
                if stamp >= first + count:
                    lapped = True
                elif one[slot : slot + EVENT.size] == two[slot : slot + EVENT.size]:
                    found[stamp] = one[slot : slot + EVENT.size]
        return found, lapped

    def _words(self) -> tuple[int, int, int]:
        fixed: Any = read_bytes(self._fd, 0, HEADER_AT)
        if len(fixed) < HEADER_AT:
            raise unusable(self.path, "cut off inside its header")
        used, closed, beat = (WORD.unpack_from(fixed, at)[0] for at in (USED_AT, CLOSED_AT, BEAT_AT))
        return used, closed, beat

    def _grow_strings(self, head: Head) -> None:
        """Read the strings that were added; after the events that name them."""
        used = min(self._words()[0], head.room)
        if used > self._used:
            self._strings += parse_strings(read_bytes(self._fd, head.strings_at + self._used, used - self._used))
            self._used, self._table = used, tuple(self._strings)
