"""From what the evidence of a job shows to where each rank stands."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from verify.events import Confidence, Event, Kind, State
from verify.matching import Host, Launch, Situation, Standing, take_seats, waited_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.matching import Channel, Key, Meeting, Seat


def situation_of(
    events: Iterable[Event],
    ranks: Iterable[int] = (),
    quiet: bool = True,
    present: Iterable[int] = (),
    unsure: frozenset[tuple[int, str]] = frozenset(),
) -> Situation:
    """Where the ranks of some evidence stand.

    events: of each rank in its host order; a call or wait that is not COMPLETED is open. ranks: everybody who should be
    there, besides the members that the events name. quiet: the job has not moved for longer than any operation or host
    work takes. A thread is blocked where its last event is an open blocking call or wait; outside or gone where that
    says so; and with open launches, in a quiet job, presumed to wait for them, unless that event is an EXTERNAL,
    completed and inferred, which says that it waits for none of them. A rank without events is UNKNOWN, and so
    is a thread that may still be running, or one that waits for what the evidence does not show. present: ranks whose
    evidence is at hand even if it holds no call: in a quiet job they are ELSEWHERE. unsure: see
    `Situation`. A rank that made a later
    call on a channel has finished the earlier ones that the evidence lacks (rings and dumps hold the newest only, and
    readers leave out what met and ended).
    """
    launches: dict[int, list[Launch]] = {}
    meetings: dict[Key, Meeting] = {}
    counts: Counter[tuple[Channel, Seat]] = Counter()
    last: dict[tuple[int, str], tuple[Event, Launch | None]] = {}
    for event in events:
        issued: Launch | None = None
        if event.calls:
            mine = launches.setdefault(event.rank, [])
            order = (mine[-1].order + 1 if mine else 0) + event.skipped
            issued = Launch(event, order, done=event.state is State.COMPLETED)
            mine.append(issued)
            take_seats(issued, meetings, counts)
        last[event.rank, event.thread] = (event, issued)
    for (channel, number), meeting in meetings.items():
        example = next(iter(meeting.arrived.values()))[1]
        for seat in meeting.seats:
            if seat not in meeting.arrived and counts[channel, seat] > number:
                passed = replace(example, rank=seat[0], site=None, confidence=Confidence.INFERRED)
                meeting.arrived[seat] = (Launch(passed, -1, done=True), passed)
    hosts = [_host(event, issued, launches.get(rank, ()), quiet) for (rank, _), (event, issued) in sorted(last.items())]
    expected = {member for (_, _, members), _ in meetings for member in members} | set(ranks)
    idle = set(present) if quiet else set()
    hosts += [
        Host(rank, "", Standing.ELSEWHERE if rank in idle else Standing.UNKNOWN)
        for rank in sorted((expected | idle) - {rank for rank, _ in last})
    ]
    return Situation(hosts, launches, meetings, quiet=quiet, unsure=unsure)


def _host(event: Event, issued: Launch | None, launches: Sequence[Launch], quiet: bool) -> Host:
    """Where the thread stands whose last event is `event`."""
    open_ = tuple(launch for launch in launches if not launch.done)
    over = event.state is State.COMPLETED
    presumed = False
    waits: tuple[Launch, ...] = ()
    if event.kind is Kind.EXIT:
        standing = Standing.RAISED if event.operation else Standing.EXITED
    elif event.kind is Kind.EXTERNAL and not over:
        standing = Standing.OUTSIDE
    elif quiet and event.kind is Kind.EXTERNAL and event.confidence is Confidence.INFERRED:
        standing = Standing.ELSEWHERE
    elif event.kind is Kind.WAIT and not over and (waits := waited_for(event, launches)):
        standing = Standing.BLOCKED
    elif issued is not None and event.blocking and not over:
        standing, waits = Standing.BLOCKED, (issued,)
    elif not quiet or (event.kind is Kind.WAIT and not over and not event.any_of):
        standing = Standing.UNKNOWN
    elif open_:
        standing, waits, presumed = Standing.BLOCKED, open_, True
    else:
        standing = Standing.ELSEWHERE
    return Host(event.rank, event.thread, standing, event, waits, event.any_of and not presumed, presumed)
