"""The record that `turnstile.record.install` makes of any program: its rings -> events.

A call becomes a collective, send or recv with all of its arguments; calls of a graph come with each launch. Queues:

    a backend of hosts (gloo)       each call is a queue of its own: none waits for an earlier one by itself
    a device, as the program goes   the stream that was current
    a device, asynchronous          the communicator's own queue, and later the stream that was told to wait for it

What a thread waits in comes last: a call, its device, a key of a store. A rank that moved within `patience_s` may be
about to do something: if it waits for nothing, it is not known what it does. One that moved long ago and shows no wait
may compute or be blocked in code of its own: it is `idle`, and what it has not called it may yet call.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.record.foreign import HOST_MEDIA, LEAVES, PROGRAM
from verify import words
from verify.events import NOTHING, Confidence, Event, State
from verify.events import Kind as What
from verify.readers.creations import settled
from verify.readers.damage import damaged
from verify.readers.found import ENDED, ENDED_ITS_RECORD, LOOK_AGAIN, Found, waits_for_nothing
from verify.readers.installed_ring import Ring
from verify.readers.killed import BY_HAND, LATER, STOPPED, Death, alive, came_after, death, state_of
from verify.readers.lines import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kernel.record import Recording
    from verify.readers.installed_call import Item

CONSEQUENCES: Final = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "not connected",
                       "remote peer", "socket closed", "connectioneseterror")  # fmt: skip
"""What an exception of a call says, in small letters, that tells of another rank's absence."""
UNREACHED: Final = "timed out connecting"
"""What gloo says where a host cannot be reached: a fault of the network, which nobody's end has caused."""
SILENT_S: Final = 3.0
"""Without Python for so long, a process holds the interpreter lock elsewhere: its thread wakes four times a second."""
START_S: Final = 60.0
"""A rank that has recorded nothing yet may load its data for so long before it joins the others."""


def is_installed(recording: Recording) -> bool:
    """Whether a ring is of a program that is not ours."""
    return recording.meta.get("program") == PROGRAM


