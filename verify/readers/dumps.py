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
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kernel.errors import UsageError
from verify import words
from verify.events import Communicator, Confidence, Event, Kind, State
from verify.readers.backends import families, joined
from verify.readers.calls import shapes
from verify.readers.folded import everything, fold
from verify.readers.found import Found, Named
from verify.readers.lives import SECOND, SKEW_S, newest, of_equal
from verify.readers.membership import damaged, resolve
from verify.readers.parted import of_one_job
from verify.readers.transfers import Transfers, ends_of
from verify.readers.whose import by_content

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.readers.backends import Dumps, Family
    from verify.readers.calls import Batch, Column, Dump, Group, Name
    from verify.readers.folded import Kept

BLIND = "graph replays, DeepEP and NVSHMEM calls, host waits and streams are not in Flight Recorder dumps"
"""What no dump can tell."""

MARKED = re.compile(
    r"(?<!local)(?<!local[ _.-])(?<!node)(?<!node[ _.-])rank[ _=.-]?(\d{1,9})(?=of\d|[^A-Za-z\d.]|\.\D|$)",
    re.IGNORECASE,
)
"""A rank in a file's name: not one within a node, nor the beginning of an address (`rank_10.0.0.12_3`)."""


SKEW_NS = int(SKEW_S * SECOND)


class Mine(NamedTuple):
    """A dump whose rank is known."""

    rank: int
    dump: Dump


def together(dumps: Sequence[Dump], whole: bool = False) -> Found:
    """What the dumps of a job say. Raises UsageError where a rank cannot be told.

    Calls that met, agreed and ended are left out where no diagnosis can rest on them (`verify.readers.folded`); the
    events that follow say how many they were. whole: none is left out.
    """
    unknown: list[str] = []
    parts = families(_by_rank(dumps, unknown), unknown)
    found = [_told(part, [] if at else unknown, whole) for at, part in enumerate(parts)]
    return joined(found) if len(found) > 1 else found[0]


def _told(part: Family, unknown: list[str], whole: bool) -> Found:
    """What dumps of one backend say. unknown: lines about what is not known so far."""
    of_one, mixed = of_one_job(newest(part.dumps, unknown), unknown)
    mine = _since_made_anew([Mine(rank, dump) for rank, dump in of_one.items()], unknown)
    job = _Job(mine, part.suffix)
    kept = everything(job.dumps) if whole else fold(job.dumps, job.collectives, job.told, job.transfers)
    events = [event for rank in job.dumps for event in job.events(rank, kept[rank])]
    unknown += job.unknown
    versions = sorted({each.dump.version for each in mine})
    if len(versions) > 1:
        unknown.append(f"dumps of several versions ({', '.join(versions)}): one job should have one")
    if odd := sorted({name for each in mine for name in each.dump.odd}):
        unknown.append(damaged(odd))
    moved = max((each.dump.moved_ns for each in mine), default=0)
    present = frozenset(each.rank for each in mine)
    lists = {id(group.members): group.members for group in job.groups.values() if group not in job.disputed}
    expected = present.union(*lists.values())
    places = sorted({str(each.dump.path.parent) for each in mine})
    source = f"{len(mine)} Flight Recorder dump{'s' if len(mine) > 1 else ''} in {', '.join(places[:3])}"
    doubt = "the dumps contradict each other on who belongs to a group" if job.disputed or job.outside else ""
    return Found(
        source, tuple(events), present, expected, (), (*unknown, BLIND), moved or None, frozenset(job.unsure),
        doubt=doubt,
        named=tuple(
            Named(*group.name, job.communicators[group]) for group in job.communicators if group not in job.disputed
        ),
        overdue=frozenset(each.rank for each in mine if each.dump.patience.over),
        timeout_s=max((each.dump.patience.timeout_ms for each in mine), default=0) / 1000 or None,
        deaf=job.deaf, mixed=mixed, earlier=frozenset(_of_before(mine)), inferred=job.inferred,
    )  # fmt: skip


def _of_before(mine: Sequence[Mine]) -> Iterable[int]:
    """Ranks whose dump, by its newest time and by that of its file, is of before any other rank's open call had waited
    for as long as it may, or tells no time at all. A copy of a file may be younger than the dump, and never older.
    """
    first = sorted((each.dump.patience.due_ns, each.rank) for each in mine if each.dump.patience.due_ns)[:2]
    for rank, dump in mine:
        due = next((ns for ns, other in first if other != rank), 0)
        if not dump.moved_ns:
            yield rank
        elif dump.moved_ns + SKEW_NS < due:
            with suppress(OSError):
                if dump.path.stat().st_mtime_ns + SKEW_NS < due:
                    yield rank


