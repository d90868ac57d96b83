"""PyTorch Flight Recorder dumps (pickle or JSON, versions 2.4 to 2.10): what one process recorded.

A dump knows its groups and calls, not its rank: `verify.readers.dumps` finds that, and what several dumps say together.
Unknown fields are ignored; a field that is absent or of another type than PyTorch writes is unknown, or the line of an
error where nothing can be read without it.
"""

from __future__ import annotations

import gc
import re
from array import array
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from marshal import dumps as packed
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernel.errors import UsageError
from verify.readers import pickled, plain_json
from verify.readers.calls import (
    MEMBERS,
    Batch,
    Call,
    Column,
    Dump,
    batch_of,
    call_of,
    description,
    number,
    site_of,
    text,
)
from verify.readers.found import Damaged
from verify.readers.moments import When, alike, moments_of, patience_of, spans_of
from verify.readers.repeats import thin

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from verify.events import Site
    from verify.readers.calls import Moment, Name, Patience, Span
    from verify.readers.found import Found
    from verify.readers.repeats import Shapes, Thin

LARGEST: Final = 64 << 20
"""Bytes of a dump: far beyond what the largest ring with stacks takes."""
ENTRIES: Final = 2_000_000
RANKS: Final = 1 << 18
LATEST: Final = 1 << 62
"""Sequence numbers end below it."""
DEEPEST: Final = 128
"""Frames of a stack that are looked at."""
KEPT: Final = 100_000
"""Calls that a decoder remembers."""
FIELDS: Final = itemgetter(
    "profiling_name", "process_group", "state", "is_p2p", "retired", "input_sizes", "output_sizes", "input_dtypes",
    "output_dtypes", "timeout_ms", "record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "time_created_ns",
    "time_discovered_started_ns", "time_discovered_completed_ns",
)  # fmt: skip
"""Of an entry: first ten that repeat, then its numbers and times."""


class _Entries(NamedTuple):
    """The entries of a dump in the order of their records, those of groups that are gone left out. ids: group ->
    process-local identifier. again: groups that were made anew -> how often. mixed, patience and the rest: see `Dump`.
    """

    calls: list[Call]
    seqs: list[int]
    ids: dict[Name, int]
    moved_ns: int
    whole: bool
    again: dict[Name, int]
    odd: tuple[str, ...]
    mixed: frozenset[Name]
    patience: Patience
    moments: tuple[Moment, ...]
    spans: tuple[Span, ...]
    threads: frozenset[str]


def _fields(raw: Any) -> tuple[Any, ...]:
    """The same of an entry that lacks some; raises KeyError or TypeError where it lacks what tells calls apart."""
    if type(raw) is not dict:
        raise TypeError("it is no dictionary")
    get = raw.get
    return (
        raw["profiling_name"], raw["process_group"], raw["state"], get("is_p2p"), get("retired"), get("input_sizes"),
        get("output_sizes"), get("input_dtypes"), get("output_dtypes"), get("timeout_ms"), raw["record_id"],
        get("pg_id"), get("collective_seq_id"), get("p2p_seq_id"), get("time_created_ns"),
        get("time_discovered_started_ns"), get("time_discovered_completed_ns"),
    )  # fmt: skip


def _made_again(calls: Sequence[Call], seqs: Sequence[int], numbers: Sequence[int]) -> tuple[dict[Name, int], set[int]]:
    """Groups that a process destroyed and made anew under the same name, how often, and the places of calls before.

    A process numbers its groups as it makes them: a name whose number grows while its sequence numbers start again
    stands for one group after the other, not for two at a time.
    """
    lives: dict[Name, list[list[int]]] = defaultdict(list)
    last: dict[Name, int] = {}
    for at, (call, own) in enumerate(zip(calls, numbers, strict=True)):
        mine = lives[call.group]
        if own != last.get(call.group):
            mine.append([])
            last[call.group] = own
        mine[-1].append(at)
    again: dict[Name, int] = {}
    gone: set[int] = set()
    for name, mine in lives.items():
        ids = [numbers[life[0]] for life in mine]
        if (
            len(mine) > 1
            and ids == sorted(set(ids))
            and all(seqs[new[0]] <= seqs[old[-1]] for old, new in pairwise(mine))
        ):
            again[name] = len(mine) - 1
            gone.update(at for life in mine[:-1] for at in life)
    return again, gone


