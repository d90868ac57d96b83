"""The rings of a run, followed together: what a look finds, as evidence and as facts about each rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kernel.errors import UsageError
from kernel.record import Kind, RingFollower
from verify import runs, words
from verify.live.installed import LiveInstalled, of_live
from verify.live.process import GONE, boot_id, writer_state
from verify.live.ring import LiveRing
from verify.live.threads import See, nothing_hidden, of_processes
from verify.readers.installed import is_installed
from verify.readers.jobs import of_other_jobs
from verify.readers.record import of_rings
from verify.readers.told import CONSEQUENCE
from verify.runs import world_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kernel.record import Look as Step
    from kernel.record import Recording
    from verify.readers.found import Found
    from verify.readers.jobs import Other

KEEP: Final = 4
"""Finished calls of each group that are remembered: members of a group are seldom further apart, and never have to be
(a rank that made a later call of a group is known to have made the earlier ones)."""


class Facts(NamedTuple):
    """What a look tells of one rank besides its calls.

    number: of its newest event that is more than a remark. clear: every event up to that one was read, and every graph
    launch numbered. ended: it has closed its record, or its process is gone, or it raised; failed: not in order.
    gave_up: it left because of another one's end. busy: its device or host may still move, whatever it waits in:
    code of a submission runs between two calls, or several of its tasks wait and not all of them for its device.
    process: what its process does, as /proc says, None where that cannot be seen from here.
    """

    number: int
    clear: bool
    ended: bool
    failed: bool
    gave_up: bool
    busy: bool
    process: str | None = None


@dataclass(frozen=True)
class Look:
    """All ranks, each read at some moment between the beginning and the end of the look.

    whole: something is known of all of them. stale: rings that lie beside theirs and are of another job, a line each:
    nothing of these is in it. idle: None, or the ranks that live, wait for nothing that is recorded and
    will not go on by themselves, where all others wait or have ended (`verify.live.installed`). see: sees what the
    processes of ranks do now; ranks of our own have no thread that their record does not show.
    """

    found: Found
    facts: dict[int, Facts]
    whole: bool = True
    idle: frozenset[int] | None = None
    see: See = nothing_hidden
    stale: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether no rank runs any more, as far as can be seen."""
        return self.whole and all(facts.ended for facts in self.facts.values())


class _Rank:
    """One rank's ring: where it was read to, and what it amounts to."""

    def __init__(self, path: Path) -> None:
        self.follower = RingFollower(path)
        self.ring: LiveRing | LiveInstalled | None = None
        self.step: Step | None = None
        self.number = -1
        self.still = False
        self.process: str | None = None
        self.read_ns = 0

    def look(self, boot: str) -> None:
        """Read on. What the process does is asked first: the ring of one that has ended is read whole after that."""
        self.read_ns = time.monotonic_ns()
        if self.ring is not None:
            self.process = writer_state(self.ring.recording, boot)
        step = self.follower.look()
        recording = step.recording
        if step.fresh or self.ring is None:
            if self.ring is None or not _same(self.ring.recording, recording):
                self.process = writer_state(recording, boot)
            if is_installed(recording):
                self.ring = LiveInstalled(recording)
            else:
                self.ring = LiveRing(recording, world_of([recording]), None, self._runs)
                self.ring.take(recording.events)
        elif isinstance(self.ring, LiveInstalled):
            self.ring.take(recording)
        else:
            self.ring.recording = recording
            self.ring.take(recording.events)
        if isinstance(self.ring, LiveInstalled):
            self.ring.process = self.process
            self.ring.look_idle()
        self.ring.forget(KEEP)
        before = self.number
        self.number = max((e.number for e in recording.events if e.kind is not Kind.MARK), default=self.number)
        self.still = self.number == before
        self.step = step

    def peek(self, boot: str) -> tuple[int, bool, bool]:
        """See `Rings.peek`."""
        assert self.ring is not None
        process = writer_state(self.ring.recording, boot)
        number, closed = self.follower.hold()
        return number, closed, process is not None and process in GONE

    @property
    def runs(self) -> bool | None:
        """Whether its process does; None where that cannot be seen."""
        return None if self.process is None else self.process not in GONE

    def _runs(self, recording: Recording) -> bool | None:
        return self.runs

    def facts(self, gave_up: bool = False) -> Facts:
        """What the newest look told. gave_up: of an installed record, that it left because of another rank."""
        assert self.ring is not None
        ring, recording = self.ring, self.ring.recording
        if isinstance(ring, LiveInstalled):
            return self._installed(ring, gave_up)
        raised = ring.raised.text if ring.raised is not None else ""
        gone = self.process is not None and self.process in GONE
        return Facts(
            number=self.number,
            clear=not (recording.torn or recording.truncated or ring.lost_graphs),
            ended=bool(raised) or recording.closed_ns is not None or gone,
            failed=bool(raised) or (gone and recording.closed_ns is None),
            gave_up=raised.startswith(CONSEQUENCE),
            busy=ring.busy,
            process="" if recording.closed_ns is not None else self.process,
        )

    def _installed(self, ring: LiveInstalled, gave_up: bool) -> Facts:
        closed = ring.recording.closed_ns is not None
        gone = self.process is not None and self.process in GONE
        return Facts(
            number=self.number,
            clear=not ring.lost_graphs,
            ended=ring.ended,
            failed=0 in ring.raised or (gone and not closed),
            gave_up=gave_up,
            # Who moves is asked nothing: what it does is no business of a ring of waits.
            busy=ring.busy or (self.still and ring.waiting and ring.hidden),
            process="" if closed and ring.ended else self.process,
        )


