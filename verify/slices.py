"""From a rank's record to what a timeline draws: slices of its lanes, finished or not, and moments.

    host         rendezvous and host waits of the rank's loop
    turnstile    P's host enqueue: where it stands (boundary) and what it may enqueue (permit)
    P, D         work on the device, and what each waited for in front of it
    P calls, D calls    collectives, on the stream that they were put on (a routed one is a call on D's stream)

A slice without an end was open when the record was read: for a stuck or dead rank, that is where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kernel.record import Event, Kind, Recording
from kernel.request import Phase
from verify.intervals import DECODE, intervals

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence


class Lane(StrEnum):
    """A lane of a rank, in the order in which lanes are drawn."""

    HOST = "host"
    TURNSTILE = "turnstile"
    P = "P"
    D = "D"
    P_CALLS = "P calls"
    D_CALLS = "D calls"


@dataclass(frozen=True, slots=True)
class Slice:
    """One stretch of one lane. end_ns: None if it was open. more: what else is known, for people."""

    rank: int
    lane: Lane
    name: str
    start_ns: int
    end_ns: int | None
    more: Mapping[str, Any] = field(default_factory=dict)
    boundary: tuple[int, int] | None = None
    """Of a slice in which P stands: epoch and boundary, equal on all ranks."""
    call: tuple[str, int] | None = None
    """Of a collective: its group's name on this rank, and its number there."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that takes no time: a plan, a remark, an exception."""

    rank: int
    lane: Lane
    name: str
    time_ns: int
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Level:
    """How many submissions of each phase a device has still to finish, from `time_ns` on."""

    rank: int
    time_ns: int
    p: int
    d: int


@dataclass(frozen=True)
class Timeline:
    """One rank's."""

    recording: Recording
    slices: list[Slice]
    moments: list[Moment]
    levels: list[Level]


def timeline(recording: Recording) -> Timeline:
    """Everything that one rank's record tells. Stretches whose beginning was overwritten are left out."""
    reader = _Reader(recording)
    for event in recording.events:
        reader.take(event)
    return reader.finish()


