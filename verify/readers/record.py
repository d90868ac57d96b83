"""Our own record: the rings of a run directory, of a run that works, is stuck, has ended or was killed.

What a ring tells                                 what it becomes
    ENQUEUE, and START and FINISH of the same         a collective on its stream. One that is routed stands in P's queue
                                                      as well, and each stands in that of its submission ("D 17")
    GRAPH_LAUNCH                                      the collectives of the graph
    WORK_FINISH of a submission                       its collectives are finished
    EXCHANGE_ENTER without LEAVE                      a blocking collective of all ranks
    HOST_WAIT_ENTER without LEAVE                     a wait for the queue of that submission, or of all of P
    EXCEPTION, close, a process that is gone          the rank has left, by that exception or none

Where the device says when each collective starts (worker threads do), a stream whose next collective has not started
though nothing is before it stands in code between collectives: the rank is then `outside`, in that submission, and the
collective and those behind it count as not called. A rank whose device moved within `patience_s` may simply be
computing, and counts as having called what it has enqueued.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from kernel.record import HOST, Kind, Recording, read, read_run
from kernel.record.foreign import PROGRAM
from kernel.record.layout import MAGIC, ORPHANED
from verify import words
from verify.events import Communicator, Confidence, Event, Site, State
from verify.events import Kind as What
from verify.readers.found import LOOK_AGAIN, Found
from verify.readers.jobs import of_one_job, refuse_two
from verify.readers.killed import LATER, STOPPED, Death, alive, came_after, death, held
from verify.readers.told import CONSEQUENCE, of_others, silent
from verify.runs import has_rings, world_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kernel.record import Event as Entry

RENDEZVOUS: Final = "rendezvous"
"""The communicator of all ranks' exchanges, as in `verify.order.record`."""
KEEP: Final = 20_000
"""Finished collectives of a rank that are kept, the newest ones; unfinished ones always are."""
STILL_NS: Final = 5_000_000_000
"""A rank that is killed after its job has not moved for so long is killed for that."""
IDLE: Final = "inbox"
"""What a rank waits for that has nothing to do."""
_SITE: Final = re.compile(r"(?P<file>.+?):(?P<line>\d{1,9}) (?P<function>.*)", re.DOTALL)
_STILL: Final = (Kind.MARK, Kind.EXCEPTION)
"""Events of a rank that need not have moved."""


class RecordReader:
    """See the module. patience_s: how long a rank of a run may be silent that is not stuck."""

    name = "record"

    def __init__(self, patience_s: float = 5.0) -> None:
        self.patience_s = patience_s

    def recognises(self, path: Path, head: bytes) -> bool:
        """A ring file, a run directory or its `record` folder."""
        if path.is_dir():
            return has_rings(path)
        return head.startswith(MAGIC)

    def read(self, path: Path) -> Found:
        """All rings of a run, or one ring. Raises UsageError for an unusable one."""
        if path.is_dir():
            mine, stale = of_one_job(read_run(path), alive)
            return _beside(of_recordings(mine, path.name, self.patience_s), path, stale)
        recording = read(path)
        return of_recordings({recording.rank: recording}, path.name, self.patience_s)

    def read_all(self, paths: Sequence[Path]) -> Found:
        """The records of one run, of one host or of several. Raises UsageError where two of them are of one rank, or of
        two jobs.
        """
        stale: list[tuple[Path, list[str]]] = []
        known: dict[int, Path] = {}
        recordings: dict[int, Recording] = {}
        for path in paths:
            mine, lines = of_one_job(read_run(path) if path.is_dir() else {(one := read(path)).rank: one}, alive)
            stale.append((path, lines))
            for rank, recording in mine.items():
                if rank in known:
                    raise UsageError(f"{known[rank]} and {path} both hold rank {rank}: name the record of one run")
                known[rank], recordings[rank] = path, recording
        refuse_two((known[rank], recording) for rank, recording in recordings.items())
        found = of_recordings(recordings, ", ".join(path.name for path in paths), self.patience_s)
        for path, lines in stale:
            found = _beside(found, path, lines)
        return found


READER = RecordReader()


def _beside(found: Found, path: Path, lines: Sequence[str]) -> Found:
    """With a line for each ring that lay beside those of the job."""
    return replace(found, unknown=(*found.unknown, *(f"{path.name}: {line}" for line in lines)))


