"""From what the evidence of a job shows to where each rank stands."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from verify.events import NOTHING, Confidence, Event, Kind, State
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
    says so; and with open launches of its own, in a quiet job, presumed to wait for them, unless its last event says
    that it waits for nothing (`verify.readers.found.waits_for_nothing`). A rank without events is UNKNOWN, and so
    is a thread that may still be running, or one that waits for what the evidence does not show. present: ranks whose
    evidence is at hand even if it holds no call: in a quiet job they are ELSEWHERE. unsure: see
    `Situation`. A rank that made a later
    call on a channel has finished the earlier ones that the evidence lacks (rings and dumps hold the newest only, and
    readers leave out what met and ended). A rank without any evidence has made a call that cannot have ended on others
    without it.
    """
    launches: dict[int, list[Launch]] = {}
    meetings: dict[Key, Meeting] = {}
    counts: Counter[tuple[Channel, Seat]] = Counter()
    last: dict[tuple[int, str], tuple[Event, Launch | None]] = {}
    made: dict[tuple[int, str], set[Channel]] = {}
    for event in events:
        issued: Launch | None = None
        if event.calls:
            mine = launches.setdefault(event.rank, [])
            order = (mine[-1].order + 1 if mine else 0) + event.skipped
            issued = Launch(event, order, done=event.state is State.COMPLETED)
            mine.append(issued)
            take_seats(issued, meetings, counts)
            made.setdefault((event.rank, event.thread), set()).update(each.key[0] for each in issued.meetings)
        last[event.rank, event.thread] = (event, issued)
    for (channel, number), meeting in meetings.items():
        example = next(iter(meeting.arrived.values()))[1]
        for seat in meeting.seats:
            if seat not in meeting.arrived and counts[channel, seat] > number:
                passed = replace(example, rank=seat[0], site=None, confidence=Confidence.INFERRED)
                meeting.arrived[seat] = (Launch(passed, -1, done=True), passed)
    known = {rank for rank, _ in last} | set(present)
    for meeting in meetings.values():
        if meeting.ended_for_all:
            example = next(iter(meeting.arrived.values()))[1]
            for seat in meeting.seats:
                if seat not in meeting.arrived and seat[0] not in known:
                    passed = replace(example, rank=seat[0], site=None, confidence=Confidence.INFERRED)
                    meeting.arrived[seat] = (Launch(passed, -1, done=True), passed)
    hosts = []
    for who, (event, issued) in sorted(last.items(), key=itemgetter(0)):
        host = _host(event, issued, launches.get(who[0], ()), quiet)
        host.made = frozenset(made.get(who, ()))
        hosts.append(host)
    expected = {member for (_, _, members), _ in meetings for member in members} | set(ranks)
    idle = set(present) if quiet else set()
    hosts += [
        Host(rank, "", Standing.ELSEWHERE if rank in idle else Standing.UNKNOWN)
        for rank in sorted((expected | idle) - {rank for rank, _ in last})
    ]
    return Situation(hosts, launches, meetings, quiet=quiet, unsure=unsure)


def _host(event: Event, issued: Launch | None, launches: Sequence[Launch], quiet: bool) -> Host:
    """Where the thread stands whose last event is `event`."""
    over = event.state is State.COMPLETED
    idle = event.kind is Kind.WAIT and over and event.operation == NOTHING
    # What another thread has open, that one waits for.
    open_ = tuple(one for one in launches if not one.done and one.event.thread == event.thread and not idle)
    presumed = False
    waits: tuple[Launch, ...] = ()
    if event.kind is Kind.EXIT:
        standing = Standing.RAISED if event.operation else Standing.EXITED
    elif event.kind is Kind.EXTERNAL and not over:
        standing = Standing.OUTSIDE
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