def _same(one: Recording, other: Recording) -> bool:
    return (one.pid, one.monotonic_ns, one.boot) == (other.pid, other.monotonic_ns, other.boot)


class Rings:
    """Follows the rings of a run's directory, and those that appear in it. Its ranks do nothing for it.

    only_new: leave out the rings that are there already: ranks of another time left them.
    """

    def __init__(self, run: Path, *, only_new: bool = False) -> None:
        self.run = run
        self._ranks: dict[int, _Rank] = {}
        self._others: dict[int, Other] = {}
        """Those of another job, by the newest look."""
        self._boot = boot_id()
        self._old = {path: _inode(path) for path in runs.rings(run)} if only_new else {}

    @property
    def read_ns(self) -> dict[int, int]:
        """Monotonic time at which the newest reading of each ring began."""
        return {rank: each.read_ns for rank, each in self._mine.items()}

    @property
    def _mine(self) -> dict[int, _Rank]:
        """The ranks of the job, in order: an earlier one that had more of them left its rings."""
        return {rank: each for rank, each in sorted(self._ranks.items()) if rank not in self._others}

    @property
    def steps(self) -> dict[int, Step]:
        """What the newest look read of each ring."""
        return {rank: each.step for rank, each in self._mine.items() if each.step is not None}

    @property
    def installed(self) -> dict[int, LiveInstalled]:
        """The rings that `turnstile.record.install` left."""
        return {rank: one.ring for rank, one in self._mine.items() if isinstance(one.ring, LiveInstalled)}

    def peek(self) -> dict[int, tuple[int, bool, bool]]:
        """What can be seen at little cost: of each rank the number of its newest event that is more than a remark,
        whether its record is closed, and whether its process is gone. Raises UsageError as `look`.

        What is read is kept for the next look.
        """
        if self._ranks.keys() != {int(path.stem[4:]) for path in self._paths()}:
            self.look()
        return {rank: one.peek(self._boot) for rank, one in sorted(self._ranks.items())}

    def _paths(self) -> list[Path]:
        """The rings to read, by rank."""
        known = {one.follower.path for one in self._ranks.values()}  # one that was taken away is followed to its end
        # A ring takes the place of another while that is still there, and so has another number.
        new = {path for path in runs.rings(self.run) if path not in self._old or self._old[path] != _inode(path)}
        return sorted(known | new, key=lambda each: int(each.stem[4:]))

    def look(self) -> Look:
        """Read on in all rings. Raises UsageError where there is no usable ring, and never was one."""
        trouble: UsageError | None = None
        for path in self._paths():
            rank = int(path.stem[4:])
            try:
                one = self._ranks.get(rank) or _Rank(path)
                one.look(self._boot)
                if one.ring is not None and one.ring.rank != rank:
                    raise UsageError(f"record {str(path)!r}: it says that it is of rank {one.ring.rank}: rename it")
                self._ranks[rank] = one
            except UsageError as error:  # being replaced just now; what was known of it stays
                trouble = error
        if not self._ranks:
            raise trouble or UsageError(f"run {str(self.run)!r}: no rank<k>.ring in it: it has left nothing to see")
        recordings = {rank: one.ring.recording for rank, one in self._ranks.items() if one.ring is not None}
        self._others = of_other_jobs(recordings, lambda each: self._ranks[each.rank].runs)
        stale = tuple(f"{other.line}: not shown" for other in self._others.values())
        look = self._judged(self._mine)
        found = replace(look.found, unknown=(*look.found.unknown, *(f"{self.run.name}: {line}" for line in stale)))
        return replace(look, found=found, stale=stale)

    def _judged(self, ranks: Mapping[int, _Rank]) -> Look:
        """What the rings of one job tell. Raises UsageError where some of them are of a program and some are not."""
        installed = self.installed
        if installed and len(installed) == len(ranks):
            found, gave_up, idle = of_live(installed, self.run.name)
            facts = {rank: one.facts(rank in gave_up) for rank, one in ranks.items()}
            pids = {rank: ring.recording.pid for rank, ring in installed.items() if ring.here}
            return Look(found, facts, idle=idle, see=partial(of_processes, pids))
        if installed:
            ours = sorted(ranks.keys() - installed.keys())
            raise UsageError(
                f"run {str(self.run)!r}: {words.ranks(installed)} installed a record, {words.ranks(ours)} did not: give"
                " the directory of one job"
            )
        rings = {rank: one.ring for rank, one in ranks.items() if isinstance(one.ring, LiveRing)}
        world = world_of(ring.recording for ring in rings.values())
        for ring in rings.values():
            ring.of_world(world)
        return Look(of_rings(rings, self.run.name), {rank: one.facts() for rank, one in ranks.items()})


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