class _Reader:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._rank = recording.rank
        self._open: dict[Hashable, tuple[Event, Lane, str]] = {}
        self._stands: Event | None = None
        self._flying: dict[Phase, set[str]] = {Phase.P: set(), Phase.D: set()}
        self._slices: list[Slice] = []
        self._moments: list[Moment] = []
        self._levels: list[Level] = []

    def take(self, event: Event) -> None:
        phase = event.phase or Phase.D
        work = Lane.D if phase is Phase.D else Lane.P
        match event.kind:
            case Kind.SUBMIT:
                self._flying[phase].add(event.site)
                self._level(event)
            case Kind.WORK_START:
                self._begin((work, event.site), event, work, event.site)
            case Kind.WORK_FINISH:
                self._end((work, event.site), event)
                if event.site in self._flying[phase]:
                    self._flying[phase].remove(event.site)
                    self._level(event)
            case Kind.START:
                lane = Lane.D_CALLS if event.stream == "D" else Lane.P_CALLS
                self._begin((event.group, event.seq), event, lane, f"{event.text} {event.group} #{event.seq}")
            case Kind.FINISH:
                self._end((event.group, event.seq), event)
            case Kind.EXCHANGE_ENTER:
                self._begin(("exchange", event.seq), event, Lane.HOST, f"rendezvous {event.text}")
            case Kind.EXCHANGE_LEAVE:
                self._end(("exchange", event.seq), event)
            case Kind.HOST_WAIT_ENTER:
                self._begin(("wait", event.text), event, Lane.HOST, f"waits for {event.text}")
            case Kind.HOST_WAIT_LEAVE:
                self._end(("wait", event.text), event)
            case Kind.BOUNDARY | Kind.PERMIT | Kind.PROMOTE:
                self._turnstile(event)
            case Kind.PLAN:
                epoch = f", P e{event.epoch}" if event.epoch >= 0 else ""
                bucket = f", D of {event.b}" if event.b else ""
                self._moment(event, f"plan {event.round}{epoch}{bucket}", Lane.HOST)
            case Kind.SIZES if event.a == 0 and (rows := self._recording.sizes.get((event.group, event.seq))):
                members = self._recording.groups.get(event.group)
                name = f"{sum(rows)} rows will come in {event.group} #{event.seq}"
                self._moment(event, name, Lane.P, {"rows": _sent(members, rows)})
            case Kind.MARK:
                self._moment(event, event.text, Lane.HOST)
            case Kind.EXCEPTION:
                self._moment(event, f"exception: {event.text}", Lane.HOST)
            case Kind.GRAPH_LAUNCH:
                calls = ", ".join(f"{call.op} {call.group}" for call in self._recording.graph(event)[:32])
                self._moment(event, "graph launch", work, {"calls": calls})
            case _:
                pass

    def finish(self) -> Timeline:
        for event, lane, name in self._open.values():
            self._add(event, lane, name, None)
        if self._stands is not None:
            self._stood(self._stands, None)
        for wait in intervals(self._recording):
            if wait.lane == "wait" and wait.end_ns > wait.start_ns:
                lane = Lane.D if wait.label == DECODE else Lane.P
                name = "rows ready, waits" if wait.label == DECODE else "waits for its permit"
                more = {"round": wait.round, "epoch": wait.epoch}
                self._slices.append(Slice(self._rank, lane, name, wait.start_ns, wait.end_ns, more))
        self._slices.sort(key=lambda one: one.start_ns)
        return Timeline(self._recording, self._slices, self._moments, self._levels)

    def _begin(self, key: Hashable, event: Event, lane: Lane, name: str) -> None:
        self._open[key] = (event, lane, name)

    def _end(self, key: Hashable, event: Event) -> None:
        if found := self._open.pop(key, None):
            self._add(*found, max(event.time_ns, found[0].time_ns))

    def _add(self, event: Event, lane: Lane, name: str, end_ns: int | None) -> None:
        more: dict[str, Any] = {"round": event.round, "epoch": event.epoch}
        call = None
        if event.kind is Kind.START:
            call = (event.group, event.seq)
            more |= {"phase": str(event.phase), "size": event.a, "site": event.site}
            if members := self._recording.groups.get(event.group):
                more["ranks"] = list(members)
            if rows := self._recording.sizes.get(call):
                more["rows"] = _sent(members, rows)
        elif event.kind is Kind.WORK_START:
            what = ("bucket", "rows") if event.phase is Phase.D else ("from_boundary", "to_boundary")
            more |= dict(zip(what, (event.a, event.b), strict=True))
        self._slices.append(Slice(self._rank, lane, name, event.time_ns, end_ns, more, call=call))

    def _turnstile(self, event: Event) -> None:
        """P's host either stands at a boundary or enqueues what it was permitted; promotion ends an epoch."""
        if self._stands is not None:
            self._stood(self._stands, max(event.time_ns, self._stands.time_ns))
        ends = event.kind is Kind.PROMOTE or (event.kind is Kind.PERMIT and event.a == event.b)
        self._stands = None if ends else event

    def _stood(self, event: Event, end_ns: int | None) -> None:
        more = {"round": event.round, "epoch": event.epoch}
        if event.kind is Kind.BOUNDARY:
            at = (event.epoch, event.a)
            name = f"e{event.epoch} at {event.a}"
            self._slices.append(Slice(self._rank, Lane.TURNSTILE, name, event.time_ns, end_ns, more, boundary=at))
        else:
            name = f"e{event.epoch} enqueues [{event.a},{event.b})"
            self._slices.append(Slice(self._rank, Lane.TURNSTILE, name, event.time_ns, end_ns, more))

    def _level(self, event: Event) -> None:
        levels = len(self._flying[Phase.P]), len(self._flying[Phase.D])
        self._levels.append(Level(self._rank, event.time_ns, *levels))

    def _moment(self, event: Event, name: str, lane: Lane, more: Mapping[str, Any] | None = None) -> None:
        self._moments.append(Moment(self._rank, lane, name, event.time_ns, {"round": event.round, **(more or {})}))


def _sent(members: Sequence[int] | None, rows: Sequence[int]) -> dict[str, int]:
    """How many rows come from each rank."""
    names = members if members is not None and len(members) == len(rows) else range(len(rows))
    return {f"rank {name}": count for name, count in zip(names, rows, strict=True)}
