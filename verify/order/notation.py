"""The queues of a program in the notation, or of the events of one (`verify.events.Program`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from verify.blame import Class
from verify.events import Communicator, Kind
from verify.execution import races
from verify.matching import Launch, take_seats
from verify.notation import parse_program
from verify.order.queues import Builder, End, Odd, Orders

if TYPE_CHECKING:
    from verify.events import Event, Lane, Program
    from verify.matching import Channel, Key, Meeting, Seat


def from_notation(program: Program | str) -> Orders:
    """The queues when every rank runs `program` (or its text) to where it leaves, blocks outside or ends.

    A launch of several transfers ties them into one instance. A wait for any of several streams counts as one for all
    of them that need not hold (`Edge.soft`). Names of streams are each rank's own. Raises NotationError for text that
    is not a program.
    """
    if isinstance(program, str):
        program = parse_program(program)
    builder = Builder(roles=False)
    orders = builder.orders
    lanes = [(lane, _until_it_stops(lane)) for lane in program.lanes]
    launches, meetings = _launches(lanes)
    tied = _tie(meetings)
    together: dict[Key, list[Meeting]] = {}
    numbers: dict[Key, int] = {}
    for key, meeting in meetings.items():
        together.setdefault(tied[key], []).append(meeting)
    for key, met in together.items():
        call = next(iter(met[0].arrived.values()))[1]
        communicator, count = _name(met)
        numbers[key] = builder.instance(
            builder.communicator(communicator), count, call.name + (f"[{call.tag}]" if call.tag else "")
        )
    for (lane, events), mine in zip(lanes, launches, strict=True):
        builder.rank(lane.rank)
        issued = iter(mine)
        for event in events:
            if event.kind is Kind.WAIT:
                _wait(builder, lane, event)
            elif event.calls:
                launch = next(issued)
                instance = numbers[tied[launch.meetings[0].key]]
                builder.enqueue(lane.rank, event.queues, instance, str(event.site or ""), thread=lane.thread)
                if not event.on_device:
                    orders.host.add(instance)
                if event.blocking:
                    builder.wait(lane.rank, instance, "blocking call", lane.thread)
        if (end := _end(lane, events)) is not None:
            orders.ends[lane.rank] = end
    for key, met in together.items():
        instance = numbers[key]
        for meeting in met:
            if missing := {seat[0] for seat in meeting.seats if seat not in meeting.arrived}:
                orders.absent[instance] = tuple(sorted({*orders.absent.get(instance, ()), *missing}))
            sides = {} if meeting.agrees() else meeting.sides()
            orders.odd += [
                Odd(instance, rank, " ".join(filter(None, side))) for side, ranks in sides.items() for rank in ranks
            ]
    orders.racing = tuple(sorted({program.lanes[number].rank for number in races(program, exclusive=False)}))
    orders.scope = f"{len(program.ranks)} ranks in the order of their program"
    return builder.finish()


def _until_it_stops(lane: Lane) -> tuple[Event, ...]:
    stop = next((n for n, event in enumerate(lane.events) if event.kind in (Kind.EXIT, Kind.EXTERNAL)), None)
    return lane.events[:stop]


def _end(lane: Lane, events: tuple[Event, ...]) -> End | None:
    if len(events) == len(lane.events):
        return None
    last = lane.events[len(events)]
    if last.kind is Kind.EXTERNAL:
        return End(Class.OUTSIDE, f"which is blocked outside collectives, in {last.operation}")
    if last.operation:
        return End(Class.EXCEPTION, f"which left by {last.operation}")
    return End(Class.MISSING, "which has left")


def _launches(lanes: list[tuple[Lane, tuple[Event, ...]]]) -> tuple[list[list[Launch]], dict[Key, Meeting]]:
    """What each lane launches, in order, and who meets whom."""
    counts: Counter[tuple[Channel, Seat]] = Counter()
    meetings: dict[Key, Meeting] = {}
    launches: list[list[Launch]] = []
    for _, events in lanes:
        launches.append([Launch(event, number) for number, event in enumerate(events) if event.calls])
        for launch in launches[-1]:
            take_seats(launch, meetings, counts)
    return launches, meetings


def _name(met: list[Meeting]) -> tuple[Communicator, int]:
    """What the instance of some meetings is counted on, and its number there: of several, they themselves."""
    (kind, name, members), count = min(meeting.key for meeting in met)
    if kind == "pair":
        name = " ".join(filter(None, (name, f"{members[0]}>{members[1]}")))
    if len(met) > 1:
        name = f"{name or Communicator(members)} #{count} and {len(met) - 1} more"
        members, count = tuple({seat[0] for meeting in met for seat in meeting.seats}), 0
    return Communicator(tuple(sorted(set(members))), name), count


def _tie(meetings: dict[Key, Meeting]) -> dict[Key, Key]:
    """Meeting -> the one that stands for all that complete together with it (union-find)."""
    head = {key: key for key in meetings}

    def find(key: Key) -> Key:
        while head[key] != key:
            head[key] = key = head[head[key]]
        return key

    for meeting in meetings.values():
        for launch, _ in meeting.arrived.values():
            for other in launch.meetings:
                head[find(other.key)] = find(meeting.key)
    return {key: find(key) for key in head}


def _wait(builder: Builder, lane: Lane, event: Event) -> None:
    every = builder.names(lane.rank) if "*" in event.streams else event.streams
    for name in every:
        if (instance := builder.last(lane.rank, name)) is not None:
            builder.wait(lane.rank, instance, f"host wait for {name}", lane.thread, soft=event.any_of)
