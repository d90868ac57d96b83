"""Several Flight Recorder dumps of one job: whose they are, who belongs to a group, which transfers meet.

A dump holds no rank, on gloo no members, and numbers transfers by a counter of its own process. So:

* The rank stands in the file's name; the groups of the dump (a process lists only its own) say which number it is.
* Members that no dump lists are inferred: the ranks whose dumps hold a call of that group.
* The n-th send to a rank meets its n-th recv. Where the dumps hold everything since the start they are counted; in a
  group of two, one counter serves both ends; otherwise the unfinished ones are paired by their order, their arguments
  are not compared, and this is said.
* A rank without a call in a group has not called it if its dump is whole, or if its status says so; otherwise it is
  `unsure`: its ring may have lost the call, or it dumped unfinished calls only.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kernel.errors import UsageError
from verify.events import Communicator, Confidence, Event, Kind, State
from verify.readers.found import Found
from verify.readers.membership import Group, damaged, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.readers.flight_recorder import Dump, Entry
    from verify.readers.membership import Name

BLIND = "graph replays, DeepEP and NVSHMEM calls, host waits and streams are not in Flight Recorder dumps"
"""What no dump can tell."""

Numbers = dict[int, int]
"""Place of an entry in its dump -> number of the transfer, from 0."""


class Mine(NamedTuple):
    """A dump whose rank is known."""

    rank: int
    dump: Dump


def together(dumps: Sequence[Dump]) -> Found:
    """What the dumps of a job say. Raises UsageError where a rank cannot be told."""
    mine, unknown = _whose(dumps)
    job = _Job(mine)
    events = [event for each in mine for event in job.events(each)]
    unknown += job.unknown
    versions = sorted({each.dump.version for each in mine})
    if len(versions) > 1:
        unknown.append(f"dumps of several versions ({', '.join(versions)}): one job should have one")
    if odd := sorted({name for each in mine for name in each.dump.odd}):
        unknown.append(damaged(odd))
    moved = max((entry.moved_ns for each in mine for entry in each.dump.entries), default=0)
    present = frozenset(each.rank for each in mine)
    expected = present.union(*(group.members for group in job.groups.values() if group not in job.disputed))
    places = sorted({str(each.dump.path.parent) for each in mine})
    source = f"{len(mine)} Flight Recorder dump{'s' if len(mine) > 1 else ''} in {', '.join(places[:3])}"
    doubt = "the dumps contradict each other on who belongs to a group" if job.disputed or job.outside else ""
    return Found(
        source, tuple(events), present, expected, (), (*unknown, BLIND), moved or None, frozenset(job.unsure),
        doubt=doubt,
    )  # fmt: skip


def _whose(dumps: Sequence[Dump]) -> tuple[list[Mine], list[str]]:
    """The dumps in the order of their ranks; of several of one rank, the one that saw the latest call."""
    ways = []
    for dump in dumps:
        own = [set(members) for members in dump.groups.values() if members]
        possible = set.intersection(*own) if own else set()
        stem = re.sub(r"\.(?:pickle|pkl|json|bin|dump|trace|txt|\d{14,})$", "", dump.path.name)
        numbers = [int(each) for each in re.findall(r"\d{1,9}", stem)]
        marked = [int(each) for each in re.findall(r"rank[ _=.-]?(\d{1,9})(?![.\d])", stem, re.IGNORECASE)]
        named = [*numbers[-1:], *marked, *reversed(numbers)]
        if dump.rank is not None:
            named = [dump.rank]
        if possible:
            named = [each for each in named if each in possible] or (sorted(possible) if len(possible) == 1 else [])
        ways.append(named)
    found: dict[int, list[Dump]] = defaultdict(list)
    for dump, named in zip(dumps, ways, strict=True):
        if not named:
            raise UsageError(f"{dump.path}: cannot tell its rank: end the file's name with it, as in dump_rank_3")
        mine = found[named[0]]
        # A copy of a dump tells the same once.
        if not any(replace(dump, path=other.path) == other for other in mine):
            mine.append(dump)
    unknown: list[str] = []
    newest: dict[int, Dump] = {}
    for rank, mine in sorted(found.items()):
        *others, newest[rank] = sorted(mine, key=_age)
        if others:
            names = ", ".join(dump.path.name for dump in others[:3]) + f" and {len(others) - 3} more" * (
                len(others) > 3
            )
            unknown.append(
                f"{len(mine)} dumps of rank {rank}: {newest[rank].path.name}, which saw the latest call, is used,"
                f" without {names}"
            )
    return [Mine(rank, newest[rank]) for rank in newest], unknown


def _age(dump: Dump) -> tuple[int, int, str]:
    last = max((entry.moved_ns for entry in dump.entries), default=0)
    return last, len(dump.entries), str(dump.path)


class _Job:
    """The dumps of all ranks, with groups and the numbers of transfers resolved."""

    def __init__(self, mine: Sequence[Mine]) -> None:
        self.mine = mine
        self.unknown: list[str] = []
        self.unsure: set[tuple[int, str]] = set()
        known = resolve(
            {rank: dump.groups for rank, dump in mine},
            {rank: {entry.group for entry in dump.entries} for rank, dump in mine},
        )
        self.groups, self.disputed = known.groups, known.disputed
        self.unknown += known.unknown
        self.labels = self._labels()
        self.entries: dict[Group, dict[int, list[tuple[int, Entry]]]] = defaultdict(lambda: defaultdict(list))
        for rank, dump in mine:
            for place, entry in enumerate(dump.entries):
                if (rank, entry.group) in known.outside:
                    continue
                self.entries[self.groups[rank, entry.group]][rank].append((place, entry))
        self.status = {group: self._counters(group) for group in self.entries}
        self.numbers: dict[int, Numbers] = defaultdict(dict)
        self.loose: dict[int, set[int]] = defaultdict(set)
        """Transfers whose pairing was inferred: their arguments are not compared."""
        self._pair()
        self._doubt()
        self.outside = known.outside

    def _labels(self) -> dict[Group, str]:
        """What people call each group: its description, with its name where several share one."""
        groups = set(self.groups.values())
        names: dict[str, set[Name]] = defaultdict(set)
        for group in groups:
            names[group.name[1] or group.name[0]].add(group.name)
        return {
            group: label if len(names[label := group.name[1] or group.name[0]]) == 1 else f"{label} {group.name[0]}"
            for group in groups
        }

    def _counters(self, group: Group) -> dict[int, tuple[int, int]]:
        """Rank -> last enqueued and completed number of `group`, where the dump's counters are known to count it.

        The counter of a group is that of its last call, be it a collective or a transfer; the identifiers are the
        process's own. Both are only trusted where every dump with a call in the group confirms them.
        """
        kinds = {entry.transfer for each in self.entries[group].values() for _, entry in each}
        if len(kinds) != 1:
            return {}
        found: dict[int, tuple[int, int]] = {}
        for rank, dump in self.mine:
            if rank not in group.members:
                continue
            ids = {entry.group: entry.pg_id for entry in dump.entries if entry.pg_id is not None}
            number = ids[group.name] if group.name in ids else _in_order(dump, ids).get(group.name)
            if number is not None and number in dump.status:
                found[rank] = dump.status[number]
            mine = self.entries[group].get(rank)
            if mine and (rank not in found or found[rank][0] != max(entry.seq for _, entry in mine)):
                return {}
        return found

    def _pair(self) -> None:
        channels: dict[tuple[Group, int, int], dict[int, list[tuple[int, Entry]]]] = defaultdict(dict)
        for group, ranks in self.entries.items():
            for rank, mine in ranks.items():
                for place, entry in mine:
                    if entry.ends is None or max(entry.ends) >= len(group.members):
                        continue
                    source, target = (group.members[end] for end in entry.ends)
                    if rank in (source, target) and source != target:
                        channels[group, source, target].setdefault(rank, []).append((place, entry))
        whole = {rank for rank, dump in self.mine if dump.whole}
        guessed: set[tuple[int, int]] = set()
        for (group, source, target), sides in channels.items():
            if whole.issuperset(sides):
                self._number(sides, dict.fromkeys(sides, 0))
            elif len(group.members) == 2 and _one_counter(self.entries[group], sides):
                for rank, mine in sides.items():
                    self.numbers[rank] |= {place: entry.seq - 1 for place, entry in mine}
            else:
                heads = {rank: _head(mine) for rank, mine in sides.items()}
                self._number(sides, {rank: max(heads.values()) - head for rank, head in heads.items()})
                for rank, mine in sides.items():
                    self.loose[rank] |= {place for place, _ in mine}
                if len(sides) == 2:
                    guessed.add((source, target))
        if guessed:
            one, other = min(guessed)
            self.unknown.append(
                f"numbers of transfers (rank {one} to {other}{f', {len(guessed) - 1} more' * (len(guessed) > 1)}): "
                "the dumps lack the first ones, so the unfinished ones are paired in their order"
            )

    def _number(self, sides: dict[int, list[tuple[int, Entry]]], first: dict[int, int]) -> None:
        for rank, mine in sides.items():
            self.numbers[rank] |= {place: first[rank] + n for n, (place, _) in enumerate(mine)}

    def _doubt(self) -> None:
        """Note the groups in which others have calls, and of which a dump may have lost all of its own."""
        for group, ranks in self.entries.items():
            if group in self.disputed:
                self.unsure |= {(rank, self.labels[group]) for rank in group.members}
            kinds = {entry.transfer for mine in ranks.values() for _, entry in mine}
            for rank, dump in self.mine:
                used = {entry.transfer for _, entry in ranks.get(rank, ())}
                if rank in group.members and not dump.whole and rank not in self.status[group] and kinds - used:
                    self.unsure.add((rank, self.labels[group]))

    def events(self, mine: Mine) -> Iterable[Event]:
        """The calls of one rank in its order; first those that only its status tells."""
        rank, dump = mine
        for group, ranks in self.entries.items():
            if group in self.disputed:
                yield from self._head(rank, group)
            elif rank in self.status[group] and rank not in ranks:
                enqueued, completed = self.status[group][rank]
                transfers = any(entry.transfer for each in ranks.values() for _, entry in each)
                if enqueued > 0 and not transfers:
                    state = State.COMPLETED if completed >= enqueued else State.SCHEDULED
                    yield Event(
                        rank, Kind.COLLECTIVE, communicator=self._communicator(group), sequence=enqueued - 1,
                        state=state, confidence=Confidence.INFERRED,
                    )  # fmt: skip
        placed = [each for each in enumerate(dump.entries) if self._believed(rank, each[1])]
        for _, batch in groupby(placed, key=lambda each: (each[1].group, each[1].transfer, each[1].seq)):
            yield from self._call(rank, list(batch))

    def _believed(self, rank: int, entry: Entry) -> bool:
        return (rank, entry.group) not in self.outside and self.groups[rank, entry.group] not in self.disputed

    def _head(self, rank: int, group: Group) -> Iterable[Event]:
        """Of a group whose members are not known: that the rank waits in it, and no more."""
        open_ = [entry for _, entry in self.entries[group].get(rank, ()) if not entry.done]
        if open_:
            yield Event(
                rank, Kind.COLLECTIVE, open_[0].operation, medium=open_[0].backend,
                communicator=self._communicator(group), sequence=0, site=open_[0].site, state=State.SCHEDULED,
                confidence=Confidence.INFERRED,
            )  # fmt: skip

    def _communicator(self, group: Group) -> Communicator:
        return Communicator(group.members, self.labels[group])

    def _call(self, rank: int, batch: list[tuple[int, Entry]]) -> Iterable[Event]:
        """One call: a single entry, or the entries of a coalesced one, of which the last may only end it."""
        first = batch[0][1]
        group = self.groups[rank, first.group]
        calls = [(place, entry) for place, entry in batch if not entry.marker] or batch
        ends = [entry for _, entry in batch if entry.marker]
        done = ends[-1].done if ends else all(entry.done for _, entry in batch)
        state = State.COMPLETED if done else State.SCHEDULED
        if first.transfer:
            parts = [
                part for place, entry in calls if (part := self._transfer(rank, place, entry, group, state)) is not None
            ]
            if len(parts) == 1:
                yield parts[0]
            elif parts:
                yield Event(rank, Kind.GROUP, "G", parts=tuple(parts), site=first.site, state=state)
            return
        yield Event(
            rank, Kind.COLLECTIVE, _joined(entry.operation for _, entry in calls), medium=first.backend,
            communicator=self._communicator(group), sequence=first.seq - 1 if first.seq else 0,
            sizes=_all(entry.inputs for _, entry in calls), outputs=_all(entry.outputs for _, entry in calls),
            dtype="+".join(sorted({entry.dtype for _, entry in calls if entry.dtype})) or None,
            site=first.site, state=state,
        )  # fmt: skip

    def _transfer(self, rank: int, place: int, entry: Entry, group: Group, state: State) -> Event | None:
        number = self.numbers[rank].get(place)
        if entry.ends is None or number is None:
            return None
        source, target = (group.members[end] for end in entry.ends)
        loose = place in self.loose[rank]
        return Event(
            rank, Kind.SEND if rank == source else Kind.RECV, "send" if rank == source else "recv",
            medium=entry.backend, communicator=self._communicator(group), peer=target if rank == source else source,
            sequence=number, sizes=None if loose else _all([entry.inputs]), dtype=None if loose else entry.dtype,
            site=entry.site, state=state, confidence=Confidence.INFERRED if loose else Confidence.OBSERVED,
        )  # fmt: skip


def _in_order(dump: Dump, ids: dict[Name, int]) -> dict[Name, int]:
    """Group -> process-local identifier, by the order of creation that both follow; empty where that does not fit."""
    names = list(dump.groups)
    if len(names) != len(dump.status) or not all(name.isdecimal() for name, _ in names):
        return {}
    found = dict(zip(sorted(names, key=lambda name: int(name[0])), sorted(dump.status), strict=True))
    return found if all(found.get(name) == number for name, number in ids.items()) else {}


def _one_counter(ranks: dict[int, list[tuple[int, Entry]]], sides: dict[int, list[tuple[int, Entry]]]) -> bool:
    """Whether the counters of two ranks agree: what both numbered alike is a send on one and its recv on the other."""
    numbered = [{entry.seq: entry.ends for _, entry in mine if entry.transfer} for mine in ranks.values()]
    transfers = [sum(entry.transfer for _, entry in mine) for mine in ranks.values()]
    single = transfers == [len(each) for each in numbered]
    shared = set(numbered[0]).intersection(*numbered[1:]) if len(numbered) > 1 else set()
    agree = all(len({one[seq] for one in numbered}) == 1 for seq in shared)
    return single and agree and bool(sides)


def _head(mine: Sequence[tuple[int, Entry]]) -> int:
    """Place of the first unfinished one."""
    return next((n for n, (_, entry) in enumerate(mine) if not entry.done), len(mine))


def _joined(operations: Iterable[str]) -> str:
    counted = Counter(operations)
    return " + ".join(name if n == 1 else f"{n} {name}" for name, n in counted.items())


def _all(sizes: Iterable[tuple[int, ...] | None]) -> tuple[tuple[int, ...], ...] | None:
    found: list[tuple[int, ...]] = []
    for each in sizes:
        if each is None:
            return None
        found += [(number,) for number in each]
    return tuple(found)
