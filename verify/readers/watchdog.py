"""Lines that PyTorch's NCCL watchdog writes into a job's log, and the exceptions that ranks end with there.

    [rank1]:[E810 ..] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=BROADCAST, ..
    [rank1]:[E810 ..] [PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog at work sequence id: 78
                      PG status: last enqueued work: 79, last completed work: 77
    [rank0]:[E810 ..] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump signal due to a collective timeout from
                      rank 1 and we will .. Last enqueued NCCL work: 77, last completed NCCL work: 77.

`[rank1]:` is the global rank; `Rank 1` is the one inside the group, and tells the global one for the default group
only. The lines do not say who is in a group: its members are taken to be the ranks whose lines name it, all ranks for
the default group.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from verify.events import Communicator, Confidence, Event, Kind, State
from verify.readers.attempts import attempt_in, present_lines, restarted
from verify.readers.found import (
    AFTER,
    GROUP_UNTOLD,
    MEMBERS_UNTOLD,
    PERHAPS_BY_IT,
    UNNAMED_GROUP,
    Found,
    Named,
    nothing_open,
)
from verify.readers.lines import MOST, file_lines, holds, named, rank_in, rank_of_file, unusable
from verify.readers.tracebacks import FEW, FIRST, Tracebacks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

WHAT: Final = "log"
DEFAULT: Final = "default_pg"
LOOKED: Final = 20_000
"""Calls of all members of a group together that are looked at, the first ones."""
UNNAMED: Final = ("", UNNAMED_GROUP)
NEEDLES: Final = (
    b"Watchdog caught collective operation timeout", b"last enqueued", b"Last enqueued", b"last completed"
)  # fmt: skip
TRACEBACK: Final = FIRST.encode()

_TIMEOUT = re.compile(
    r"\[(?:PG [^\]]{0,200}?)?Rank (?P<rank>\d{1,7})\]\s+Watchdog caught collective operation timeout: Work\w{1,20}\("
    r"(?:SeqNum=(?P<seq>\d{1,18}), )?OpType=(?P<op>\w{1,40})"
    r"(?:, NumelIn=(?P<numel>\d{1,18}), NumelOut=\d{1,18})?"
)
# A group without a description is told by its GUID alone; `PG 2` alone would be a number of the process's own.
_PG = (
    r"\[PG (?P<id>ID \d{1,9} PG GUID )?(?P<guid>[^\s(\]]{1,200})(?:\s?\((?P<desc>[^)]{0,200})\)|(?(id)|(?!)))"
    r" Rank (?P<rank>\d{1,7})\]"
)
_STATUS = re.compile(
    _PG + r".{0,200}?(?:(?:work sequence id|at work|NCCL work): (?P<seq>-?\d{1,18}).{0,40}?l"
    r"|(?P<signal>Received a dump signal) due to a collective timeout.{0,200}?L)"
    r"ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)
_OPERATIONS: Final = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
_PAIRS: Final = frozenset({"SEND", "RECV", "COALESCED"})
UNSEEN: Final = "a transfer that cannot be paired"
_TIMED_OUT = re.compile(r"tim(?:ed |e)out", re.IGNORECASE)


class WatchdogReader:
    """See the module."""

    name = "watchdog"

    def recognises(self, path: Path, head: bytes) -> bool:
        """A text file with a watchdog's line anywhere in it, or with the traceback of a rank that is known."""
        if holds(path, head, NEEDLES):
            return True
        if not holds(path, head, (TRACEBACK,)):
            return False
        return any(rank_in(line, path) is not None for _, line in file_lines(WHAT, path, (TRACEBACK,)))

    def belongs(self, path: Path) -> bool:
        """Whether a file is of a job whose watchdogs wrote into others: a rank's log without a line of them says that
        the rank was there.
        """
        return rank_of_file(path) is not None and not holds(path, b"", (b"\0",))

    def read(self, path: Path) -> Found:
        """The lines of one log. Raises UsageError for one without any."""
        return of_logs([path])

    def read_all(self, paths: Sequence[Path]) -> Found:
        """The logs of one job, one a rank as torchrun writes them: who is in a group is known from all of them."""
        return of_logs(paths)


READER = WatchdogReader()


Name = tuple[str, str]
"""Name and description of a group."""
Told = tuple[str, int | None]
"""Operation and elements."""


@dataclass
class _Group:
    """What the lines say of one group. timeouts: (rank, number) -> what timed out. status: last enqueued, completed."""

    timeouts: dict[tuple[int, int], Told] = field(default_factory=dict)
    status: dict[int, tuple[int, int]] = field(default_factory=dict)


