"""What a ring file shows of damage: that it was cut or grew, and places that no writer leaves as they are.

A slot has no checksum. What is seen is what happens to files: an end that is missing, bytes put in or taken out, a
block that was zeroed or written over. Zeroes over the newest events alone look like a ring that goes no further.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from kernel.record.layout import EVENT, LENGTH, MAX_STRING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.record.reader import Event

STAMPS: Final = struct.Struct("<Q56xQ")
ZEROES: Final = bytes(8)
"""What no text has in it, and no length either."""
AT_ONCE: Final = 16
"""Events that threads may be in the middle of writing, or were when the process was killed."""


def cut(size: int, events_at: int, capacity: int, newest: int, data: bytes) -> str:
    """How a file differs from the size that it was made with, in words; "" where it does not, or lost nothing but what
    no event was written to. size: in bytes. newest: stamp of the newest event found, 0 for none. data: the slots.
    """
    made = events_at + capacity * EVENT.size
    if size > made:
        return f"{size - made} bytes longer than it was made"
    # Where the slot after the newest event is here, no newer one was written.
    following = (newest + 1) % capacity * EVENT.size
    return "" if size == made or following + EVENT.size <= len(data) else f"cut off at byte {size} of {made}"


def foreign(first: bytes, second: bytes, capacity: int, newest: int) -> int:
    """How many slots hold what no writer leaves there, in two readings: stamps of other slots, or an event after the
    newest one that is there in part. newest: the stamp of that one.
    """
    used = len(first.rstrip(b"\0"))
    end = min(-(-used // EVENT.size), len(first) // EVENT.size) * EVENT.size
    found = 0
    for place, (front, back) in enumerate(STAMPS.iter_unpack(memoryview(first)[:end])):
        if front == back and (not front or front % capacity == place):
            continue
        strange = (front and front % capacity != place) or (back and back % capacity != place)
        if strange or max(front, back) > newest:
            at = place * EVENT.size
            found += first[at : at + EVENT.size] == second[at : at + EVENT.size]
    return found


def garbled(table: bytes) -> bool:
    """Whether a table of strings, as far as it is used, is no row of whole entries of text."""
    if ZEROES in table:
        return True
    at = 0
    while at + LENGTH.size <= len(table):
        (length,) = LENGTH.unpack_from(table, at)
        if not length:
            return True  # the empty string has no entry
        at += LENGTH.size
        try:
            table[at : at + length].decode()
        except UnicodeDecodeError as error:
            if length < MAX_STRING or error.end < length:  # a long one may be cut within a sign
                return True
        at += length
    return at != len(table)


def nameless(events: Iterable[Event]) -> bool:
    """Whether an event names a string that is not in the table, which it is before the event is written."""
    return any(text[:1] == "?" and text[1:].isdigit() for event in events for text in (event.text, event.site))


def told(cut_off: str, slots: int, torn: int, names: bool) -> str:
    """The damage in words, "" for none. slots: foreign ones. torn: events lost between others. names: see `garbled`."""
    found = [cut_off] if cut_off else []
    if slots:
        found.append(f"{slots} of its slots hold{'s' * (slots == 1)} no event")
    if torn > AT_ONCE:
        found.append(f"{torn} of its events are lost")
    if names:
        found.append("its table of names is damaged")
    return ", ".join(found)
