"""PyTorch Flight Recorder dumps (pickle or JSON, versions 2.4 to 2.10): what one process recorded.

A dump knows its groups and calls, not its rank: `verify.readers.dumps` finds that, and what several dumps say together.
Unknown fields are ignored; a field that is absent or of another type than PyTorch writes is unknown, or the line of an
error where nothing can be read without it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from verify.events import Site
from verify.readers import pickled
from verify.readers.found import Damaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from verify.readers.found import Found

LARGEST: Final = 256 << 20
"""Bytes of a dump: far beyond what the largest ring with stacks takes."""
ENTRIES: Final = 2_000_000
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A call. seq: its number in the group, from 1, of collectives or of transfers. ends: group-relative (from, to).

    inputs, outputs: elements of each tensor. done: finished, as far as the recorder tells.
    """

    record: int
    pg_id: int | None
    group: tuple[str, str]
    seq: int
    backend: str
    operation: str
    ends: tuple[int, int] | None
    transfer: bool
    inputs: tuple[int, ...] | None
    outputs: tuple[int, ...] | None
    dtype: str | None
    done: bool
    created_ns: int
    moved_ns: int
    site: Site | None

    @property
    def marker(self) -> bool:
        """Whether it only ends a coalesced group."""
        return self.operation == "coalesced" or (self.operation.endswith("_coalesced") and self.operation[0].isupper())


@dataclass(frozen=True, slots=True)
class Dump:
    """What one process recorded. rank: where the dump itself says. groups: (name, description) -> members, if listed.

    status: process-local id -> last enqueued and last completed number. whole: nothing was dropped since the start.
    odd: names of operations that are damaged; their calls have none.
    """

    path: Path
    rank: int | None
    version: str
    groups: dict[tuple[str, str], tuple[int, ...]]
    status: dict[int, tuple[int, int]]
    entries: tuple[Entry, ...]
    whole: bool
    odd: tuple[str, ...] = ()


def decode(path: Path) -> Dump:
    """The dump in a file. Raises UsageError, one line, for what is damaged, unsafe, too large or no dump."""
    data = _plain(path)
    if not isinstance(data, dict) or not ({"entries", "pg_config", "pg_status"} & data.keys()):
        raise UsageError(f"{path}: no Flight Recorder dump: it has neither entries nor groups; name another file")
    raw = data.get("entries") or []
    if not isinstance(raw, list) or len(raw) > ENTRIES:
        raise Damaged(f"{path}: damaged: its entries are no list, or more than {ENTRIES:,}; dump it again")
    entries = []
    for number, each in enumerate(raw):
        try:
            entries.append(_entry(each))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__} {str(error)[:60]!r}"
            raise Damaged(f"{path}: entry {number} is damaged ({what}): dump it again, or leave it out") from None
    odd = tuple(dict.fromkeys(entry.operation for entry in entries if _damaged(entry.operation)))
    entries = [replace(entry, operation="") if entry.operation in odd else entry for entry in entries]
    entries.sort(key=lambda entry: entry.record)
    whole = bool(entries) and entries[0].record == 0 and entries[-1].record == len(entries) - 1
    rank = data.get("rank")
    return Dump(
        path, rank if type(rank) is int and rank >= 0 else None, _text(data.get("version")) or "unknown",
        _groups(data.get("pg_config")), _status(data.get("pg_status")), tuple(entries), whole, odd,
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


def _plain(path: Path) -> Any:
    """The data of a file: from a pickle without a class, or from JSON."""
    try:
        with path.open("rb") as file:
            large = path.stat().st_size > LARGEST
            content = b"" if large else file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}): name a file that can") from None
    if large or len(content) > LARGEST:
        raise UsageError(f"{path}: more than {LARGEST >> 20} MiB: no Flight Recorder dump is that large")
    if not content:
        raise Damaged(f"{path}: empty: the dump was not written; dump it again, or leave the file out")
    if content[:1] == b"\x80":
        try:
            return pickled.load(content)
        except pickled.UnsafePickle as error:
            raise UsageError(f"{path}: unsafe pickle, not loaded: {error}; a Flight Recorder dump never does") from None
        except ValueError as error:
            raise Damaged(f"{path}: damaged pickle ({error}): dump it again, or leave the file out") from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Damaged(f"{path}: damaged JSON ({str(error)[:80]}): dump it again, or leave the file out") from None


def _number(value: Any, default: int = 0) -> int:
    """An integer, also where it was written as text; `default` where there is none."""
    if type(value) is int:
        return value
    if isinstance(value, str) and len(value) < 20 and re.fullmatch(r"-?[0-9]+", value):
        return int(value)
    return default


def _text(value: Any) -> str:
    """Text that is safe to print, cut."""
    if not isinstance(value, str):
        return ""
    return "".join(sign if sign.isprintable() else "?" for sign in value[:200])