def of_logs(paths: Sequence[Path]) -> Found:
    """The lines of the logs of one job together: a rank that is silent in its own log may be the one that did not
    arrive, or whose log is cut.
    """
    lines = _Lines()
    for path in paths:
        lines.take(path)
    lines.traces.settle()
    if not (lines.kept or lines.traces.raised or lines.traces.after or any(map(restarted, paths))):
        raise unusable(WHAT, paths[0], "no line of a watchdog in it", "give the stderr of the ranks")
    return lines.found(named(paths))


def _of_all(name: Name) -> bool:
    """Whether all ranks belong to a group."""
    return DEFAULT in name or name == UNNAMED


class _Lines:
    def __init__(self) -> None:
        self.kept = 0
        self.seen: set[int] = set()
        self.nameless = 0
        self.timeouts: dict[tuple[int, int], set[Told]] = defaultdict(set)
        self.groups: dict[Name, _Group] = defaultdict(_Group)
        self.at: dict[tuple[int, int], set[Name]] = defaultdict(set)
        """(rank, number) that status lines name -> the groups."""
        self.gave_up: set[int] = set()
        """Ranks with a status line that their own watchdog wrote, not as another rank's signal asked for it."""
        self.transfers: set[tuple[int, int]] = set()
        """(rank, number) of sends and receives that timed out."""
        self.traces = Tracebacks()
        self.perhaps_again: set[int] = set()
        """Ranks that may have been started again after the exception by which they left."""

    def take(self, path: Path) -> None:
        """Read one log."""
        self.traces.log()
        before = set(self.traces.raised)
        self._take(path)
        if attempt_in(WHAT, path).silent:
            self.perhaps_again |= self.traces.raised.keys() - before

    def _take(self, path: Path) -> None:
        for _, line in present_lines(WHAT, path):
            if self.kept >= MOST:
                return
            rank = rank_in(line, path)
            if rank is not None:
                self.seen.add(rank)
            if "Watchdog caught" in line and (found := _TIMEOUT.search(line)):
                self.kept += 1
                self._timeout(int(found["rank"]) if rank is None else rank, found, rank is None)
            elif "ast enqueued" in line and (found := _STATUS.search(line)):
                self.kept += 1
                self._status(rank, found)
            elif rank is not None:
                self.kept += self.traces.take(line, rank)

    def _timeout(self, rank: int, found: re.Match[str], inside: bool) -> None:
        self.nameless += inside
        self.seen.add(rank)
        if found["op"] in _PAIRS:
            self.transfers.add((rank, int(found["seq"] or 0)))
            return
        operation = _OPERATIONS.get(found["op"], found["op"].lower())
        numel = int(found["numel"]) if found["numel"] else None
        self.timeouts[rank, int(found["seq"] or 0)].add((operation, numel))

    def _status(self, rank: int | None, found: re.Match[str]) -> None:
        name = (found["guid"], "" if found["desc"] in (None, "undefined") else found["desc"])
        if rank is None:
            self.nameless += name[1] != DEFAULT
            rank = int(found["rank"])
        self.seen.add(rank)
        self.groups[name].status[rank] = (int(found["enqueued"]), int(found["completed"]))
        if found["signal"] is None:
            self.gave_up.add(rank)
        if found["seq"] is not None:
            self.at[rank, int(found["seq"])].add(name)

    def found(self, source: str) -> Found:
        """Everything that the lines say."""
        only = next(iter(self.groups)) if len(self.groups) == 1 else UNNAMED
        unclear = 0
        for (rank, seq), told in self.timeouts.items():
            names = {name for name in self.at.get((rank, seq), {only}) if self._open(name, rank, seq)}
            if len(names) == len(told) == 1:
                self.groups[next(iter(names))].timeouts[rank, seq] = next(iter(told))
            else:
                unclear += len(told)
        events: list[Event] = []
        labels = self._labels()
        # The counter of a group counts its transfers as well, each rank its own: where one timed out, none pair.
        uneven = {name for key in self.transfers for name in self.at.get(key, {only})}
        for name, group in self.groups.items():
            events += [] if name in uneven else self._events(name, labels[name], group)
        events += [
            Event(rank, Kind.WAIT, streams=(UNSEEN,), confidence=Confidence.INFERRED)
            for rank in sorted({rank for rank, _ in self.transfers})
        ]
        events += [
            Event(rank, Kind.EXIT, text, state=State.COMPLETED, confidence=Confidence.OBSERVED, site=site)
            for rank, (text, site) in sorted(self.traces.raised.items())
        ]
        unknown = [
            f"{source}: rank {rank} logged {text}; {PERHAPS_BY_IT}"
            for rank, text in sorted(self.traces.perhaps.items()) if rank not in self.traces.raised
        ]  # fmt: skip
        if self.groups:
            unknown.append(f"{source}: {MEMBERS_UNTOLD}")
        if self.transfers:
            unknown.append(f"{source}: with whom sends and receives pair is not in a watchdog's lines")
        if self.nameless:
            unknown.append(
                f"{source}: {self.nameless} lines tell no global rank; theirs is taken from inside the group"
            )
        if unclear:
            unknown.append(f"{source}: of {unclear} timeouts of equal number it is not told which group they are of")
        if UNNAMED in self.groups:
            unknown.append(f"{source}: {GROUP_UNTOLD}")
        ranks = frozenset(self.seen)
        # A rank whose lines do not speak of a group may have lost them; one that left by an exception waits in none.
        silent = frozenset(
            (rank, labels[name])
            for name, group in self.groups.items()
            for rank in self._members(name, group) - group.status.keys() - {rank for rank, _ in group.timeouts}
            if rank not in self.traces.raised
        )
        return Found(
            source, events=tuple(events), present=ranks, expected=ranks, unknown=tuple(unknown), unsure=silent,
            loose=tuple(
                Named(*name, self._communicator(name, labels[name]), _of_all(name)) for name in self.groups
            ),
            remarks=(
                *((rank, f"{AFTER}{text}") for rank, text in sorted(self.traces.after.items())),
                *dict.fromkeys(self.traces.remarks),
            ),
            undated=frozenset(self.traces.more) | self.perhaps_again,
            traced=frozenset((rank, text) for rank, (text, _) in self.traces.raised.items()),
            overdue=frozenset(self._overdue()),
        )  # fmt: skip

    def _overdue(self) -> Iterator[int]:
        """Ranks whose watchdog, or whose call itself, gave up waiting."""
        yield from (rank for rank, _ in (*self.timeouts, *self.transfers))
        yield from self.gave_up
        # What was caught ended nobody, and who writes on may wait in a later call.
        left = {rank: text for rank, text in self.traces.after.items() if self.traces.wrote_on[rank] <= FEW}
        yield from (rank for rank, text in left.items() if _TIMED_OUT.search(text))

    def _open(self, name: Name, rank: int, seq: int) -> bool:
        """Whether a rank may wait in the call of this number, as far as its status tells."""
        enqueued, completed = self.groups[name].status.get(rank, (seq, seq - 1))
        return completed < seq <= max(enqueued, seq if enqueued < 0 else enqueued)

    def _members(self, name: Name, group: _Group) -> set[int]:
        named = set(group.status) | {rank for rank, _ in group.timeouts}
        return named | self.seen if _of_all(name) else named

    def _communicator(self, name: Name, label: str) -> Communicator:
        return Communicator(tuple(sorted(self._members(name, self.groups[name]))), label)

    def _labels(self) -> dict[Name, str]:
        """What people call each group: its description, with its name where several share one."""
        shared = Counter(desc or name for name, desc in self.groups)
        return {
            (name, desc): label if shared[label := desc or name] == 1 else f"{label} {name}"
            for name, desc in self.groups
        }

    def _events(self, name: Name, label: str, group: _Group) -> list[Event]:
        members = self._members(name, group)
        communicator = self._communicator(name, label)
        operations: dict[int, Told] = {}
        for (_, seq), told in sorted(group.timeouts.items()):
            operations.setdefault(seq, told)
        # A status line alone tells that something is open, not what.
        for enqueued, completed in group.status.values():
            if enqueued > completed >= 0:
                operations.setdefault(completed + 1, ("", None))
        # Of a group that is stuck few calls are told; a product of many with many ranks is no log of a job.
        first = sorted(operations.items())[: max(1, LOOKED // max(1, len(members)))]
        events = []
        for rank in sorted(members):
            enqueued, completed = group.status.get(rank, (-1, -1))
            if not first and enqueued == completed > 0:
                # What is open in other evidence of the group, this rank has not called yet.
                over = Event(rank, Kind.COLLECTIVE, communicator=communicator, sequence=enqueued - 1)
                events.append(replace(over, state=State.COMPLETED, confidence=Confidence.INFERRED))
            for seq, (operation, _) in first:
                own = group.timeouts.get((rank, seq))
                if own is None and enqueued < seq:
                    # A rank whose lines do not speak of the group may have lost them: only the others are known.
                    if rank in group.status:
                        last = enqueued - 1 if enqueued == completed > 0 else None
                        events.append(nothing_open(rank, communicator, last))
                    continue
                events.append(
                    Event(
                        rank,
                        Kind.COLLECTIVE,
                        own[0] if own is not None else operation,
                        medium="nccl",
                        communicator=communicator,
                        # NCCL's process group counts from 1.
                        sequence=max(0, seq - 1),
                        sizes=((own[1],),) if own is not None and own[1] is not None else None,
                        state=State.COMPLETED if own is None and completed >= seq else State.SCHEDULED,
                        confidence=Confidence.OBSERVED if own is not None else Confidence.INFERRED,
                    )
                )
        return events
