"""Which calls meet, and whether they agree: the n-th call of a communicator on one member with the n-th on the others.

A `Launch` is one event that was issued; each of its calls takes a seat of a `Meeting`. A `Situation` is where all
ranks stand at one moment, whether a program was run to its end (`verify.execution`) or evidence was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from verify.events import ANYBODY, Confidence, Kind

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator

    from verify.events import Event


class Channel(NamedTuple):
    """What calls are counted on: a communicator, or one direction of a pair (members: sender, receiver)."""

    kind: str
    name: str
    members: tuple[int, ...]

    def __hash__(self) -> int:
        # Members may be thousands and are hashed at every call; their ends tell most communicators apart.
        return hash((self.kind, self.name, len(self.members), self.members[:1], self.members[-1:]))


Key = tuple[Channel, int]
"""A channel and the number of the call on it, from 0."""
Seat = tuple[int, str]
"""Who sits there: a rank, and for a pair which end."""

RECENT = 10
"""Calls at the end of a rank's that pictures may show. Readers that leave calls out keep these."""

JOINT = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Operations that end nowhere before every member has come."""
UNEVEN = frozenset({"A2A", "all_to_all", "gather", "scatter"})
"""Operations whose recorded input sizes may differ between members."""


def channel_of(call: Event) -> Channel:
    """What `call` is counted on."""
    name = call.communicator.name if call.communicator is not None else ""
    if call.kind is Kind.COLLECTIVE:
        return Channel("collective", name, call.communicator.members if call.communicator is not None else (call.rank,))
    peer = call.rank if call.peer is None else call.peer
    return Channel("pair", name, (call.rank, peer) if call.kind is Kind.SEND else (peer, call.rank))


def seats_of(channel: Channel) -> tuple[Seat, ...]:
    """The seats of a meeting on `channel`."""
    if channel.kind == "pair":
        return ((channel.members[0], "send"), (channel.members[1], "recv"))
    return tuple((member, "") for member in channel.members)


def seat_of(call: Event) -> Seat:
    """The seat that `call` takes."""
    return (call.rank, "" if call.kind is Kind.COLLECTIVE else call.kind.value)


@dataclass(eq=False)
class Launch:
    """One issued event. order: its number on the rank, from 0, those that the evidence left out counted.

    started: at the head of its streams, with room.
    """

    event: Event
    order: int
    meetings: tuple[Meeting, ...] = ()
    started: bool = False
    done: bool = False

    @property
    def rank(self) -> int:
        """Who issued it."""
        return self.event.rank


@dataclass(eq=False)
class Meeting:
    """The calls that meet. arrived: seat -> the launch and the call; a seat that is not there was not issued yet.

    started: how many of the launches have.
    """

    key: Key
    arrived: dict[Seat, tuple[Launch, Event]] = field(default_factory=dict)
    started: int = 0

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """Everybody who has to come."""
        return seats_of(self.key[0])

    @property
    def from_anybody(self) -> bool:
        """Whether its receiver would take what any other member sends."""
        return any(call.stream.startswith(ANYBODY) for _, call in self.arrived.values())

    @property
    def ended_for_all(self) -> bool:
        """Whether it has ended on some member, though it ends on none before all have come.

        On gloo a call that raised an exception looks finished in a dump.
        """
        ended = [call for launch, call in self.arrived.values() if launch.done]
        return bool(ended) and all(
            call.operation in JOINT and call.medium != "gloo" and not call.failed for call in ended
        )

    def failures(self) -> dict[int, Event]:
        """Rank -> its call, of those whose call raised an exception."""
        return {seat[0]: call for seat, (_, call) in sorted(self.arrived.items()) if call.failed}

    def agrees(self) -> bool:
        """Whether the calls that came so far are the same operation with the same arguments."""
        told = {(call.operation, call.tag, call.sizes, call.dtype, call.root) for _, call in self.arrived.values()}
        return len(told) < 2 or len(self.sides()) < 2

    def sides(self) -> dict[tuple[str, ...], list[int]]:
        """What was called -> the ranks that called it. More than one entry is a mismatch.

        A call that was inferred from a later one, or from a counter, is on no side: its arguments were not seen.
        """
        seen = [(call, seat[0]) for seat, (_, call) in sorted(self.arrived.items(), key=lambda each: each[0])]
        calls = [(call, rank) for call, rank in seen if call.confidence is not Confidence.INFERRED]
        sides: dict[tuple[str, ...], list[int]] = {}
        checked = [check for check in _CHECKS if all(check(call) is not None for call, _ in calls)]
        for call, rank in calls:
            sides.setdefault(tuple(text for check in checked if (text := check(call))), []).append(rank)
        return sides


def _operation(call: Event) -> str | None:
    if call.kind is not Kind.COLLECTIVE:
        return ""
    return call.name if call.operation else None


def _tag(call: Event) -> str:
    return f"[{call.tag}]" if call.tag else ""


def _dtype(call: Event) -> str | None:
    return call.dtype


def _sizes(call: Event) -> str | None:
    if call.sizes is None or call.operation in UNEVEN:
        return None
    return "x".join(str(list(shape)) for shape in call.sizes)


def _root(call: Event) -> str | None:
    return None if call.root is None else f"root {call.root}"


_CHECKS = (_operation, _tag, _sizes, _dtype, _root)
"""A field that one of the calls does not know (None) is compared on none of them."""


NOBODY_KNOWS = "?"
"""In place of a thread: the host of a rank whose call may be lost, which is neither here nor known to be absent."""


class Standing(StrEnum):
    """Where a host thread stands."""

    BLOCKED = "blocked"
    FINISHED = "finished"
    EXITED = "exited"
    RAISED = "raised"
    OUTSIDE = "outside"
    ELSEWHERE = "elsewhere"
    """Evidence of it shows no wait and nothing open."""
    UNKNOWN = "unknown"
    """There is no evidence of what it does."""


ROOTS = frozenset(Standing) - {Standing.BLOCKED}
"""Standings that wait for nobody."""


@dataclass(eq=False)
class Host:
    """A host thread; equal to itself only. waits: the launches it waits for, all of them or any.

    presumed: that it waits is concluded from its open launches, not seen. ahead: the calls that it would still issue,
    None where that is unknown. made: what it has issued calls on, as far as the evidence goes.
    """

    rank: int
    thread: str
    standing: Standing
    event: Event | None = None
    waits: tuple[Launch, ...] = ()
    any_of: bool = False
    presumed: bool = False
    ahead: Counter[Channel] | None = None
    made: frozenset[Channel] = frozenset()


@dataclass
class Situation:
    """Where everybody stands. launches: rank -> what it issued, in order. exclusive: one kernel at a time a device.

    quiet: nothing has moved for longer than any operation or host work takes, or ever will. unsure: rank and name of a
    group in which the rank may have made calls that the evidence lost.
    """

    hosts: list[Host]
    launches: dict[int, list[Launch]]
    meetings: dict[Key, Meeting]
    exclusive: bool = False
    quiet: bool = True
    unsure: frozenset[tuple[int, str]] = frozenset()

    def predecessors(self) -> Iterator[tuple[Launch, tuple[Launch, ...]]]:
        """Each unfinished launch with the unfinished ones right before it on its streams (and on its device)."""
        for _, launches in sorted(self.launches.items()):
            last: dict[str, Launch] = {}
            for launch in launches:
                if launch.done:
                    continue
                queues = queues_of(launch.event, self.exclusive)
                before = {id(last[queue]): last[queue] for queue in queues if queue in last}
                yield launch, tuple(before.values())
                last.update(dict.fromkeys(queues, launch))


DEVICE = "the device"
"""The queue that an exclusive device adds to the streams; no stream can have this name in the notation."""


def queues_of(event: Event, exclusive: bool) -> tuple[str, ...]:
    """The queues in which a launch has to be first: its streams, and the device where that runs one at a time."""
    return (*event.queues, DEVICE) if exclusive and event.on_device else event.queues


def reach(launch: Launch) -> tuple[dict[int, Launch], list[tuple[Meeting, Seat]]]:
    """The launches that complete together with `launch`, and the seats among them that nobody took yet.

    Usually the members of one meeting; a group ties the meetings of all its parts together.
    """
    together, empty, todo = {id(launch): launch}, [], [launch]
    seen: set[int] = set()
    while todo:
        for meeting in todo.pop().meetings:
            if id(meeting) in seen:
                continue
            seen.add(id(meeting))
            for seat in meeting.seats:
                if seat not in meeting.arrived:
                    empty.append((meeting, seat))
                elif id(other := meeting.arrived[seat][0]) not in together:
                    together[id(other)] = other
                    todo += [] if other.done else [other]
    return together, empty


def take_seats(launch: Launch, meetings: dict[Key, Meeting], counts: Counter[tuple[Channel, Seat]]) -> None:
    """Seat each call of `launch` at its meeting; `counts` is how many calls each seat has made on each channel."""
    mine = []
    for call in launch.event.calls:
        channel, seat = channel_of(call), seat_of(call)
        number = counts[channel, seat] if call.sequence is None else call.sequence
        counts[channel, seat] = max(number + 1, counts[channel, seat])
        meeting = meetings.setdefault((channel, number), Meeting((channel, number)))
        meeting.arrived[seat] = (launch, call)
        mine.append(meeting)
    launch.meetings = tuple(mine)


def waited_for(wait: Event, launches: Iterable[Launch]) -> tuple[Launch, ...]:
    """The unfinished launches that a wait waits for: all of those on its streams.

    Of an 'any of' wait, the last launch of each stream, as one drained stream is enough; nothing where one is drained.
    """
    mine = [launch for launch in launches if not launch.done]
    if not wait.any_of:
        streams = set(wait.streams)
        return tuple(one for one in mine if "*" in streams or not streams.isdisjoint(one.event.queues))
    last = [[one for one in mine if stream in one.event.queues or stream == "*"][-1:] for stream in wait.streams]
    return tuple(one for found in last for one in found) if all(last) else ()