def decode(path: Path) -> Dump:
    """The dump in a file. Raises UsageError, one line, for what is damaged, unsafe, too large or no dump."""
    return Decoder().decode(path)


@dataclass
class Decoder:
    """Reads dumps one by one; those of one decoder share their calls, call sites and lists of members."""

    batches: list[Batch] = field(default_factory=list)
    _places: dict[tuple[Call, ...], int] = field(default_factory=dict)
    _calls: dict[tuple[bytes, int], Call] = field(default_factory=dict)
    _sites: dict[Site, Site] = field(default_factory=dict)
    _members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _shapes: Shapes = field(default_factory=dict)

    def decode(self, path: Path) -> Dump:
        """As the function does."""
        with _undisturbed():
            data, mark, repeated = _plain(path, self._shapes)
            if not isinstance(data, dict) or not ({"entries", "pg_config", "pg_status"} & data.keys()):
                raise UsageError(
                    f"{path}: no Flight Recorder dump: it has neither entries nor groups; name another file"
                )
            raw = data.get("entries") or []
            many = 0 if not isinstance(raw, list) else len(raw) if repeated is None else len(repeated.order)
            if not isinstance(raw, list) or many > ENTRIES:
                raise Damaged(f"{path}: damaged: its entries are no list, or more than {ENTRIES:,}; dump it again")
            entries = self._entries(path, raw, repeated)
            columns, rows = self._columns(entries.calls, entries.seqs)
            rank = data.get("rank")
            dump = Dump(
                path, rank if type(rank) is int and 0 <= rank < LATEST else None,
                text(data.get("version")) or "unknown", self._groups(data.get("pg_config")),
                _status(data.get("pg_status")), entries.ids, self.batches, columns, rows, many, entries.moved_ns,
                entries.whole, entries.odd, mark,
                entries.again, entries.mixed, entries.patience, entries.moments, entries.spans, entries.threads,
            )  # fmt: skip
            # Before the collector may run again, which would go through all of it.
            del data, raw
        return dump

    def _entries(self, path: Path, raw: list[Any], repeated: Thin | None) -> _Entries:
        """repeated: where `raw` lacks entries that are like others."""
        if len(self._calls) > KEPT:
            self._calls.clear()
        records: list[int] = []
        calls: list[Call] = []
        seqs: list[int] = []
        ids: dict[Name, Any] = {}
        mixed: set[Name] = set()
        numbers: list[int] = []
        made: list[int] = []
        over: list[int] = []
        threads: set[str] = set()
        moved = 0
        # By identity, while `raw` is alive: entries share their frames.
        known: dict[int, tuple[Site | None, bool]] = {}
        for at, each in enumerate(raw):
            try:
                try:
                    fields = FIELDS(each)
                except (KeyError, TypeError):
                    fields = _fields(each)
                site = self._site(each.get("frames"), known)
                told, (record, pg_id, collective, transfer, created, started, ended) = fields[:10], fields[10:]
                key = packed(told, 4), id(site)
                call = self._calls.get(key)
                if call is None:
                    call = self._calls[key] = call_of(each, site)
                seq = transfer if call.transfer else collective
                if transfer and not call.transfer:
                    mixed.add(call.group)
                if type(seq) is not int:
                    seq = number(seq, -1)
                if not 0 <= seq < LATEST:
                    raise ValueError("no sequence number")
            except (KeyError, TypeError, ValueError) as error:
                what = f"{type(error).__name__} {str(error)[:60]!r}"
                at = at if repeated is None else repeated.order.index(at)
                raise Damaged(f"{path}: entry {at} is damaged ({what}): dump it again, or leave it out") from None
            records.append(record if type(record) is int else number(record))
            calls.append(call)
            seqs.append(seq)
            ids[call.group] = pg_id
            made.append(created if type(created) is int else number(created))
            over.append(ended if type(ended) is int else number(ended))
            if type(thread := each.get("thread_id")) is str:
                threads.add(thread)
            numbers.append(pg_id if type(pg_id) is int else number(pg_id, -1))
            for time in (created, started, ended):
                if time is not None and (time if type(time) is int else (time := number(time))) > moved:
                    moved = time
        distinct, lives = list({id(call): call for call in calls}.values()), set(numbers)
        if repeated is not None:
            records, seqs, latest = _spread(path, repeated, records, calls, seqs)
            moved = max(moved, latest)
            calls = [calls[like] for like in repeated.order]
            numbers = [numbers[like] for like in repeated.order]
        places: Sequence[int] = range(len(records))
        if any(map(int.__gt__, records, records[1:])):
            order = sorted(range(len(records)), key=records.__getitem__)
            calls, seqs = [calls[at] for at in order], [seqs[at] for at in order]
            records, places = [records[at] for at in order], order
            numbers = [numbers[at] for at in order]
        when = When(places, made, over, repeated)
        patience = patience_of([call for call in distinct if call.timeout_ms is not None], calls, seqs, when, moved)
        spans = spans_of(calls, seqs, when)
        again: dict[Name, int] = {}
        if len({number(each, -1) for each in ids.values()}) < len(lives):
            again, gone = _made_again(calls, seqs, numbers)
            calls = [call for at, call in enumerate(calls) if at not in gone]
            seqs = [seq for at, seq in enumerate(seqs) if at not in gone]
        whole = bool(records) and min(records) == 0 and max(records) == len(records) - 1
        return _Entries(
            calls, seqs, {name: at for name, each in ids.items() if (at := number(each, -1)) >= 0}, moved, whole, again,
            tuple(dict.fromkeys(call.odd for call in distinct if call.odd is not None)), frozenset(mixed),
            patience, moments_of(records, when), tuple(span for span in spans if span.group not in again),
            frozenset(map(text, threads)),
        )  # fmt: skip

    def _site(self, frames: Any, known: dict[int, tuple[Site | None, bool]]) -> Site | None:
        """The innermost frame outside of torch, else the innermost."""
        if not frames or type(frames) is not list:
            return None
        inner: Site | None = None
        for frame in frames if len(frames) <= DEEPEST else frames[:DEEPEST]:
            if (told := known.get(id(frame))) is None:
                site, own = site_of(frame)
                told = known[id(frame)] = self._sites.setdefault(site, site) if site is not None else None, own
            if told[1]:
                return told[0]
            inner = inner or told[0]
        return inner

    def _columns(self, calls: list[Call], seqs: list[int]) -> tuple[dict[tuple[Name, bool], Column], int]:
        """The batches of each group in their order, and how many there are."""
        columns: dict[tuple[Name, bool], Column] = {}
        mine: dict[int, tuple[Column, int]] = {}
        row, last = -1, -1
        kinds = array("I")
        before: Call | None = None
        joined: list[Call] = []
        for call, seq in zip(calls, seqs, strict=True):
            if seq == last and before is not None and alike(call, before):
                # It joins the batch before it, which is looked up once it is whole.
                if not joined:
                    joined.append(before)
                joined.append(call)
                continue
            if joined:
                kinds[-1] = self._kind(tuple(joined))
                joined = []
            row += 1
            last, before = seq, call
            if (known := mine.get(id(call))) is None:
                column = columns.setdefault((call.group, call.transfer), Column(array("I"), array("q"), array("I")))
                known = mine[id(call)] = column, self._kind((call,))
            (rows, numbers, kinds), kind = known
            rows.append(row)
            numbers.append(seq)
            kinds.append(kind)
        if joined:
            kinds[-1] = self._kind(tuple(joined))
        return columns, row + 1

    def _kind(self, entries: tuple[Call, ...]) -> int:
        """The place of a batch."""
        if (kind := self._places.get(entries)) is None:
            kind = self._places[entries] = len(self.batches)
            self.batches.append(batch_of(entries))
        return kind

    def _groups(self, config: Any) -> dict[Name, tuple[int, ...]]:
        found: dict[Name, tuple[int, ...]] = {}
        for key, each in config.items() if isinstance(config, dict) else ():
            if isinstance(each, dict):
                name = text(each.get("name")) or text(key)
                found[name, description(each.get("desc"))] = self._listed(each.get("ranks"))
        return found

    def _listed(self, members: Any) -> tuple[int, ...]:
        """The members that a list of ranks, or its text, names: none where it is cut short ("0, 1, ...")."""
        if isinstance(members, list):
            members = ",".join(str(each) for each in members[:MEMBERS] if type(each) in (int, str))
        if not isinstance(members, str):
            return ()
        if (known := self._members.get(members)) is None:
            if "..." in members:
                return ()
            known = tuple(sorted({int(n) for n in re.findall(r"[0-9]{1,9}", members[: 10 * MEMBERS])}))
            # More ranks than any job has are no list of members.
            known = self._members[members] = known if len(known) <= RANKS else ()
        return known


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without searches for cycles of references, which a dump does not have and which cost as much as reading it."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _spread(
    path: Path, repeated: Thin, records: list[int], calls: list[Call], seqs: list[int]
) -> tuple[list[int], list[int], int]:
    """Records and sequence numbers of all entries, from those of the ones left; the latest time of the others."""
    plans = {
        like: (plan.record, plan.transfer if calls[like].transfer else plan.collective, plan.times)
        for like, plan in repeated.plans.items()
    }
    all_records: list[int] = []
    all_seqs: list[int] = []
    latest = 0
    for like, row in zip(repeated.order, repeated.rows, strict=True):
        if row is None:
            all_records.append(records[like])
            all_seqs.append(seqs[like])
            continue
        one, other, times = plans[like]
        all_records.append(records[like] if one is None else row[one])
        all_seqs.append(seqs[like] if other is None else row[other])
        for time in times:
            if row[time] > latest:
                latest = row[time]
    if all_seqs and not 0 <= min(all_seqs) <= max(all_seqs) < LATEST:
        raise Damaged(f"{path}: an entry has no sequence number: dump it again, or leave it out")
    return all_records, all_seqs, latest


