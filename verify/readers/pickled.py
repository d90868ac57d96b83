"""Pickles of strangers: plain data or nothing. No class is named, nothing is called, memory is bounded by the file.

The bytes are checked before the first of them is interpreted: opcodes that name a class, call something or reach
outside are refused as unsafe, and so are places in the memo beyond the file's own length (a pickle of ten bytes can
take gigabytes otherwise). What remains is loaded by an Unpickler whose `find_class` refuses as well.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, ClassVar, Final, NoReturn

from verify.readers.plain_json import FREE, SHARE, boxes

UNSAFE: Final = {
    0x63: "GLOBAL", 0x52: "REDUCE", 0x62: "BUILD", 0x69: "INST", 0x6F: "OBJ", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX",
    0x93: "STACK_GLOBAL", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x50: "PERSID", 0x51: "BINPERSID",
}  # fmt: skip
"""Opcodes by which a pickle names a class, calls it, or reaches outside."""

FIXED: Final = (
    rb"(?:[hqK].|r..[\x00-%c]\x00|[}\])(etuasN\x88\x89\x85\x86\x87\x94]|[jJ]....|\x8a\x08........|M.."
    rb"|\x80[\x02-\x05]|\x95.{8}|G.{8}"
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x09.{9}))*+"
)
"""A run of opcodes of known length: marks, containers, small numbers, floats, places in the memo; the usual ones first.

`%c` stands for the third byte of the largest place in the memo that the size of the file explains.
"""

TEXT: Final = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x55: 1, 0x54: 4, 0x43: 1, 0x42: 4}
"""Opcodes of text and bytes: how many bytes their length takes."""

MOST_TUPLES: Final = 50_000
"""Beyond twice that, tuples could be nested so deep that the C code that hashes them runs out of stack (8 MiB)."""


BUFFER: Final = 1 << 17


class UnsafePickle(ValueError):
    """It names a class, or would take memory that its size does not explain."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafePickle(f"it names the class {module[:60]}.{name[:60]}")


def check(data: bytes) -> None:
    """Raise UnsafePickle for what may not be loaded, and ValueError for what is no pickle of protocol 2 or later."""
    at, end = 0, len(data)
    # A power of two, so that there are few patterns: `re` keeps those that it compiled.
    third = b"\\x%02x" % min(255, (1 << (end >> 16).bit_length()) - 1)
    fixed = re.compile(FIXED.replace(b"%c", third), re.DOTALL)
    while True:
        if at < end and (found := fixed.match(data, at)) is not None:
            at = found.end()
        if at >= end:
            raise ValueError("it ends too early")
        code = data[at]
        if code == 0x2E:
            return
        if code in UNSAFE:
            raise UnsafePickle(f"it names a class or calls something ({UNSAFE[code]} at byte {at})")
        if code in TEXT:
            start = at + 1 + TEXT[code]
            at = start + int.from_bytes(data[at + 1 : start], "little")
        elif code == 0x72:
            if int.from_bytes(data[at + 1 : at + 5], "little") > end:
                raise UnsafePickle(f"it asks for a place in the memo beyond its own size (byte {at})")
            at += 5
        else:
            raise ValueError(f"byte {at} is no opcode of plain data")


class _Careful(pickle._Unpickler):
    """In Python, and slow: refuses every key that is no text, before it is hashed."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafePickle(f"it names the class {module[:60]}.{name[:60]}")

    def load_setitem(self) -> None:
        if type(self.stack[-2]) is not str:
            raise ValueError("a key is no text")
        pickle._Unpickler.load_setitem(self)  # type: ignore[attr-defined]

    def load_setitems(self) -> None:
        if any(type(key) is not str for key in self.stack[::2]):
            raise ValueError("a key is no text")
        pickle._Unpickler.load_setitems(self)  # type: ignore[attr-defined]

    dispatch[0x73] = load_setitem
    dispatch[0x75] = load_setitems


def load(data: bytes) -> Any:
    """What a pickle holds: dicts, lists, tuples, text, numbers, None. Raises UnsafePickle, or ValueError if damaged."""
    check(data)
    if boxes(data, b"]}t\x85\x86\x87") > FREE + len(data) // SHARE:
        raise UnsafePickle("it is little but empty lists, which take more memory than its size explains")
    tuples = boxes(data, b"t\x85\x86\x87")
    kind = _Unpickler if tuples <= MOST_TUPLES else _Careful
    try:
        # Through a buffer, which can be looked into: without it the C code asks for every opcode by a call.
        return kind(io.BufferedReader(io.BytesIO(data), BUFFER)).load()
    except UnsafePickle:
        raise
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError
    ) as error:  # fmt: skip
        raise ValueError(f"{type(error).__name__}: {str(error)[:80]}") from None