@dataclass
class _Rank:
    ring: Ring
    age_s: float | None
    """Seconds since it moved, of a process that runs here."""
    runs: bool | None
    left: Event | None = None
    unknown: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Threads of it that ended by an exception."""

    @property
    def here(self) -> bool:
        """Whether its process is there, perhaps for a thread that the main one has left behind."""
        return self.ring.recording.closed_ns is None and self.runs is True


def of_recordings(recordings: Mapping[int, Recording], source: str, patience_s: float = 5.0) -> Found:
    """What the rings of some ranks tell, read at about one moment."""
    rings = {rank: Ring(recording) for rank, recording in sorted(recordings.items())}
    return of_rings(rings, source, patience_s)[0]


def of_rings(
    rings: Mapping[int, Ring],
    source: str,
    patience_s: float = 5.0,
    running: Callable[[Recording], bool | None] = alive,
) -> tuple[Found, frozenset[int]]:
    """The same of rings that were taken, and the ranks that left because of another one.

    running: whether the process of a ring runs, None where that cannot be seen.
    """
    everybody = set(rings)
    ranks: dict[int, _Rank] = {}
    for rank, ring in rings.items():
        everybody |= ring.everybody
        runs = running(ring.recording)
        ranks[rank] = _Rank(ring, _age(ring, runs), runs)
    for each in ranks.values():
        _leave(each)
    for rank in came_after({rank: _death(each) for rank, each in ranks.items()}, everybody):
        ranks[rank].left = None
        ranks[rank].unknown[-1] += LATER
    events: list[Event] = []
    remarks: list[tuple[int, str]] = []
    unknown: list[str] = []
    lively: set[int] = set()
    gave_up: set[int] = set()
    idle: set[int] = set()
    for rank, each in ranks.items():
        consequence = False
        for thread, raised in each.ring.raised.items():
            item = each.ring.items_by_number.get(raised.a - 1)
            if item is not None and _consequence(rank, item, ranks):
                # What it was in says more than that it gave up.
                who = each.ring.called(thread)
                unknown.append(f"{source}: rank {rank}: {who}left because of another one: {brief(item.failed)}")
                item.done = False
                each.ring.waits[thread] = item.number
                consequence |= thread == 0
                gave_up |= {rank} if thread == 0 else set()
            elif thread:
                where = f" at {raised.site}" if raised.site else ""
                each.ended.append(f"{ENDED}{each.ring.called(thread)}ended by {raised.text[:200]}{where}")
        mine = each.ring.events()
        if each.left is not None and not consequence and not each.here:
            # With all of its threads.
            last = [replace(each.left, thread=thread) for thread in sorted({*(event.thread for event in mine), ""})]
            last.reverse()
        else:
            last = each.ring.standing()
            if each.left is not None and not consequence:
                last = [*(event for event in last if event.thread), each.left]
            elif not each.ring.uninstalled and not any(not event.thread for event in last):
                one = _idle(each, patience_s)
                if one is None and last and all(event.thread for event in mine):
                    one = waits_for_nothing(rank)
                last += [] if one is None else [one]
                idle |= {rank} if one is None else set()
            if any(event.operation == NOTHING for event in last):
                idle.add(rank)
            if each.age_s is not None and each.age_s < _patience(each, patience_s):
                # Whatever waits for nothing may be about to make a call.
                last = [replace(event, state=State.STARTED) if event.operation == NOTHING else event for event in last]
                lively.add(rank)
                did = "moved" if each.ring.newest is not None else "began"
                told = f"{source}: rank {rank}: {did} {words.seconds(each.age_s, 1)} ago"
                unknown.append(f"{told}: {LOOK_AGAIN}")
        events += [*mine, *last]
        unknown += [f"{source}: rank {rank}: {text}" for text in (*each.ring.unknown, *each.unknown)]
        remarks += [(rank, text) for text in (*each.ended, *each.ring.remarks, *each.remarks)]
    if absent := sorted(everybody - set(rings)):
        told = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        unknown.append(f"{source}: no ring of rank {told}")
    moved = [ring.recording.wall(ring.newest.time_ns) for ring in rings.values() if ring.newest is not None]
    found = Found(
        source,
        events=tuple(settled(events)),
        present=frozenset(rank for rank, ring in rings.items() if not ring.uninstalled),
        expected=frozenset(everybody),
        unknown=tuple(unknown),
        moved_ns=max(moved, default=None),
        unsure=_unsure(rings),
        whole=frozenset(rank for rank, ring in rings.items() if ring.whole),
        lively=frozenset(lively),
        idle=frozenset(idle),
        remarks=tuple(remarks),
        recorded=frozenset(rings),
        damaged=damaged(ring.recording for ring in rings.values()),
        waited=tuple((rank, since) for rank, each in ranks.items() if (since := _waited(each)) is not None),
    )
    return found, frozenset(gave_up)


def _death(rank: _Rank) -> Death:
    ring, newest, raised = rank.ring, rank.ring.newest, rank.ring.raised.get(0)
    killed = rank.left is not None and rank.runs is False and any(how in rank.left.operation for how in BY_HAND)
    return death(
        ring.recording, killed, None if raised is None else raised.time_ns, None if newest is None else newest.time_ns,
        any(not item.done for item in ring.items),
    )  # fmt: skip


def _age(ring: Ring, runs: bool | None) -> float | None:
    if ring.recording.closed_ns is not None or not runs:
        return None
    # A ring without an event was made when its clocks were read.
    moved = ring.newest.time_ns if ring.newest is not None else ring.recording.monotonic_ns
    return max(0.0, ((ring.recording.read_ns or time.monotonic_ns()) - moved) / 1e9)


def _waited(rank: _Rank) -> float | None:
    """For how many seconds the newest call has been open that a thread waits in, when it was last seen."""
    ring, recording = rank.ring, rank.ring.recording
    items = [item for number in ring.waits.values() if (item := ring.items_by_number.get(number)) is not None]
    begun = max((item.time_ns for item in items if not item.done), default=None)
    if begun is None or rank.left is not None or (not rank.here and recording.beat_ns is None):
        return None
    last = (recording.read_ns or time.monotonic_ns()) if rank.here else recording.beat_ns or 0
    return max(0.0, (last - begun) / 1e9)


def _patience(rank: _Rank, patience_s: float) -> float:
    return patience_s if rank.ring.newest is not None else max(patience_s, START_S)


def _leave(rank: _Rank) -> None:
    """How a rank left, if it did."""
    ring, recording = rank.ring, rank.ring.recording
    number = recording.rank
    if (raised := ring.raised.get(0)) is not None:
        rank.left = Event(number, What.EXIT, raised.text, site=ring.site(raised.site), state=State.COMPLETED)
    elif recording.closed_ns is not None and (leaves := ring.leaves) is not None:
        what = f"SystemExit: {leaves.text.removeprefix(LEAVES)}"
        rank.left = Event(number, What.EXIT, what, site=ring.site(leaves.site), state=State.COMPLETED)
    elif ring.uninstalled:
        rank.unknown.append(f"{ENDED_ITS_RECORD}: what it did since then is not known")
    elif recording.closed_ns is not None:
        rank.left = Event(number, What.EXIT, state=State.COMPLETED)
        if (site := ring.last_site()) is not None:
            rank.remarks.append(f"its last call was at {site}")
    elif rank.runs is False:
        # Whoever returns or raises closes the record.
        rank.unknown.append(f"its process {recording.pid} is gone and has not said why")
        how = _ending(recording) or "being killed, or by os._exit: its record was not closed"
        rank.left = Event(number, What.EXIT, how, state=State.COMPLETED, confidence=Confidence.INFERRED)


def _ending(recording: Recording) -> str:
    """How a process ended that its parent has not asked about yet; "" where nobody can say."""
    if alive(recording) is not False:  # of another host, whose numbers are not ours
        return ""
    try:
        fields = Path(f"/proc/{recording.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        state, began, status = fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK"), int(fields[49])
    except (OSError, IndexError, ValueError):
        return ""
    # Another process may have its number by now.
    if state != "Z" or began > recording.monotonic_ns / 1e9 + 1.0 or not status:
        return ""
    if number := status & 0x7F:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"being killed by {name}" + (" (by hand, or by the OOM killer)" if name == "SIGKILL" else "")
    return f"os._exit with exit code {status >> 8}"


def _consequence(rank: int, item: Item, ranks: Mapping[int, _Rank]) -> bool:
    """Whether the exception that a call raised tells of another rank."""
    text = item.failed.lower()
    others = [each for other, each in ranks.items() if other != rank]
    if _unreached(item) and not all(_unreached(_raised(each)) for each in others):
        # Its own connection, unless somebody had left before for another reason.
        return any(each.left is not None and not _unreached(_raised(each)) for each in others)
    if any(word in text for word in CONSEQUENCES[:2]):
        return True
    if any(word in text for word in CONSEQUENCES[2:]) and any(each.left is not None for each in others):
        return True
    for each in others:
        for other in each.ring.items:
            if other.key == item.key and other.arguments != item.arguments:
                return True
    return False


def _raised(rank: _Rank) -> Item | None:
    """The call by whose exception the main thread ended."""
    raised = rank.ring.raised.get(0)
    return None if raised is None else rank.ring.items_by_number.get(raised.a - 1)


def _unreached(item: Item | None) -> bool:
    """Whether a rank could not connect to another one that has published its address to make a group with it."""
    return item is not None and item.medium == "host" and UNREACHED in item.failed.lower()


def _idle(rank: _Rank, patience_s: float) -> Event | None:
    """Of a rank that waits for nothing in its record: what it does, where its process shows it."""
    ring, number = rank.ring, rank.ring.recording.rank
    recording = ring.recording
    if rank.age_s is not None:
        state = state_of(recording.pid)
        if state in ("T", "t"):
            return _outside(number, STOPPED)
        beat = recording.beat_ns
        if beat is not None and (silent := ((recording.read_ns or time.monotonic_ns()) - beat) / 1e9) > SILENT_S:
            told = f"no Python has run in its process for {silent:.0f} s"
            rank.remarks.append(f"{told}: a thread holds the interpreter lock")
            return _outside(number, "code that holds the interpreter lock")
        if rank.age_s < _patience(rank, patience_s):
            return Event(number, What.WAIT, state=State.STARTED, confidence=Confidence.INFERRED)
        rank.remarks.append(f"its main thread {'runs' if state == 'R' else 'is asleep'} (pid {recording.pid})")
    open_ = [item for item in ring.items if not item.done and item.thread == 0]
    if open_ and all(item.medium in HOST_MEDIA for item in open_):
        # A wait for one of them would be in the record: it does something else.
        return waits_for_nothing(number)
    return None


def _outside(rank: int, what: str, site: object = None) -> Event:
    event = Event(rank, What.EXTERNAL, what, state=State.STARTED, confidence=Confidence.INFERRED)
    return replace(event, site=site) if site is not None else event  # type: ignore[arg-type]


def _unsure(rings: Mapping[int, Ring]) -> frozenset[tuple[int, str]]:
    """Groups whose calls cannot be numbered alike on all ranks."""
    bases: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    shaky: set[tuple[str, tuple[int, ...]]] = set()
    for ring in rings.values():
        for group in ring.groups.values():
            key = (group.name, group.ranks or ())
            bases.setdefault(key, set()).add(group.base)
            if not group.certain:
                shaky.add(key)
    wrong = {key for key in shaky if len(bases[key]) > 1}
    ended = {(rank, name) for rank, ring in rings.items() if ring.uninstalled for name, _ in bases}
    return frozenset((rank, name) for name, ranks in wrong for rank in ranks) | ended
