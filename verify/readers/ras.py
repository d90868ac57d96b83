"""Answers of NCCL's RAS service (`ncclras`, text or `-f json`): how many collectives each rank of each communicator has
launched.

Counts that differ show who is behind, if a second answer repeats them; equal counts show nothing, since a job that is
stuck below the order of calls looks like one that works. RAS knows no order between operations of different kinds, no
communicator's name and no call site. Ranks are those inside a communicator; the largest one tells the global ranks, by
process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from verify.events import Communicator, Confidence, Event, Kind, State
from verify.readers import plain_json
from verify.readers.found import Found, nothing_open
from verify.readers.lines import MOST, SEATS, file_lines, holds, named, unusable, whole_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WHAT: Final = "RAS answer"
DO: Final = "give what `ncclras -v` or `ncclras -f json` printed"
BIGGEST_COMM: Final = 1 << 18
OPERATIONS: Final = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
_ANY: Final = ""
"""The operation where the answer sums over all of them."""
_TABLE = re.compile(r"^\s*(\d{1,6})\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})\s+[A-Z]")
_COMM = re.compile(r"^#(\d{1,6})-(\d{1,9}) \(([0-9a-fA-F]{1,40})\) ([A-Z]+)")
_KIND = re.compile(r"have different (\w{1,30}) operation counts")
_MANY = re.compile(r"^\s*(\d{1,9}) ranks have (?:launched up to operation (\d{1,18})|not launched any operations)")
_ONE = re.compile(r"^\s*Rank (\d{1,9}) has (?:launched up to operation (\d{1,18})|not launched any operations)")
_WHO = re.compile(r"^\s*Rank (\d{1,9}) -- GPU ")
_LOST = re.compile(r"^\s*(?:Process (\d{1,10}) on node (\S{1,255}) managing GPU|Rank (\d{1,9}) -- ).*")


@dataclass
class _Comm:
    """A communicator. counts: rank in it -> operation -> launched. names: rank in it -> (host, pid). dead: ranks."""

    name: str
    size: int
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    names: dict[int, tuple[str, int]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)


class RasReader:
    """See the module."""

    name = "ras"

    def recognises(self, path: Path, head: bytes) -> bool:
        """By the JSON's keys, or the heading of the text's table."""
        if head.lstrip()[:1] == b"{":
            return b'"communicators_count"' in head or (b'"nccl_version"' in head and b'"communicators"' in head)
        return holds(path, head, (b"ranks have launched up to operation", b"Comms     Nodes     Ranks"))

    def read(self, path: Path) -> Found:
        """One answer. Raises UsageError for damaged JSON, or a text without the table of communicators."""
        return self.read_all([path])

    def read_all(self, paths: Sequence[Path]) -> Found:
        """The answers of one job at several moments: the one that counts most is the newest."""
        answers = [_answer(path) for path in paths]
        launched = [sum(sum(each.values()) for comm in comms for each in comm.counts.values()) for comms, _ in answers]
        newest = max(range(len(answers)), key=lambda n: (launched[n], n))
        comms, notes = answers[newest]
        before: list[dict[tuple[str, int], _Comm]] = [
            {(comm.name, comm.size): comm for comm in other}
            for n, (other, _) in enumerate(answers) if n != newest
        ]  # fmt: skip
        return _found(named(paths), comms, notes, before)


READER = RasReader()


def _answer(path: Path) -> tuple[list[_Comm], list[str]]:
    first = next((line for _, line in file_lines(WHAT, path) if line.strip()), "").lstrip()
    return _from_json(path) if first.startswith("{") else _from_text(path)


def _behind(comm: _Comm, before: Sequence[Mapping[tuple[str, int], _Comm]]) -> tuple[set[int], set[int]]:
    """Of the members that launched least, or of all where each launched something else: those that stood there in
    every answer, and those of which that is not known. Both are empty where all of them moved.
    """
    kinds = {kind for each in comm.counts.values() for kind in each}
    least = {kind: min(each.get(kind, 0) for each in comm.counts.values()) for kind in kinds}
    last = {seat for seat, each in comm.counts.items() if all(each.get(kind, 0) == n for kind, n in least.items())}
    last = last or set(comm.counts)
    earlier = [each[comm.name, comm.size] for each in before if (comm.name, comm.size) in each]
    if not before or len(earlier) < len(before):
        return set(), last
    still = {seat for seat in last if all(each.counts.get(seat) == comm.counts[seat] for each in earlier)}
    return still, last - still if still else set()


def _from_json(path: Path) -> tuple[list[_Comm], list[str]]:
    try:
        answer = plain_json.load(whole_file(WHAT, path))
    except ValueError as error:
        raise unusable(WHAT, path, f"damaged JSON ({error})", DO) from None
    listed = answer.get("communicators") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        raise unusable(WHAT, path, "JSON without a list of communicators", DO)
    comms = []
    for each in listed[:MOST]:
        size = _int(each.get("size")) if isinstance(each, dict) else None
        if size is None or not 0 < size <= BIGGEST_COMM:
            raise unusable(WHAT, path, "a communicator without a usable size", DO)
        comm = _Comm(str(each.get("hash", ""))[:80], size)
        for one in _dicts(each.get("ranks")):
            rank = _int(one.get("rank"))
            counts = one.get("collective_counts")
            if rank is None or not 0 <= rank < size:
                raise unusable(WHAT, path, "a rank outside its communicator", DO)
            kinds = counts.items() if isinstance(counts, dict) else ()
            comm.counts[rank] = {str(kind): n for kind, value in kinds if (n := _int(value)) is not None and n >= 0}
            comm.names[rank] = (str(one.get("host")), _int(one.get("pid")) or 0)
        for one in _dicts(each.get("missing_ranks")):
            rank = _int(one.get("rank"))
            if rank is not None and 0 <= rank < size:
                status = one.get("status")
                dead = isinstance(status, dict) and bool(status.get("considered_dead"))
                comm.missing[rank] = "dead" if dead else "unresponsive"
                comm.names[rank] = (str(one.get("host")), _int(one.get("pid")) or 0)
        comms.append(comm)
    return comms, []


def _from_text(path: Path) -> tuple[list[_Comm], list[str]]:
    sizes: dict[int, int] = {}
    comms: list[_Comm] = []
    notes: list[str] = []
    comm: _Comm | None = None
    kind, value, many = _ANY, 0, 0
    unnamed: list[tuple[int, int]] = []

    def end() -> None:
        """Ranks that the text does not name are those of the one count that is left without names."""
        if comm is None:
            return
        rest = set(range(comm.size)) - set(comm.counts)
        left = [(count, value) for count, value in unnamed if count]
        if len(left) == 1 and left[0][0] == len(rest):
            for rank in rest:
                comm.counts[rank] = {kind: left[0][1]}
        elif rest and comm.counts:
            notes.append(f"communicator {comm.name}: who of its ranks is how far is not told: use `ncclras -v`")
            comm.counts.clear()
        elif left:
            notes.append(f"communicator {comm.name}: its ranks differ, and the text names none: use `ncclras -v`")

    for number, (_, line) in enumerate(file_lines(WHAT, path)):
        if number > MOST:
            break
        if row := _TABLE.match(line):
            sizes[int(row[1])] = int(row[5])
        elif head := _COMM.match(line):
            end()
            size = sizes.get(int(head[1]), 0)
            comm, unnamed, kind = None, [], _ANY
            if head[4] == "MISMATCH" and 0 < size <= BIGGEST_COMM:
                comm = _Comm(head[3], size)
                comms.append(comm)
            else:
                notes.append(f"communicator {head[3]}: {head[4]}")
        elif comm is not None and (found := _KIND.search(line)):
            if unnamed or comm.counts:
                # One block tells of several operations: only the first is followed.
                end()
                comm = None
                continue
            kind = found[1] if found[1] in OPERATIONS else _ANY
        elif comm is not None and (found := _MANY.match(line)):
            many, value = int(found[1]), int(found[2] or 0)
            unnamed.append((many, value))
        elif comm is not None and (found := _ONE.match(line)):
            if int(found[1]) < comm.size:
                comm.counts[int(found[1])] = {kind: int(found[2] or 0)}
        elif comm is not None and unnamed and (found := _WHO.match(line)):
            if int(found[1]) < comm.size and unnamed[-1][0]:
                comm.counts[int(found[1])] = {kind: unnamed[-1][1]}
                unnamed[-1] = (unnamed[-1][0] - 1, unnamed[-1][1])
        elif (found := _LOST.match(line)) and found[1]:
            notes.append(f"process {found[1]} on node {found[2]} does not answer")
    end()
    if not sizes:
        raise unusable(WHAT, path, "no table of communicators in it", DO)
    biggest = max(sizes.values())
    if not any(comm.size == biggest for comm in comms) and 0 < biggest <= BIGGEST_COMM:
        comms.append(_Comm("", biggest))
    return comms, notes


def _found(
    source: str, comms: list[_Comm], notes: list[str], before: Sequence[Mapping[tuple[str, int], _Comm]]
) -> Found:
    world = max(comms, key=lambda comm: comm.size, default=None)
    unknown = [f"{source}: {note}" for note in notes[:20]]
    unknown.append(f"{source}: sends, receives and all_to_all are not counted by RAS: who is behind may wait in one")
    if world is None:
        return Found(source, unknown=(*unknown, f"{source}: no communicator in it"))
    global_of = {name: rank for rank, name in world.names.items()}
    events: list[Event] = []
    present: set[int] = set()
    idle: set[int] = set()
    overdue: set[int] = set()
    """Ranks that had waited when the second answer was given, for those that had not moved."""
    equal = seats = 0
    for comm in comms:
        seats += comm.size
        if seats > SEATS:
            unknown.append(f"{source}: communicator {comm.name} and those after it: more members than are looked at")
            break
        ranks = {seat: seat for seat in range(comm.size)}
        if comm is not world and comm.size < world.size:
            ranks = {seat: global_of[name] for seat, name in comm.names.items() if name in global_of}
        if len(set(ranks.values())) != comm.size:
            unknown.append(f"{source}: communicator {comm.name}: which ranks of the job are in it cannot be told")
            continue
        communicator = Communicator(tuple(ranks[seat] for seat in range(comm.size)), comm.name)
        present.update(ranks[seat] for seat in comm.counts)
        mine = _launched(comm, ranks, communicator)
        equal += not mine and bool(comm.counts)
        if mine and not comm.missing:
            still, late = _behind(comm, before)
            if not still and not late:
                unknown.append(f"{source}: communicator {comm.name}: all who were behind moved between the answers")
                continue
            idle.update(ranks[seat] for seat in late)
            overdue.update(ranks[seat] for seat in comm.counts if still)
        events += mine
        for seat, how in sorted(comm.missing.items()):
            unknown.append(f"{source}: communicator {comm.name}: rank {ranks[seat]} is {how}")
            if how == "dead" and not any(event.rank == ranks[seat] and event.kind is Kind.EXIT for event in events):
                events.append(Event(ranks[seat], Kind.EXIT, state=State.COMPLETED, confidence=Confidence.INFERRED))
    if equal or not events:
        unknown.append(
            f"{source}: counts are equal on {equal or len(comms)} communicators, working or stuck below them"
        )
    return Found(
        source,
        # The end of a rank comes after its calls.
        events=tuple(sorted(events, key=lambda event: event.kind is Kind.EXIT)),
        present=frozenset(present),
        expected=frozenset(range(world.size)),
        unknown=tuple(unknown[:64]),
        # A count that was seen once may move on: answers differ by a moment, and a job that works differs as well.
        idle=frozenset(idle),
        overdue=frozenset(overdue),
    )


def _launched(comm: _Comm, ranks: dict[int, int], communicator: Communicator) -> list[Event]:
    """What some ranks have launched beyond what all have: open; nothing where all are equal."""
    kinds = sorted({kind for counts in comm.counts.values() for kind in counts})
    if comm.missing:
        return _may_wait(comm, ranks, communicator)
    common = {kind: min((counts.get(kind, 0) for counts in comm.counts.values()), default=0) for kind in kinds}
    excess = {seat: [k for k in kinds if counts.get(k, 0) > common[k]] for seat, counts in comm.counts.items()}
    if not any(excess.values()):
        return []
    done = sum(common.values())
    events = []
    for seat, counts in sorted(comm.counts.items()):
        more = excess[seat]
        ahead = sum(counts.get(kind, 0) - common[kind] for kind in more)
        # Launches are asynchronous: a rank may be far ahead. Only the first beyond the common ones is known to wait.
        kind = more[0] if more else ""
        if ahead:
            events.append(
                Event(
                    ranks[seat],
                    Kind.COLLECTIVE,
                    OPERATIONS.get(kind, kind or "collective"),
                    medium="nccl",
                    communicator=communicator,
                    sequence=done,
                    state=State.SCHEDULED,
                    confidence=Confidence.OBSERVED if len(more) == 1 else Confidence.INFERRED,
                )
            )
        else:
            events.append(nothing_open(ranks[seat]))
    return events


def _may_wait(comm: _Comm, ranks: dict[int, int], communicator: Communicator) -> list[Event]:
    """Of a communicator of which a member does not answer: whoever launched anything may wait for that member, in the
    last of it.
    """
    events = []
    for seat, counts in sorted(comm.counts.items()):
        kinds = sorted(kind for kind, count in counts.items() if count)
        events.append(
            Event(
                ranks[seat],
                Kind.COLLECTIVE,
                OPERATIONS.get(kinds[0], kinds[0]) if len(kinds) == 1 else "",
                medium="nccl",
                communicator=communicator,
                sequence=sum(counts.values()) - 1,
                state=State.SCHEDULED,
                confidence=Confidence.INFERRED,
            )
            if kinds
            else nothing_open(ranks[seat])
        )
    return events


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
