"""What Flight Recorder dumps hold, in little room: calls that repeat are kept once, the rest are columns of numbers.

A job repeats few calls many times. `Call` is what repeats of an entry, `Batch` one call as its program made it (one
entry, or those of a coalesced group), `Column` when one rank made the batches of one group.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from verify.events import Site

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

MEMBERS: Final = 1 << 20
NAMES: Final = {
    "_all_gather_base": "all_gather", "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "_broadcast_oop": "broadcast", "_reduce_oop": "reduce", "all_reduce_barrier": "barrier",
    "allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all", "all_to_all_v_single": "all_to_all",
}  # fmt: skip
"""Names of one operation in several versions and forms; any other name stands for itself."""
KNOWN: Final = frozenset(NAMES.values()) | {
    "broadcast", "reduce", "gather", "scatter", "all_gather_v", "reduce_scatter_v", "send", "recv", "coalesced",
    "monitored_barrier",
}  # fmt: skip
NO_OUTPUT: Final = frozenset({"gather", "scatter", "all_to_all"})
"""Operations whose inputs or outputs differ by right between members."""

Name = tuple[str, str]
"""Name and description of a group."""


@dataclass(frozen=True, slots=True)
class Call:
    """An entry without its numbers and times. ends: group-relative (from, to) of a transfer.

    inputs, outputs: elements of each tensor. done: finished, as far as the recorder tells. odd: a damaged name of an
    operation, in place of one. timeout_ms: after which the watchdog that waits for it gives up, where known.
    """

    group: Name
    backend: str
    operation: str
    ends: tuple[int, int] | None
    transfer: bool
    inputs: tuple[int, ...] | None
    outputs: tuple[int, ...] | None
    dtype: str | None
    done: bool
    site: Site | None
    odd: str | None = None
    timeout_ms: int | None = None

    @property
    def marker(self) -> bool:
        """Whether it only ends a coalesced group."""
        return self.operation == "coalesced" or (self.operation.endswith("_coalesced") and self.operation[0].isupper())


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the program: one entry, or those of a coalesced group, of which the last may only end it.

    inputs, outputs: shapes in elements. calls: the single transfers; empty for collectives. entries: how many it took.
    """

    group: Name
    transfer: bool
    backend: str
    operation: str
    inputs: tuple[tuple[int, ...], ...] | None
    outputs: tuple[tuple[int, ...], ...] | None
    dtype: str | None
    site: Site | None
    done: bool
    calls: tuple[Call, ...]
    entries: int


class Group(NamedTuple):
    """A group as one rank knows it."""

    name: Name
    members: tuple[int, ...]

    def __hash__(self) -> int:
        # Members may be thousands: their ends tell most groups of one name apart.
        return hash((self.name, len(self.members), self.members[:1], self.members[-1:]))


class Column(NamedTuple):
    """What a rank called in one group, in its order, collectives or transfers.

    rows: places among all batches of the rank. seqs: sequence numbers as recorded. kinds: places in `Dump.batches`.
    """

    rows: array[int]
    seqs: array[int]
    kinds: array[int]


class Patience(NamedTuple):
    """How long the open calls of a process may wait. timeout_ms: the longest, 0 where none is known. over: one of them
    has waited for as long as it may, as a later time of the same dump shows. due_ns: when the first of them will have,
    ns since 1970 by its host's clock, 0 where that is not known.
    """

    timeout_ms: int = 0
    over: bool = False
    due_ns: int = 0


NO_CALL_OPEN: Final = Patience()


class Moment(NamedTuple):
    """When a process made a record, ns since 1970 by its host's clock."""

    record: int
    created_ns: int


class Span(NamedTuple):
    """When a process called a collective, and when it saw that it had ended, ns since 1970 by its host's clock. It ends
    nowhere before all members have called it.
    """

    group: Name
    sequence: int
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Dump:
    """What one process recorded. rank: where the dump itself says. groups: (name, description) -> members, if listed.

    status: process-local id -> last enqueued and last completed number. ids: group -> process-local id, as calls tell.
    batches: those of this dump and perhaps of others, each once. columns: (group, whether transfers) -> its calls.
    rows, entries: how many batches and entries. moved_ns: latest time. whole: nothing was dropped since the start.
    odd: names of operations that are damaged; their calls have none. mark: equal for copies of a file. again: groups
    that the process made anew after it had destroyed them -> how often; only the calls since then are here. mixed:
    groups of which a collective says that transfers came before it, seen here or not. patience: of the calls that are
    open. moments: when some records were made, the first and the last among them. spans: of some collectives. threads:
    those that made calls, by what identifies them in their process and, as addresses do, nearly everywhere else.
    """

    path: Path
    rank: int | None
    version: str
    groups: dict[Name, tuple[int, ...]]
    status: dict[int, tuple[int, int]]
    ids: dict[Name, int]
    batches: Sequence[Batch]
    columns: dict[tuple[Name, bool], Column]
    rows: int
    entries: int
    moved_ns: int
    whole: bool
    odd: tuple[str, ...] = ()
    mark: bytes = b""
    again: Mapping[Name, int] = field(default_factory=dict)
    mixed: frozenset[Name] = frozenset()
    patience: Patience = NO_CALL_OPEN
    moments: tuple[Moment, ...] = ()
    spans: tuple[Span, ...] = ()
    threads: frozenset[str] = frozenset()