def of_recordings(recordings: Mapping[int, Recording], source: str, patience_s: float = 5.0) -> Found:
    """What the rings of some ranks tell, read at about one moment. moved_ns: nanoseconds since 1970."""
    if any(recording.meta.get("program") == PROGRAM for recording in recordings.values()):
        from verify.readers import installed

        return installed.of_recordings(recordings, source, patience_s)
    everybody = world_of(recordings.values())
    rings = {rank: Ring(recording, everybody, patience_s) for rank, recording in sorted(recordings.items())}
    for ring in rings.values():
        ring.take(ring.recording.events)
    return of_rings(rings, source)


def of_rings(rings: Mapping[int, Ring], source: str) -> Found:
    """What these rings tell, as far as they were taken."""
    events: list[Event] = []
    unknown: list[str] = []
    recordings = {rank: ring.recording for rank, ring in rings.items()}
    everybody = set(world_of(recordings.values()))
    later = came_after({rank: ring.death for rank, ring in rings.items()}, everybody)
    told, remarks = of_others(rings, STILL_NS)
    unknown += [f"{source}: {line}" for line in remarks]
    events += [event for rank, event in told.items() if rank not in rings]
    for rank, ring in sorted(rings.items()):
        ring.died_later, ring.told = rank in later, told.get(rank)
        events += ring.standing()
        unknown += [f"{source}: rank {rank}: {text}" for text in ring.unknown]
    if absent := sorted(everybody - set(recordings)):
        names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        unknown.append(f"{source}: no ring of rank {names}")
    moved = [ring.recording.wall(ring.newest_ns) for ring in rings.values() if ring.newest_ns is not None]
    return Found(
        source,
        events=tuple(events),
        present=frozenset(recordings),
        expected=frozenset(everybody),
        unknown=tuple(unknown),
        moved_ns=max(moved, default=None),
        unsure=frozenset(each for ring in rings.values() for each in ring.unsure),
        lively=frozenset(rank for rank, ring in rings.items() if ring.lively),
        orphaned=bool(rings) and all(ring.orphaned for ring in rings.values()),
        overdue=frozenset(rank for rank, ring in rings.items() if ring.raised and silent(ring.raised.text)),
    )