def _by_rank(dumps: Sequence[Dump], unknown: list[str]) -> Dumps:
    """The dumps of each rank; lines in `unknown` about how that was known, and about copies."""
    ways = []
    same: dict[int, frozenset[int]] = {}
    for dump in dumps:
        # By identity: dumps share their lists of members, which may be long.
        lists = {id(each): each for each in dump.groups.values() if each}
        own = [same.get(at) or same.setdefault(at, frozenset(each)) for at, each in lists.items()]
        possible = frozenset.intersection(*sorted(own, key=len)) if own else frozenset()
        stem = re.sub(r"\.(?:pickle|pkl|json|bin|dump|trace|txt|\d{14,})$", "", dump.path.name)
        numbers = [int(each) for each in re.findall(r"(?<!\d)\d{1,9}(?!\d)", stem)]
        marked = [int(each) for each in MARKED.findall(stem)]
        # The number by the word "rank" comes first; where that is a number of something else, the groups tell.
        named = [*marked[-1:], *numbers[-1:], *marked, *reversed(numbers)]
        if dump.rank is not None:
            named = [dump.rank]
        if possible and not possible & set(named):
            if len(possible) > 1 and named:
                what = f"{dump.path}: its name says rank {named[0]}, the groups in it have {words.ranks(possible)} only"
                raise UsageError(f"{what}: name it after its own rank, or leave it out")
            if named:
                told = f"its name says rank {named[0]}, its groups {words.ranks(possible)}, which is believed"
                unknown.append(f"{dump.path.name}: {told}")
            named = sorted(possible) if len(possible) == 1 else []
        ways.append([each for each in named if not possible or each in possible])
    found: dict[int, list[Dump]] = defaultdict(list)
    for dump, named in zip(dumps, ways, strict=True):
        if not named:
            raise UsageError(f"{dump.path}: cannot tell its rank: end the file's name with it, as in dump_rank_3")
        mine = found[named[0]]
        if (equal := next((other for other in mine if dump.mark == other.mark), None)) is None:
            mine.append(dump)
        elif line := of_equal(named[0], equal, dump):
            unknown.append(line)
    return by_content(found, unknown)


def _since_made_anew(mine: Sequence[Mine], unknown: list[str]) -> list[Mine]:
    """The dumps without calls in groups that other ranks have destroyed and made anew since: numbers start again there.

    A dump that holds everything since the start and shows a group less often is of before; of another one this is not
    known.
    """
    often: dict[Name, int] = defaultdict(int)
    for _, dump in mine:
        for name, times in dump.again.items():
            often[name] = max(often[name], times)
    if not often:
        return list(mine)
    names = ", ".join(sorted(described or name for name, described in often)[:4])
    unknown.append(f"{names}: made anew by the ranks during the job; calls of before are left out")
    kept: list[Mine] = []
    for rank, dump in mine:
        old = {name for name, times in often.items() if dump.again.get(name, 0) < times}
        used = {name for name, _ in dump.columns if name in old}
        if used:
            what = ", ".join(sorted(described or name for name, described in used)[:4])
            when = "is of before that" if dump.whole else "may be of before that"
            unknown.append(f"{dump.path.name}: what it shows of {what} {when}")
        if used and dump.whole:
            dump = replace(dump, columns={key: column for key, column in dump.columns.items() if key[0] not in used})
        kept.append(Mine(rank, dump))
    return kept


