"""Pickled dumps without the entries that repeat an earlier one but for their numbers, which are read off the bytes.

A job makes few calls many times, and a pickle writes what repeats of an entry in the same bytes: places in the memo of
its strings, sizes, states. So an entry is compared with those before it, byte for byte, but for where it is kept in the
memo and for the numbers of `FIELDS`; where it is the same, only these are taken, and its bytes are left out. What is
left is a pickle with a few entries of a thousand, to be checked and loaded like any other. This needs the order in
which torch and Python write; of any other pickle nothing is left out, nor where anything refers to what was.

An entry that is left out is made of the very opcodes of one that is loaded: nothing of it needs to be checked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

SMALLEST: Final = 1 << 14
"""Bytes of a pickle that are worth it."""
TRIED: Final = 64
"""Entries of one length that another one is compared with."""
SHAPES: Final = 4096
"""Kinds of entries that are remembered."""
FIELDS: Final = (
    "record_id", "collective_seq_id", "p2p_seq_id", "time_created_ns", "time_discovered_started_ns",
    "time_discovered_completed_ns", "op_id", "duration_ms",
)  # fmt: skip
"""Of an entry, what may differ; all but the last two are read."""
READ: Final = 6

_PUT: Final = rb"(?:q.|r.{4})"
_FIRST: Final = re.compile(
    rb"X\x07\x00\x00\x00entries" + _PUT + rb"?\]" + _PUT + rb"?\(\}(?=" + _PUT + rb"?\()", re.DOTALL
)
_KEY: Final = re.compile(_PUT + rb"?\((?:X(....)|(h.|j....))", re.DOTALL)
_REST: Final = (
    rb"(?:[hK].|[jJ].{4}|M..|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})|G.{8}"
    rb"|[}\])(etuasN\x88\x89\x85\x86\x87])"
)
"""Any opcode of an entry without texts, but for those that keep something in the memo."""
_NUMBER: Final = rb"(?:(K)|(M)|(J)|(\x8a\x08)|(G))"
_WIDTHS: Final = ((1, "B"), (2, "H"), (4, "i"), (8, "q"), (8, "8x"))
"""Of these opcodes: bytes that follow, and how they read; of a float not at all."""
_OPENS: Final = 16
"""Bytes in which the first key of an entry begins."""


class Plan(NamedTuple):
    """Which of the numbers of a row are the record, the collective's and the transfer's sequence numbers, when it was
    made and when its end was seen, where the entry has them as numbers; and which are times.
    """

    record: int | None
    collective: int | None
    transfer: int | None
    created: int | None
    ended: int | None
    times: tuple[int, ...]


class Thin(NamedTuple):
    """data: the pickle of what is left. order: for each entry its place among those left, or that of the one it is
    like. rows: its own numbers, None for one that is left. plans: place of an entry that others are like -> how their
    numbers read. left: how many.
    """

    data: bytes
    order: list[int]
    rows: list[tuple[int, ...] | None]
    plans: dict[int, Plan]
    left: int


class Shape(NamedTuple):
    """What entries have in common that are alike: their bytes under a mask, as one number, and how their own read."""

    mask: int
    same: int
    numbers: Struct
    plan: Plan


Fields = frozenset[tuple[bytes, str]]
Shapes = dict[tuple[Fields, int], list[Shape]]
"""Of several files: opcodes of the fields, and bytes of an entry -> what was found of entries like that."""


def thin(data: bytes, shapes: Shapes) -> Thin | None:
    """The pickle of a dump without what repeats; None where nothing does, or it is written in another way.

    shapes: those of other dumps, of which those of one job have the most in common; what is new is added.
    """
    if len(data) < SMALLEST or data[:2] != b"\x80\x02" or (first := _FIRST.search(data)) is None:
        return None
    start = first.end()
    if (marked := _marked(data, start)) is None:
        return None
    key, names = marked
    opening = b"(" + key
    fields = frozenset(names.items())
    known: defaultdict[int, list[tuple[int, int, int, Struct]]] = defaultdict(list)
    plans: dict[int, Plan] = {}
    if len(shapes) > SHAPES:
        shapes.clear()
    order: list[int] = []
    rows: list[tuple[int, ...] | None] = []
    parts: list[bytes] = []
    left = 0
    # Lists are written in batches of a thousand.
    for batch in re.split(rb"ue\(\}(?=" + _PUT + rb"?" + re.escape(opening) + rb")", data[start:], flags=re.DOTALL):
        pieces = batch.split(b"u}")
        pieces.append(b"")
        kept: list[bytes] = []
        opens = not order or opening in pieces[0][:_OPENS]  # the first one writes its keys out
        for at, piece in enumerate(pieces[:-1], 1):
            this, opens = opens, opening in pieces[at][:_OPENS]
            if this and opens:  # all of an entry, and nothing else
                patterns = known[len(piece)]
                number = int.from_bytes(piece, "little")
                for mask, same, like, numbers in patterns:
                    if number & mask == same:
                        order.append(like)
                        rows.append(numbers.unpack_from(piece))
                        break
                else:
                    kept.append(piece)
                    if len(patterns) < TRIED and (found := _shape(piece, number, names, fields, shapes)) is not None:
                        patterns.append((found.mask, found.same, left, found.numbers))
                        plans[left] = found.plan
                    order.append(left)
                    rows.append(None)
                    left += 1
                continue
            kept.append(piece)
            if this:
                order.append(left)
                rows.append(None)
                left += 1
        parts.append(b"u}".join(kept))
    if left == len(order):
        return None
    return Thin(data[:start] + b"ue(}".join(parts), order, rows, plans, left)


def _marked(data: bytes, start: int) -> tuple[bytes, dict[bytes, str]] | None:
    """How entries after the first one begin: the opcode of their first key; and that of each field, as far as known."""
    begin = _KEY.match(data, start)
    if begin is None:
        return None
    names: dict[bytes, str] = {}
    for name in FIELDS:
        word = b"X" + len(name).to_bytes(4, "little") + name.encode()
        if (at := data.find(word, start)) >= 0 and (get := _get(data, at + len(word))) is not None:
            names[get] = name
    if begin[2] is not None:
        return begin[2], names
    key = _get(data, begin.end() + int.from_bytes(begin[1], "little"))
    return None if key is None or not names else (key, names)


def _get(data: bytes, at: int) -> bytes | None:
    """The opcode that reads from the memo what is kept there at this place."""
    if data[at : at + 1] == b"q":
        return b"h" + data[at + 1 : at + 2]
    return b"j" + data[at + 1 : at + 5] if data[at : at + 1] == b"r" else None


@lru_cache(64)
def _walk(names: frozenset[bytes]) -> re.Pattern[bytes]:
    """Goes from one place of an entry that may differ to the next, opcode by opcode."""
    named = b"|".join(map(re.escape, sorted(names)))
    own = rb"(?:" + named + rb")" + _NUMBER.replace(b"(", b"(?:").replace(b"(?:?:", b"(?:")
    return re.compile(
        rb"(?:(?!" + own + rb")" + _REST + rb")*+(?:(q)|(r)|(" + named + rb")" + _NUMBER + rb"|(\Z))", re.DOTALL
    )


def _shape(piece: bytes, number: int, names: dict[bytes, str], fields: Fields, shapes: Shapes) -> Shape | None:
    """What is like the entry in these bytes, the same as a number; None where it writes a text, which nothing after it
    does again.
    """
    known = shapes.setdefault((fields, len(piece)), [])
    for shape in known:
        if number & shape.mask == shape.same:
            return shape
    if (found := _masked(piece, names, _walk(frozenset(names)))) is None:
        return None
    mask, numbers, plan = found
    shape = Shape(mask, number & mask, numbers, plan)
    if len(known) < TRIED:
        known.append(shape)
    return shape


def _masked(piece: bytes, names: dict[bytes, str], walk: re.Pattern[bytes]) -> tuple[int, Struct, Plan] | None:
    """The bytes that are the same in all entries like this one, and how the others read."""
    mask = bytearray(b"\xff" * len(piece))
    form = ["<"]
    found: dict[str, int] = {}
    place, read = 0, 0
    while (step := walk.match(piece, place)) is not None:
        place = step.end()
        if step.lastindex == 9:
            break
        if step.lastindex in (1, 2):
            width, how = (1, "") if step.lastindex == 1 else (4, "")
        else:
            width, how = _WIDTHS[(step.lastindex or 0) - 4]
            form.append(f"{place - read}x{how}")
            read = place + width
            if how != "8x":
                found[names[step[3]]] = len(found)
        mask[place : place + width] = bytes(width)
        place += width
    if step is None or len(mask) != len(piece):
        return None
    one, two, three, *times = (found.get(name) for name in FIELDS[:READ])
    plan = Plan(one, two, three, times[0], times[2], tuple(time for time in times if time is not None))
    return int.from_bytes(mask, "little"), Struct("".join(form)), plan