def _plain(path: Path, shapes: Shapes) -> tuple[Any, bytes, Thin | None]:
    """The data of a file, from a pickle without a class, or from JSON; its mark; and what its entries lack, where those
    that are like others were left out.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            large = size > LARGEST
            # Asking for the largest would cost more than reading a usual one; what is appended meanwhile is left.
            content = b"" if large else file.read(size)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}): name a file that can") from None
    if large:
        raise UsageError(f"{path}: more than {LARGEST >> 20} MiB: no Flight Recorder dump is that large")
    if not content:
        raise Damaged(f"{path}: empty: the dump was not written; dump it again, or leave the file out")
    mark = blake2b(content, digest_size=16).digest()
    if content[:1] == b"\x80":
        if (found := _thin(content, shapes)) is not None:
            return found[0], mark, found[1]
        try:
            return pickled.load(content), mark, None
        except pickled.UnsafePickle as error:
            raise UsageError(f"{path}: unsafe pickle, not loaded: {error}; a Flight Recorder dump never does") from None
        except ValueError as error:
            raise Damaged(f"{path}: damaged pickle ({error}): dump it again, or leave the file out") from None
    try:
        return plain_json.load(content), mark, None
    except ValueError as error:
        raise Damaged(f"{path}: damaged JSON ({str(error)[:80]}): dump it again, or leave the file out") from None


def _thin(content: bytes, shapes: Shapes) -> tuple[Any, Thin] | None:
    """The data of a pickle without entries that are like others, and of these; None where it has to be read whole, as
    what is damaged.
    """
    if (small := thin(content, shapes)) is None:
        return None
    try:
        data = pickled.load(small.data)
    except ValueError:
        return None
    entries = data.get("entries") if isinstance(data, dict) else None
    return (data, small) if isinstance(entries, list) and len(entries) == small.left else None


def _status(status: Any) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for key, each in status.items() if isinstance(status, dict) else ():
        if isinstance(each, dict) and (at := number(key, -1)) >= 0:
            enqueued, completed = each.get("last_enqueued_collective"), each.get("last_completed_collective")
            found[at] = (number(enqueued, -1), number(completed, -1))
    return found


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
        return self.read_sparing(paths, (), [])

    def read_sparing(self, paths: Sequence[Path], spare: Collection[Path], damaged: list[str]) -> Found:
        """The same without the damaged ones of `spare`, with a line for each in `damaged`, if others are left."""
        from verify.readers.dumps import together
        from verify.readers.workers import decode_all

        whole: list[Dump] = []
        lines: list[str] = []
        first: Damaged | None = None
        for path, found in zip(paths, decode_all(paths), strict=True):
            if not isinstance(found, Damaged):
                whole.append(found)
                continue
            if path not in spare:
                raise found
            first = first or found
            lines.append(str(found))
        if first is not None and not whole:
            raise first
        damaged += lines
        return together(whole)


READER = FlightRecorder()