class _Job:
    """The dumps of all ranks, with groups and the numbers of transfers resolved."""

    def __init__(self, mine: Sequence[Mine], suffix: str = "") -> None:
        self.dumps = dict(mine)
        self._suffix = suffix
        self.unknown: list[str] = []
        self.unsure: set[tuple[int, str]] = set()
        known = resolve(
            {rank: dump.groups for rank, dump in mine},
            {rank: dict.fromkeys(name for name, _ in dump.columns) for rank, dump in mine},
        )
        self.groups, self.disputed, self.outside = known.groups, known.disputed, known.outside
        self.unknown += known.unknown
        self._inferred = known.inferred
        self.labels = self._labels()
        self.communicators = {group: Communicator(group.members, label) for group, label in self.labels.items()}
        self._orders: dict[int, dict[Name, int]] = {}
        self._mixed: set[Group] = set()
        self.used: dict[Group, set[bool]] = defaultdict(set)
        """Which groups have calls: collectives (False), transfers (True)."""
        self.collectives: dict[Group, dict[int, Column]] = defaultdict(dict)
        moved: dict[Group, dict[int, Column]] = defaultdict(dict)
        for rank, dump in mine:
            for (name, transfer), column in dump.columns.items():
                if not self._believed(rank, name):
                    continue
                group = self.groups[rank, name]
                self.used[group].add(transfer)
                if name in dump.mixed:
                    self._mixed.add(group)
                (moved if transfer else self.collectives)[group][rank] = column
        self.transfers = Transfers(self.dumps, moved)
        self.unknown += self.transfers.unknown
        self.told: dict[int, list[tuple[Group, int, State]]] = defaultdict(list)
        """Rank -> groups of which only its status tells a call: which one, and how far that got."""
        for group, kinds in self.used.items():
            self._counted(group, kinds)
        self.unsure |= {(rank, self.labels[group]) for group in self.disputed for rank in group.members}
        self.deaf = self._deaf()

    @property
    def inferred(self) -> frozenset[str]:
        """What people call the groups whose members no dump lists."""
        return frozenset(label for group, label in self.labels.items() if group.name in self._inferred)

    def _deaf(self) -> frozenset[int]:
        """Ranks whose sends and receives no dump would hold: those on gloo, which records collectives only, unless
        these dumps show that it records more.
        """
        found = set()
        for rank, dump in self.dumps.items():
            kinds = {kind for column in dump.columns.values() for kind in set(column.kinds)}
            if any(dump.batches[kind].backend == "gloo" for kind in kinds):
                found.add(rank)
            if any(dump.batches[kind].backend == "gloo" and dump.batches[kind].transfer for kind in kinds):
                return frozenset()
        return frozenset(found)

    def _believed(self, rank: int, name: Name) -> bool:
        """Whether it is known who belongs to a group in which a rank has calls, and that the rank does."""
        return (rank, name) not in self.outside and self.groups[rank, name] not in self.disputed

    def _labels(self) -> dict[Group, str]:
        """What people call each group: its description, with its name where several share one."""
        groups = set(self.groups.values())
        names: dict[str, set[Name]] = defaultdict(set)
        for group in groups:
            names[group.name[1] or group.name[0]].add(group.name)
        return {
            group: (label if len(names[label := group.name[1] or group.name[0]]) == 1 else f"{label} {group.name[0]}")
            + self._suffix
            for group in groups
        }

    def _counted(self, group: Group, kinds: set[bool]) -> None:
        """Note the members of which only a counter tells, and those whose dump may have lost all calls of a kind."""
        status = self._counters(group, kinds)
        for rank in group.members:
            if (dump := self.dumps.get(rank)) is None:
                continue
            own = {
                kind for kind in kinds if (group.name, kind) in dump.columns and self.groups[rank, group.name] == group
            }
            if rank in status and not own:
                enqueued, completed = status[rank]
                if enqueued > 0 and kinds == {False}:
                    state = State.COMPLETED if completed >= enqueued else State.SCHEDULED
                    self.told[rank].append((group, enqueued, state))
            if rank not in status and kinds - own and not dump.whole:
                self.unsure.add((rank, self.labels[group]))

    def _counters(self, group: Group, kinds: set[bool]) -> dict[int, tuple[int, int]]:
        """Rank -> last enqueued and completed number of `group`, where the dump's counters are known to count it.

        The counter of a group is that of its last call, be it a collective or a transfer; the identifiers are the
        process's own. Both are only trusted where every dump with a call in the group confirms them, and none of these
        calls says that the group had transfers too: dumps of open calls alone do not show those.
        """
        if len(kinds) != 1 or group in self._mixed:
            return {}
        (kind,) = kinds
        found: dict[int, tuple[int, int]] = {}
        columns = self.transfers.columns[group] if kind else self.collectives[group]
        for rank in group.members:
            if (dump := self.dumps.get(rank)) is None:
                continue
            ids = dump.ids
            if (number := ids.get(group.name)) is None:
                if rank not in self._orders:
                    self._orders[rank] = _in_order(dump, ids)
                number = self._orders[rank].get(group.name)
            if number is not None and number in dump.status:
                found[rank] = dump.status[number]
            mine = columns.get(rank)
            if mine is not None and (rank not in found or found[rank][0] != max(mine.seqs)):
                return {}
        return found

    def events(self, rank: int, kept: Kept) -> Iterable[Event]:
        """The calls of one rank in its order, of those kept; first those that only its status tells, and where it waits
        in groups whose members are not known."""
        yield from self._disputed(rank)
        for group, enqueued, state in self.told[rank]:
            yield Event(
                rank, Kind.COLLECTIVE, communicator=self.communicators[group], sequence=enqueued - 1, state=state,
                confidence=Confidence.INFERRED,
            )  # fmt: skip
        dump = self.dumps[rank]
        silent = self.transfers.silent.get(rank, set())
        before = 0
        for row, (name, transfer, at) in sorted(kept.items()):
            if row in silent or not self._believed(rank, name):
                continue
            skipped = row - before - sum(before <= each < row for each in silent)
            before = row + 1
            column = dump.columns[name, transfer]
            batch, group = dump.batches[column.kinds[at]], self.groups[rank, name]
            if transfer:
                yield self._transfers(rank, group, batch, at, skipped)
            else:
                seq = column.seqs[at]
                yield Event(
                    rank, Kind.COLLECTIVE, batch.operation, medium=batch.backend,
                    communicator=self.communicators[group], sequence=seq - 1 if seq else 0, sizes=batch.inputs,
                    outputs=batch.outputs, dtype=batch.dtype, site=batch.site,
                    state=State.COMPLETED if batch.done else State.SCHEDULED, skipped=skipped,
                )  # fmt: skip

    def _disputed(self, rank: int) -> Iterable[Event]:
        """Of each group whose members are not known: that the rank waits in it, and no more."""
        dump = self.dumps[rank]
        heads: dict[Group, tuple[int, Batch]] = {}
        for (name, _), column in dump.columns.items() if self.disputed else ():
            if (group := self.groups[rank, name]) in self.disputed:
                open_ = ((row, dump.batches[kind]) for row, kind in zip(column.rows, column.kinds, strict=True))
                first = next(((row, batch) for row, batch in open_ if not batch.done), None)
                if first is not None and (group not in heads or first[0] < heads[group][0]):
                    heads[group] = first
        for group, (_, batch) in heads.items():
            yield Event(
                rank, Kind.COLLECTIVE, batch.operation, medium=batch.backend, communicator=self.communicators[group],
                sequence=0, site=batch.site, state=State.SCHEDULED, confidence=Confidence.INFERRED,
            )  # fmt: skip

    def _transfers(self, rank: int, group: Group, batch: Batch, at: int, skipped: int) -> Event:
        """One call: a transfer, or several that complete together."""
        state = State.COMPLETED if batch.done else State.SCHEDULED
        parts = []
        for part, source, target in ends_of(batch, rank, group):
            number, loose = self.transfers.number(group, source, target, rank, at, part)
            call, sends = batch.calls[part], rank == source
            parts.append(
                Event(
                    rank, Kind.SEND if sends else Kind.RECV, "send" if sends else "recv", medium=call.backend,
                    communicator=self.communicators[group], peer=target if sends else source, sequence=number,
                    sizes=None if loose else shapes([call.inputs]), dtype=None if loose else call.dtype,
                    site=call.site, state=state,
                    confidence=Confidence.INFERRED if loose else Confidence.OBSERVED,
                )
            )  # fmt: skip
        if len(parts) == 1:
            return replace(parts[0], skipped=skipped) if skipped else parts[0]
        return Event(rank, Kind.GROUP, "G", parts=tuple(parts), site=batch.site, state=state, skipped=skipped)


def _in_order(dump: Dump, ids: dict[Name, int]) -> dict[Name, int]:
    """Group -> process-local identifier, by the order of creation that both follow; empty where that does not fit."""
    names = list(dump.groups)
    if len(names) != len(dump.status) or not all(name.isdecimal() for name, _ in names):
        return {}
    found = dict(zip(sorted(names, key=lambda name: int(name[0])), sorted(dump.status), strict=True))
    return found if all(found.get(name) == number for name, number in ids.items()) else {}