def _groups(config: Any) -> dict[tuple[str, str], tuple[int, ...]]:
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for key, each in config.items() if isinstance(config, dict) else ():
        if isinstance(each, dict):
            members = each.get("ranks")
            listed = members if isinstance(members, str) else json.dumps(members) if isinstance(members, list) else ""
            numbers = sorted({int(n) for n in re.findall(r"\d{1,9}", listed[: 10 * MEMBERS])})
            name = _text(each.get("name")) or _text(key)
            # A list that is cut short ("0, 1, ...") names no members.
            found[name, _desc(each.get("desc"))] = () if "..." in listed else tuple(numbers)
    return found


def _desc(value: Any) -> str:
    text = _text(value)
    return "" if text == "undefined" else text


def _status(status: Any) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for key, each in status.items() if isinstance(status, dict) else ():
        if isinstance(each, dict) and (number := _number(key, -1)) >= 0:
            enqueued, completed = each.get("last_enqueued_collective"), each.get("last_completed_collective")
            found[number] = (_number(enqueued, -1), _number(completed, -1))
    return found


def _entry(raw: Any) -> Entry:
    """An entry. Raises KeyError, TypeError or ValueError where it lacks what tells calls apart."""
    backend, colon, operation = str(raw["profiling_name"]).partition(":")
    if not colon:
        backend, operation = "", backend
    group = raw["process_group"]
    if not isinstance(group, (list, tuple)) or not 1 <= len(group) <= 2:
        raise TypeError("process_group is not a name and a description")
    name, desc = _text(group[0]), _desc(group[1] if len(group) > 1 else "")
    ends: tuple[int, int] | None = None
    if found := re.fullmatch(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})", operation):
        operation, one, other = found[1], int(found[2]), int(found[4])
        ends = (one, other) if operation == "send" else (other, one)
    operation = NAMES.get(_text(operation), _text(operation))
    transfer = ends is not None or raw.get("is_p2p") is True
    seq = _number(raw["p2p_seq_id" if transfer else "collective_seq_id"], -1)
    if seq < 0:
        raise ValueError("no sequence number")
    state = raw["state"]
    if state not in ("scheduled", "started", "completed"):
        raise ValueError(f"state {str(state)[:20]}")
    done = state == "completed" or (raw.get("retired") is True and backend == "gloo")
    times = [_number(raw.get(f"time_{each}_ns")) for each in ("created", "discovered_started", "discovered_completed")]
    return Entry(
        _number(raw["record_id"]), pg if (pg := _number(raw.get("pg_id"), -1)) >= 0 else None, (name, desc), seq,
        _text(backend), operation, ends, transfer, _elements(raw.get("input_sizes")),
        _elements(raw.get("output_sizes")), _dtype(operation, raw), done, times[0], max(times),
        _site(raw.get("frames")),
    )  # fmt: skip


def _elements(shapes: Any) -> tuple[int, ...] | None:
    """Elements of each tensor. The shape itself does not matter to a collective."""
    if not isinstance(shapes, list) or len(shapes) > MEMBERS:
        return None
    found = []
    for shape in shapes:
        if not isinstance(shape, list) or len(shape) > 64:
            return None
        sides = [_number(side, -1) for side in shape]
        if any(not 0 <= side < 1 << 48 for side in sides):
            return None
        found.append(prod(sides))
    return tuple(found)


def _dtype(operation: str, raw: dict[str, Any]) -> str | None:
    """Element types: of the inputs, and of the outputs where they are others."""
    sides = []
    for key in ("input_dtypes", "output_dtypes"):
        value = raw.get(key)
        names = {_text(each) for each in value} if isinstance(value, list) else {_text(value)}
        sides.append("+".join(sorted(names - {""})))
    if operation in NO_OUTPUT:
        return sides[0] or sides[1] or None
    into = f" into {sides[1]}" if sides[1] and sides[1] != sides[0] else ""
    return f"{sides[0]}{into}" if sides[0] else None


def _site(frames: Any) -> Site | None:
    """The innermost frame outside of torch, else the innermost."""
    first: Site | None = None
    for frame in frames[:128] if isinstance(frames, list) else ():
        if not isinstance(frame, dict) or not (file := _text(frame.get("filename"))):
            continue
        site = Site(file, _number(frame.get("line")), _text(frame.get("name")))
        if not re.search(r"(^|/)torch/", file):
            return site
        first = first or site
    return first


class FlightRecorder:
    """The reader of dumps."""

    name = "flight recorder"

    def recognises(self, path: Path, head: bytes) -> bool:
        """Pickles, and JSON objects that name a dump's keys; a pickle of anything else is an error."""
        if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
            return True
        keys = (b'"pg_config"', b'"pg_status"', b'"comm_lib_version"', b'"nccl_comm_state"', b'"collective_seq_id"')
        return head.lstrip()[:1] == b"{" and any(key in head for key in keys)

    def read(self, path: Path) -> Found:
        """One dump; `read_all` knows more."""
        return self.read_all([path])

    def read_all(self, paths: Sequence[Path]) -> Found:
        """All dumps of a job together: ranks, membership and the numbers of transfers need more than one."""
        from verify.readers.dumps import together

        return together([decode(path) for path in paths])


READER = FlightRecorder()