class Ring:
    """One rank's ring, event by event: `take` them as they come, and `standing` says what they amount to.

    patience_s: see the module; None to conclude nothing from silence. running: whether the writer's process runs.
    recording: of the reading taken last. newest_ns: of its events. flying: submissions that the device has not
    finished. raised: the exception that it left by. waits: what the host waits in. died_later: see `came_after`.
    told: what others know of its end. moved_ns: of the newest event that shows that it went on.
    """

    def __init__(
        self,
        recording: Recording,
        world: Sequence[int],
        patience_s: float | None,
        running: Callable[[Recording], bool | None] | None = None,
    ) -> None:
        self.recording, self.rank = recording, recording.rank
        self.everybody = Communicator(tuple(world), RENDEZVOUS)
        self.unknown: list[str] = []
        self.newest_ns: int | None = None
        self.flying: set[str] = set()
        self.raised: Entry | None = None
        self.waits: dict[str, Entry] = {}
        self.lost_graphs = 0
        self.died_later = False
        self.told: Event | None = None
        self.moved_ns: int | None = None
        self._running_process = running or alive
        self._patience_ns = None if patience_s is None else int(patience_s * 1e9)
        self._label = ""
        self._sizes: dict[tuple[str, int], tuple[int, ...]] = {}
        self._calls: dict[tuple[str, int], Event] = {}
        """(group, sequence) -> the collective, in the order of the host's enqueues."""
        self._early: dict[tuple[str, int], Event] = {}
        """Those whose enqueue the ring has lost."""
        self._submission: dict[tuple[str, int], str] = {}
        self._members: dict[str, list[tuple[str, int]]] = {}
        """Submission -> its collectives."""
        self._next: dict[str, int] = {}
        self._running: dict[str, Entry] = {}
        self._deferred = False
        self._comms: dict[str, Communicator] = {}
        self._sites: dict[str, Site | None] = {}

    def take(self, entries: Sequence[Entry]) -> None:
        """Go on with these events of `recording`."""
        self._sizes |= (sizes := self.recording.sizes)
        for calls in (self._calls, self._early):  # those enqueued before, of whose rows one knows by now
            for key in calls.keys() & sizes.keys():
                calls[key] = replace(calls[key], splits=sizes[key])
        if entries:
            self.newest_ns = entries[-1].time_ns
            self.moved_ns = next((each.time_ns for each in reversed(entries) if each.kind not in _STILL), self.moved_ns)
        for entry in entries:
            match entry.kind:
                case Kind.SUBMIT:
                    self._label = entry.site
                    self._members.pop(self._label, None)
                    self._members[self._label] = []
                    self.flying.add(self._label)
                case Kind.ENQUEUE if entry.group:
                    self._enqueue(entry, entry.text, entry.group, entry.seq, entry.a, self._label)
                case Kind.GRAPH_LAUNCH:
                    self._graph(entry, self._label)
                case Kind.START | Kind.FINISH if entry.group:
                    self._progress(entry)
                case Kind.WORK_START:
                    self._running[entry.site] = entry
                case Kind.WORK_FINISH:
                    self._running.pop(entry.site, None)
                    self.flying.discard(entry.site)
                    self._finish(self._members.get(entry.site, ()))
                case Kind.EXCHANGE_ENTER | Kind.EXCHANGE_LEAVE:
                    self._exchange(entry)
                case Kind.HOST_WAIT_ENTER:
                    self.waits[entry.text] = entry
                case Kind.HOST_WAIT_LEAVE:
                    self.waits.pop(entry.text, None)
                case Kind.EXCEPTION:
                    self.raised = entry
                case _:
                    pass

    def standing(self) -> list[Event]:
        """Everything that it tells, in the host's order; what it waits in, or how it left, last."""
        self.unknown = []
        calls = {**self._early, **self._calls}
        last = self._last(calls)
        if self.lively and not last:
            # It computes, or is about to do something: what it has not called it may yet call.
            last = [Event(self.rank, What.WAIT, state=State.STARTED, confidence=Confidence.INFERRED)]
        self._say()
        return [*_newest(list(calls.values())), *last]

    @property
    def unsure(self) -> set[tuple[int, str]]:
        """This rank and each group of which it may have made calls that the ring has lost: `Found.unsure`."""
        if not self.recording.dropped:
            return set()
        seen = {group for group, _ in (*self._calls, *self._early)} | set(self._next)
        return {(self.rank, group) for group in (*self.recording.groups, RENDEZVOUS) if group not in seen}

    # -- one by one -----------------------------------------------------------------------------------------------

    def _enqueue(self, entry: Entry, op: str, group: str, seq: int, size: int, label: str) -> None:
        key = (group, seq)
        phase = str(entry.phase) if entry.phase is not None else entry.stream
        also = {phase, label} - {entry.stream, "", HOST}
        self._calls[key] = Event(
            self.rank,
            What.COLLECTIVE,
            op,
            stream=entry.stream,
            also=tuple(sorted(also)),
            medium="host" if entry.stream == HOST else "",
            communicator=self._communicator(group),
            # A record counts from 1.
            sequence=max(0, seq - 1),
            tag=str(size),
            splits=self._sizes.get(key),
            site=self._site(entry.site),
            state=State.SCHEDULED,
        )
        self._next[group] = seq + 1
        self._submission[key] = label
        self._members.setdefault(label, []).append(key)

    def _graph(self, entry: Entry, label: str) -> None:
        calls = self.recording.graph(entry)
        self.lost_graphs += not calls
        for op, group, size in calls:
            first = None if self.recording.dropped or self.recording.torn else 1
            seq = self._next.get(group, first)
            if seq is None:
                self.lost_graphs += 1
            else:
                self._enqueue(entry, op, group, seq, size, label)

    def _progress(self, entry: Entry) -> None:
        self._deferred = True
        key = (entry.group, entry.seq)
        state = State.STARTED if entry.kind is Kind.START else State.COMPLETED
        if (known := self._calls.get(key)) is None:
            if (known := self._early.get(key)) is None:
                self._enqueue(entry, entry.text, *key, entry.a, "")
                known = self._calls.pop(key)
            self._early[key] = known.now(state, self._site(entry.site))
        else:
            self._calls[key] = known.now(state, self._site(entry.site))
        # A group's collectives run one after the other: whatever was torn out, those before it are over.
        before = (entry.group, entry.seq - 1)
        for calls in (self._calls, self._early):
            if before in calls and calls[before].state is not State.COMPLETED:
                calls[before] = calls[before].now(State.COMPLETED)

    def _finish(self, keys: Sequence[tuple[str, int]]) -> None:
        for key in keys:
            known = self._calls.get(key)
            # A submission also ends by an exception, in the middle of a collective.
            if known is not None and (known.state is not State.STARTED or self.recording.torn):
                self._calls[key] = known.now(State.COMPLETED)

    def _exchange(self, entry: Entry) -> None:
        key = (RENDEZVOUS, entry.seq)
        over = entry.kind is Kind.EXCHANGE_LEAVE
        if (before := self._calls.get((RENDEZVOUS, entry.seq - 1))) is not None:
            self._calls[RENDEZVOUS, entry.seq - 1] = before.now(State.COMPLETED)
        self._calls[key] = Event(
            self.rank,
            What.COLLECTIVE,
            RENDEZVOUS,
            medium="host",
            communicator=self.everybody,
            sequence=max(0, entry.seq - 1),
            tag=entry.text,
            blocking=True,
            state=State.COMPLETED if over else State.STARTED,
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def _last(self, calls: dict[tuple[str, int], Event]) -> list[Event]:
        """What the rank stands in, or how it left. Takes those collectives out of `calls` that it did not get to."""
        gone = self._gone(calls)
        if gone is None and held(self.recording, self._running_process):
            gone = Event(self.rank, What.EXTERNAL, STOPPED, state=State.STARTED)
        if gone is not None:
            if gone.operation:  # what its streams were at ends with it, for nobody to meet
                for key in [key for key, call in calls.items() if call.state is not State.COMPLETED]:
                    calls.pop(key)
            return [gone]
        if between := self._between(calls):
            return [between]
        # The newest exchange that is not over blocks the loop; it has to come last.
        open_ = [key for key, call in calls.items() if call.blocking and call.state is not State.COMPLETED]
        if open_:
            return [calls.pop(open_[-1])]
        waits = [entry for entry in self.waits.values() if entry.text != IDLE]
        if IDLE in self.waits and not waits:
            self.unknown.append("waits for something to do")
        return [self._wait(waits[-1], calls)] if waits else []

    @property
    def death(self) -> Death:
        """How it ended, as far as it is known."""
        recording, raised = self.recording, self.raised
        killed = raised is None and recording.closed_ns is None and self._running_process(recording) is False
        waits = any(call.state is not State.COMPLETED for call in (*self._early.values(), *self._calls.values()))
        return death(recording, killed, None if raised is None else raised.time_ns, self.newest_ns, waits)

    @property
    def orphaned(self) -> bool:
        """Whether it gave up since its launcher was gone."""
        text = "" if self.raised is None else self.raised.text
        return text.startswith(CONSEQUENCE) and text.endswith(ORPHANED)

    def _gone(self, calls: dict[tuple[str, int], Event]) -> Event | None:
        raised, recording = self.raised, self.recording
        if self.told is not None and (raised is None or raised.text.startswith(CONSEQUENCE)):
            return self.told
        if raised is not None and raised.text.startswith(CONSEQUENCE):
            self.unknown.append(f"left because of another one: {raised.text[:200]}")
            if any(call.state is not State.COMPLETED for call in calls.values()):
                return None  # what it was in when the other one was lost says more than that it gave up
        elif raised is not None:
            return Event(self.rank, What.EXIT, raised.text, site=self._site(raised.site), state=State.COMPLETED)
        if recording.closed_ns is not None:
            return Event(self.rank, What.EXIT, state=State.COMPLETED)
        if self._running_process(recording) is False:
            self.unknown.append(f"its process {recording.pid} is gone and has not said why{LATER * self.died_later}")
            if self.died_later:
                return None
            return Event(self.rank, What.EXIT, state=State.COMPLETED, confidence=Confidence.INFERRED)
        return None

    def _between(self, calls: dict[tuple[str, int], Event]) -> Event | None:
        """The code between two collectives that a stream stands in, if that is certain."""
        if not self._deferred or self.raised is not None or self.recording.torn or not self._settled():
            return None
        found: list[str] = []
        open_ = {key: call for key, call in calls.items() if call.state is not State.COMPLETED and not call.blocking}
        for stream in ("P", "D"):
            mine = [key for key, call in open_.items() if stream in call.queues]
            # P's thread alone brings a routed call, D's thread alone D's: a queue is judged by its first own call.
            if not mine or open_[mine[0]].state is State.STARTED or self._owner(open_[mine[0]]) != stream:
                continue
            label = self._submission.get(mine[0], "")
            found.append(label or f"{stream}'s work")
            for key in mine:
                calls.pop(key, None)
        if not found:
            return None
        said = " and ".join(dict.fromkeys(found))
        return Event(
            self.rank,
            What.EXTERNAL,
            f"the code of {said}, between its collectives",
            state=State.STARTED,
            confidence=Confidence.INFERRED,
        )

    @staticmethod
    def _owner(call: Event) -> str:
        return "P" if "P" in call.queues else "D"

    @property
    def _now_ns(self) -> int:
        """When the ring was read: decoding it takes seconds on a busy machine."""
        return self.recording.read_ns or time.monotonic_ns()

    @property
    def lively(self) -> bool:
        """Whether it moved a moment ago, and its process runs: it may move again. What is dead stays as it is."""
        if self.newest_ns is None or self._patience_ns is None or self.recording.closed_ns is not None:
            return False
        age = self._now_ns - self.newest_ns
        return 0 <= age < self._patience_ns and bool(self._running_process(self.recording))

    def _settled(self) -> bool:
        """Whether the rank has been silent for long enough."""
        return self.newest_ns is not None and self._patience_ns is not None and not self.lively

    def _wait(self, entry: Entry, calls: dict[tuple[str, int], Event]) -> Event:
        """The host's wait, for a submission, for all of P, for a rank, or for something else."""
        text, site = entry.text, self._site(entry.site)
        stream = queue_of(text)
        mine = [call for call in calls.values() if call.state is not State.COMPLETED and stream in call.queues]
        if mine:
            return Event(self.rank, What.WAIT, streams=(stream,), site=site, state=State.STARTED)
        if peer := re.fullmatch(r"rank (\d{1,9})", text):
            return Event(
                self.rank,
                What.RECV,
                medium="host",
                communicator=Communicator(tuple(sorted({self.rank, int(peer[1])})), "host wait"),
                peer=int(peer[1]),
                blocking=True,
                site=site,
                state=State.STARTED,
            )
        what = f"the device's work of {text}" if text in self._members or stream == "P" else text
        return Event(self.rank, What.EXTERNAL, what, site=site, state=State.STARTED)

    def _say(self) -> None:
        recording = self.recording
        if recording.dropped:
            self.unknown.append(f"{recording.dropped} older events are overwritten")
        if recording.torn or recording.truncated:
            cut = ", and the file is cut off" * recording.truncated
            self.unknown.append(f"{recording.torn} events cannot be read{cut}")
        if self.lost_graphs:
            self.unknown.append(f"{self.lost_graphs} graph launches cannot be numbered")
        if self.newest_ns is None:
            self.unknown.append("its ring is empty")
        elif self.lively:
            age = max(0, self._now_ns - self.newest_ns) / 1e9
            self.unknown.append(f"moved {words.seconds(age, 1)} ago: {LOOK_AGAIN}")

    def _communicator(self, group: str) -> Communicator:
        known = self._comms.get(group)
        if known is None:
            members = self.recording.groups.get(group, (self.rank,))
            known = self._comms[group] = Communicator(tuple(members), group)
        return known

    def _site(self, text: str) -> Site | None:
        if text not in self._sites:
            found = _SITE.fullmatch(text)
            self._sites[text] = Site(found["file"], int(found["line"]), found["function"]) if found else None
        return self._sites[text]


def queue_of(text: str) -> str:
    """The queue that a host wait is for: all of P, or that of one submission."""
    return "P" if text == "P device" else text


def _newest(calls: list[Event]) -> list[Event]:
    """All unfinished ones and the newest `KEEP` of the others, in their order."""
    excess = sum(call.state is State.COMPLETED for call in calls) - KEEP
    kept = []
    for call in calls:
        if excess > 0 and call.state is State.COMPLETED:
            excess -= 1
        else:
            kept.append(call)
    return kept
