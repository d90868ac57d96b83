"""What agents and their collector say to each other: lines of JSON, of a length that is limited, checked when read.

    collector   {"turnstile": 1, "nonce": N}                    greets whoever connects
    agent       {"host": NAME, "agent": A, "nonce": M, "proof": P}     P = HMAC-SHA256(token, "agent" N M NAME)
    collector   {"proof": Q}  or  {"error": TEXT}, and closes   Q = HMAC-SHA256(token, "collector" M N)
    collector   {"look": K}                                     look now
    agent       {"seen": K, "run": ..., "ranks": {...}, ...}    what has changed of its ranks since its last answer

The token itself is never sent. A collector asks for look K + 1 when all answers to K are in, so that every reading of
round K + 1 begins after every reading of round K has ended: no clock of one host is compared with that of another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from verify.events import Communicator, Confidence, Event, Kind, Site, State

if TYPE_CHECKING:
    from pathlib import Path

VERSION: Final = 1
LONGEST: Final = 8 << 20
"""Bytes of a line."""
TEXT: Final = 4096
MEMBERS: Final = 1 << 16
RANKS: Final = 1 << 20
CALLS: Final = 1 << 16
"""Open and remembered calls of a rank."""
DEFAULTS: Final = {
    each.name: each.default for each in fields(Event) if each.default is not MISSING and each.name != "parts"
}


class Malformed(Exception):
    """A message that is none of ours; the text says what is wrong with it."""


# -- the token -------------------------------------------------------------------------------------------------------


def read_token(path: Path, *, make: bool = False) -> bytes:
    """The secret in a file that its owner alone can read. make: write a new one where there is none.

    Raises UsageError, one line.
    """
    try:
        if make:
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                pass
            else:
                with os.fdopen(fd, "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UsageError(f"--token-file {path}: others can read it: `chmod 600 {path}`, or choose another one")
            token = file.read(4096).strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}: copy the one that the collector has made") from None
    if len(token) < 16:
        raise UsageError(f"--token-file {path}: a token has 16 bytes or more: let the collector make one")
    return token


def nonce() -> str:
    """Something that was never said before."""
    return secrets.token_hex(16)


def proof(token: bytes, *said: str) -> str:
    """That whoever says this knows the token."""
    return hmac.new(token, "\n".join(said).encode(), hashlib.sha256).hexdigest()


# -- lines -----------------------------------------------------------------------------------------------------------


def line(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parse(data: bytes) -> dict[str, Any]:
    """A line as it was received. Raises Malformed."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Malformed("a line that is no JSON") from None
    if not isinstance(found, dict):
        raise Malformed("a line that is no object")
    return found


def text(value: Any, what: str) -> str:
    """A string of a usual length. Raises Malformed."""
    if not isinstance(value, str) or len(value) > TEXT:
        raise Malformed(f"{what} is no text of at most {TEXT} characters")
    return value


def whole(value: Any, what: str, least: int = 0, most: int = 1 << 62) -> int:
    """A whole number within bounds. Raises Malformed."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Malformed(f"{what} is no whole number from {least} to {most}")
    return value


def items(value: Any, what: str, most: int) -> list[Any]:
    """A list of at most so many. Raises Malformed."""
    if not isinstance(value, list) or len(value) > most:
        raise Malformed(f"{what} is no list of at most {most}")
    return value


def table(value: Any, what: str, most: int) -> dict[str, Any]:
    """An object of at most so many entries. Raises Malformed."""
    if not isinstance(value, dict) or len(value) > most:
        raise Malformed(f"{what} is no object of at most {most} entries")
    return value


# -- events ----------------------------------------------------------------------------------------------------------


def pack_communicator(one: Communicator) -> list[Any]:
    """Name and members."""
    return [one.name[:TEXT], list(one.members)]


def unpack_communicator(data: Any) -> Communicator:
    """Raises Malformed."""
    name, members = _two(items(data, "a group", 2))
    ranks = tuple(whole(each, "a member", 0, RANKS) for each in items(members, "members", MEMBERS))
    return Communicator(ranks, text(name, "a group's name"))


def pack(event: Event, groups: dict[Communicator, int]) -> dict[str, Any]:
    """What an event holds besides defaults. groups: number of each communicator; new ones are added."""
    found: dict[str, Any] = {"kind": str(event.kind)}
    for name, default in DEFAULTS.items():
        value = getattr(event, name)
        if value == default or name == "parts":
            continue
        if isinstance(value, Communicator):
            value = groups.setdefault(value, len(groups))
        elif isinstance(value, Site):
            value = [value.file[:TEXT], value.line, value.function[:TEXT]]
        elif isinstance(value, str):
            value = str(value)[:TEXT]
        found[name] = value
    if event.parts:
        found["parts"] = [pack(part, groups) for part in event.parts]
    return found


def unpack(data: Any, rank: int, groups: list[Communicator], depth: int = 0) -> Event:
    """An event of `rank`. Raises Malformed."""
    given = table(data, "an event", 64)
    values: dict[str, Any] = {}
    try:
        kind = Kind(text(given.get("kind"), "a kind"))
        for name, value in given.items():
            if name == "kind":
                continue
            if name == "parts":
                if depth:
                    raise Malformed("parts of parts")
                values[name] = tuple(unpack(each, rank, groups, 1) for each in items(value, name, CALLS))
            elif name not in _READ:
                raise Malformed(f"an event with {name[:40]!r}")
            elif name == "communicator":
                values[name] = groups[whole(value, "a group's number", 0, len(groups) - 1)]
            else:
                values[name] = _READ[name](value)
    except ValueError as error:
        raise Malformed(str(error)) from None
    return Event(rank, kind, **values)


def _two(data: list[Any]) -> tuple[Any, Any]:
    if len(data) != 2:
        raise Malformed("not a pair")
    return data[0], data[1]


def _site(value: Any) -> Site:
    parts = items(value, "a site", 3)
    if len(parts) != 3:
        raise Malformed("a site without line or function")
    return Site(text(parts[0], "a file"), whole(parts[1], "a line"), text(parts[2], "a function"))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text(each, "a stream") for each in items(value, "streams", MEMBERS))


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(whole(each, "a size") for each in items(value, "sizes", MEMBERS))


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_numbers(each) for each in items(value, "shapes", MEMBERS))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Malformed("a flag that is neither true nor false")
    return value


def _word(value: Any) -> str:
    return text(value, "a word")


def _number(value: Any) -> int:
    return whole(value, "a number")


_READ: Final = {
    "operation": _word, "thread": _word, "stream": _word, "also": _texts, "medium": _word, "communicator": _number,
    "peer": _number, "sequence": _number, "tag": _word, "sizes": _shapes, "outputs": _shapes, "dtype": _word,
    "root": _number, "splits": _numbers, "blocking": _flag, "streams": _texts, "any_of": _flag, "site": _site,
    "state": State, "confidence": Confidence,
}  # fmt: skip
"""Field of an event -> what reads it; State and Confidence raise ValueError for a word that is none of theirs."""