def batch_of(entries: Sequence[Call]) -> Batch:
    """One batch of the entries of a call, in their order."""
    first = entries[0]
    calls = [entry for entry in entries if not entry.marker] or entries
    ends = [entry for entry in entries if entry.marker]
    done = ends[-1].done if ends else all(entry.done for entry in entries)
    if first.transfer:
        return Batch(
            first.group, True, first.backend, "", None, None, None, first.site, done, tuple(calls), len(entries)
        )  # fmt: skip
    return Batch(
        first.group, False, first.backend, _joined(entry.operation for entry in calls),
        shapes(entry.inputs for entry in calls), shapes(entry.outputs for entry in calls),
        "+".join(sorted({entry.dtype for entry in calls if entry.dtype})) or None, first.site, done, (), len(entries),
    )  # fmt: skip


def _joined(operations: Iterable[str]) -> str:
    counted = Counter(operations)
    return " + ".join(name if n == 1 else f"{n} {name}" for name, n in counted.items())


def shapes(sizes: Iterable[tuple[int, ...] | None]) -> tuple[tuple[int, ...], ...] | None:
    """Elements of several calls as one list of shapes; None where those of one are unknown."""
    found: list[tuple[int, ...]] = []
    for each in sizes:
        if each is None:
            return None
        found += [(number,) for number in each]
    return tuple(found)


def call_of(raw: dict[str, Any], site: Site | None) -> Call:
    """What repeats of an entry. Raises KeyError, TypeError or ValueError where it lacks what tells calls apart."""
    name = raw["profiling_name"]
    if not isinstance(name, str):
        raise TypeError("profiling_name is no text")
    backend, colon, operation = name.partition(":")
    if not colon:
        backend, operation = "", backend
    group = raw["process_group"]
    if not isinstance(group, (list, tuple)) or not 1 <= len(group) <= 2:
        raise TypeError("process_group is not a name and a description")
    ends: tuple[int, int] | None = None
    if found := re.fullmatch(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})", operation, re.ASCII):
        operation, one, other = found[1], int(found[2]), int(found[4])
        ends = (one, other) if operation == "send" else (other, one)
    operation = NAMES.get(text(operation), text(operation))
    odd = operation if _damaged(operation) else None
    state = raw["state"]
    if state not in ("scheduled", "started", "completed"):
        raise ValueError(f"state {state[:20] if isinstance(state, str) else type(state).__name__}")
    retired = raw.get("retired") is True
    done = state == "completed" or (retired and backend == "gloo")
    timeout = 0 if done or retired else number(raw.get("timeout_ms"))
    return Call(
        (text(group[0]), description(group[1] if len(group) > 1 else "")), text(backend),
        operation if odd is None else "", ends, ends is not None or raw.get("is_p2p") is True,
        _elements(raw.get("input_sizes")),
        _elements(raw.get("output_sizes")), _dtype(operation, raw), done, site, odd,
        timeout if timeout > 0 else None,
    )  # fmt: skip


def _damaged(name: str) -> bool:
    """Whether a name cannot be that of an operation, or is a known one with a letter or two changed. A name of another
    length may be one that a later version brings.
    """
    if name in KNOWN or name.endswith("_coalesced"):
        return False
    near = [known for known in KNOWN if len(known) == len(name)]
    close = any(sum(one != other for one, other in zip(name, known, strict=True)) < 3 for known in near)
    return close or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)


def number(value: Any, default: int = 0) -> int:
    """An integer, also where it was written as text; `default` where there is none."""
    if type(value) is int:
        return value
    if isinstance(value, str) and len(value) < 20 and re.fullmatch(r"-?[0-9]+", value):
        return int(value)
    return default


def text(value: Any) -> str:
    """Text that is safe to print, cut."""
    if not isinstance(value, str):
        return ""
    return "".join(sign if sign.isprintable() else "?" for sign in value[:200])


def description(value: Any) -> str:
    """The description of a group, where it has one."""
    found = text(value)
    return "" if found == "undefined" else found


def _elements(sizes: Any) -> tuple[int, ...] | None:
    """Elements of each tensor. The shape itself does not matter to a collective."""
    if not isinstance(sizes, list) or len(sizes) > MEMBERS:
        return None
    found = []
    for shape in sizes:
        if not isinstance(shape, list) or len(shape) > 64:
            return None
        sides = [number(side, -1) for side in shape]
        if any(not 0 <= side < 1 << 48 for side in sides):
            return None
        found.append(prod(sides))
    return tuple(found)


def _dtype(operation: str, raw: dict[str, Any]) -> str | None:
    """Element types: of the inputs, and of the outputs where they are others."""
    sides = []
    for key in ("input_dtypes", "output_dtypes"):
        value = raw.get(key)
        names = {text(each) for each in value} if isinstance(value, list) else {text(value)}
        sides.append("+".join(sorted(names - {""})))
    if operation in NO_OUTPUT:
        return sides[0] or sides[1] or None
    into = f" into {sides[1]}" if sides[1] and sides[1] != sides[0] else ""
    return f"{sides[0]}{into}" if sides[0] else None


def site_of(frame: Any) -> tuple[Site | None, bool]:
    """The call site that a frame of a stack names, if any, and whether it lies outside of torch."""
    if not isinstance(frame, dict) or not (file := text(frame.get("filename"))):
        return None, False
    site = Site(file, number(frame.get("line")), text(frame.get("name")))
    return site, not re.search(r"(^|/)torch/", file)
