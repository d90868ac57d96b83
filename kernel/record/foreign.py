"""What the strings of a ring say that `turnstile.record.install` writes: groups, threads, calls and graphs as JSON.

They are interned, so whatever repeats costs an id. Writer (`kernel.comm.tap`) and reader (`verify.readers.installed`)
share nothing else. Ranks are global ranks everywhere.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROGRAM: Final = "installed"
"""`meta["program"]` of such a ring."""
GROUP: Final = "group "
THREAD: Final = "thread "
EDGES: Final = "the program orders streams by events, which is not recorded"
"""A MARK: queues may be tied in ways that the record does not show."""
LEAVES: Final = "sys.exit: "
"""How a decision begins by which the main thread leaves with another exit code than 0; the code or message follows."""
OVER: Final = "this thread has ended"
"""A MARK of a thread, its last event: it makes no further call."""
UNINSTALLED: Final = "the program has ended its record"
"""A MARK, the last event: its process goes on, and what it does is not recorded any more."""
BROKEN: Final = "could not be recorded: "
"""A MARK: so many calls may be missing."""
REFUSED: Final = "refused: "
"""How the text of a CALL_DONE begins if the backend refused the arguments before it sent anything, and the exception
follows: nobody meets this call. Its number is free again, and calls of its channel noted since have one less.
"""
NEW_GROUPS: Final = "new groups"
"""The name under which all ranks count the groups that they make together."""
LONGEST_MEMBERS: Final = 160
"""Letters of a list of members: the table of strings is small."""
HOST_MEDIA: Final = frozenset({"gloo", "mpi", "host", "ucc", "fake"})
"""Backends whose calls are over when their Work is, without a device."""


class Call(NamedTuple):
    """One call. op: all_reduce, send, ... via: the function that the program called, where it has another name.

    dtype: as torch prints it, without `torch.`. root: of a rooted collective. peer: of a send or recv, -1 for a recv
    from anybody, None else. tag: of a send or recv, the members of a group that is made (`members_text`), or what else
    must agree. reduce: SUM, ... ins, outs: how many tensors, alike unless INPUTS or OUTPUTS say otherwise. stream: of
    the device, at the time of the call; "" on hosts. asynchronous: on a queue of its own, which nothing waits for by
    itself. medium: the backend.
    """

    op: str
    via: str = ""
    dtype: str = ""
    root: int | None = None
    peer: int | None = None
    tag: str = ""
    reduce: str = ""
    ins: int = 0
    outs: int = 0
    stream: str = ""
    asynchronous: bool = False
    medium: str = ""

    def text(self) -> str:
        """As a string of the ring."""
        return json.dumps(list(self), separators=(",", ":"))


class Group(NamedTuple):
    """A communicator. ranks: in group order, None where unknown. base: calls before the record began, by its own count.

    certain: whether base counts collectives only, so that ranks can be compared where theirs differ.
    """

    number: int
    name: str
    ranks: tuple[int, ...] | None
    backend: str = ""
    base: int = 0
    certain: bool = True

    def text(self) -> str:
        """As a string of the ring."""
        ranks = None if self.ranks is None else list(self.ranks)
        return GROUP + json.dumps([*self[:2], ranks, *self[3:]], separators=(",", ":"))


class Captured(NamedTuple):
    """One call of a graph. elements: in and out. call: id of its text. branch: 0 for the stream of the capture."""

    group: int
    call: int
    taken: int
    given: int
    branch: int = 0


def thread_text(number: int, name: str) -> str:
    """The name of thread `number`."""
    return THREAD + json.dumps([number, name])


def graph_text(calls: Iterable[Captured]) -> str:
    """The calls of a graph, in order."""
    return json.dumps([list(call) for call in calls], separators=(",", ":"))


def call_of(text: str) -> Call | None:
    """The call that a string says; None for any other text."""
    found = _list(text, len(Call._fields))
    if found is None or not isinstance(found[0], str):
        return None
    kinds = (str, str, str, int | None, int | None, str, str, int, int, str, bool, str)
    if not all(isinstance(value, kind) for value, kind in zip(found, kinds, strict=True)):
        return None
    call = Call(*found)
    return call if 0 <= call.ins <= 1 << 16 and 0 <= call.outs <= 1 << 16 else None


def groups_of(strings: Sequence[str]) -> dict[int, Group]:
    """The groups of a table, by number."""
    groups = {}
    for text in strings:
        found = _list(text.removeprefix(GROUP), 6) if text.startswith(GROUP) else None
        if found is None:
            continue
        number, name, ranks, backend, base, certain = found
        whole = isinstance(number, int) and isinstance(name, str) and isinstance(backend, str) and isinstance(base, int)
        if not whole or not (ranks is None or (isinstance(ranks, list) and all(isinstance(r, int) for r in ranks))):
            continue
        groups[number] = Group(number, name, None if ranks is None else tuple(ranks), backend, base, bool(certain))
    return groups


def members_text(ranks: Sequence[int]) -> str:
    """Who is to be in a group that is made, in its order, as short as it goes: `0,1`, `0-7`, `0-56:8,63`."""
    parts: list[str] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 0
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at > 2:
            parts.append(f"{ranks[at]}-{ranks[end - 1]}" + (f":{step}" if step > 1 else ""))
            at = end
        else:
            parts.append(str(ranks[at]))
            at += 1
    text = ",".join(parts)
    if len(text) <= LONGEST_MEMBERS:
        return text
    return f"{len(ranks)} ranks, #{zlib.crc32(repr(list(ranks)).encode()):08x}"


def members_of(text: str) -> tuple[int, ...] | None:
    """The ranks that `members_text` tells; None where they were too many to be told, or the text is another one."""
    found: list[int] = []
    for part in text.split(","):
        told = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", part)
        if told is None:
            return None
        first, step = int(told[1]), int(told[3] or 1)
        found += range(first, int(told[2] or first) + 1, max(1, step))
        if len(found) > 1 << 20:
            return None
    return tuple(found)


def threads_of(strings: Sequence[str]) -> dict[int, str]:
    """The names of threads, by number."""
    found = [_list(text.removeprefix(THREAD), 2) for text in strings if text.startswith(THREAD)]
    return {each[0]: str(each[1]) for each in found if each is not None and isinstance(each[0], int)}


def captured_of(text: str) -> list[Captured] | None:
    """The calls of a graph; None where its text was cut or is none."""
    try:
        found = json.loads(text)
        calls = [Captured(*each) for each in found]
    except (ValueError, TypeError, RecursionError):
        return None
    return calls if all(isinstance(value, int) and value >= 0 for call in calls for value in call) else None


def _list(text: str, length: int) -> list[Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and len(found) == length else None
