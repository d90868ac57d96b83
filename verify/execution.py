"""What happens when every rank runs its program: host order, streams, room on the device, and who meets whom.

A host issues its calls in order, and stops at a blocking call or a wait. A launch starts when it is first on all of its
streams; with `exclusive`, when it is also the first unfinished of its device, in issue order. Launches that meet finish
together once all of them have started, unless their calls disagree. All of these facts are monotone, so where a rank
has one thread every order of events ends in the same situation (Kahn; Siegel and Avrunin) and one run decides. Threads
of one rank that share a stream, a channel or an exclusive device race in their issue order: those orders are explored.
In issue order the kernels of a device are one chain, so that a schedule deadlocks exactly if the device orders of the
ranks have a cycle, and with room for all of them (width) only stream and host order count.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from verify.events import Kind
from verify.matching import (
    Host,
    Launch,
    Situation,
    Standing,
    channel_of,
    queues_of,
    reach,
    take_seats,
    waited_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from verify.events import Event, Lane, Program
    from verify.matching import Channel, Key, Meeting, Seat


class Execution:
    """A run of a program, one host step at a time. Devices go as far as they can after each."""

    def __init__(self, program: Program, exclusive: bool = False) -> None:
        self.lanes: Sequence[Lane] = program.lanes
        self.exclusive = exclusive
        self.at = [0] * len(self.lanes)
        self.waits: list[tuple[Launch, ...]] = [()] * len(self.lanes)
        self.launches: dict[int, list[Launch]] = {rank: [] for rank in program.ranks}
        self.meetings: dict[Key, Meeting] = {}
        self.trail: list[int] = []
        self._counts: Counter[tuple[Channel, Seat]] = Counter()
        self._queues: dict[int, dict[str, deque[Launch]]] = {rank: {} for rank in program.ranks}

    def next(self, lane: int) -> Event | None:
        """What `lane` does next if it may: None where it waits, has left or is at its end."""
        events, at = self.lanes[lane].events, self.at[lane]
        if at == len(events) or events[at].kind in (Kind.EXTERNAL, Kind.EXIT):
            return None
        return None if self._waits(lane) else events[at]

    def step(self, lane: int) -> None:
        """Let `lane`, which may, do its next event."""
        event = self.lanes[lane].events[self.at[lane]]
        rank = self.lanes[lane].rank
        self.at[lane] += 1
        self.trail.append(lane)
        self.waits[lane] = ()
        if event.kind is Kind.WAIT:
            self.waits[lane] = waited_for(event, self._unfinished(rank, event.streams))
        elif event.calls:
            launch = Launch(event, len(self.launches[rank]))
            self.launches[rank].append(launch)
            take_seats(launch, self.meetings, self._counts)
            for queue in queues_of(event, self.exclusive):
                self._queues[rank].setdefault(queue, deque()).append(launch)
            if event.blocking:
                self.waits[lane] = (launch,)
            self._advance(launch)

    def run(self, lanes: Iterable[int] | None = None) -> None:
        """Go on until no lane (of `lanes`) can."""
        chosen = range(len(self.lanes)) if lanes is None else tuple(lanes)
        moved = True
        while moved:
            moved = False
            for lane in chosen:
                while self.next(lane) is not None:
                    self.step(lane)
                    moved = True

    def situation(self) -> Situation:
        """Where everybody stands now."""
        return Situation(list(map(self._host, range(len(self.lanes)))), self.launches, self.meetings, self.exclusive)

    def _waits(self, lane: int) -> bool:
        """Whether what `lane` did last keeps it."""
        waits = self.waits[lane]
        over = any if waits and self.lanes[lane].events[self.at[lane] - 1].any_of else all
        return not over(launch.done for launch in waits)

    def _unfinished(self, rank: int, streams: tuple[str, ...]) -> list[Launch]:
        """What stands in the queues of `streams`, in issue order."""
        lines = [line for name, line in self._queues[rank].items() if name in streams or "*" in streams]
        return sorted({id(one): one for line in lines for one in line}.values(), key=lambda one: one.order)

    def _advance(self, launch: Launch) -> None:
        todo = [launch]
        while todo:
            one = todo.pop()
            queues = [self._queues[one.rank][queue] for queue in queues_of(one.event, self.exclusive)]
            if one.done or not all(queue[0] is one for queue in queues):
                continue
            if not one.started:
                one.started = True
                for meeting in one.meetings:
                    meeting.started += 1
            if any(meeting.started < len(meeting.seats) for meeting in one.meetings):
                continue
            together, empty = reach(one)
            if empty or not all(each.started for each in together.values()):
                continue
            met = {id(meeting): meeting for each in together.values() for meeting in each.meetings}
            if not all(meeting.agrees() for meeting in met.values()):
                continue
            for each in together.values():
                each.done = True
                for queue in queues_of(each.event, self.exclusive):
                    line = self._queues[each.rank][queue]
                    line.popleft()
                    todo += [line[0]] if line else []

    def _host(self, lane: int) -> Host:
        mine, at = self.lanes[lane], self.at[lane]
        left = mine.events[at:]
        event = left[0] if left else None
        waits: tuple[Launch, ...] = ()
        if self._waits(lane):
            event, waits = mine.events[at - 1], tuple(launch for launch in self.waits[lane] if not launch.done)
            standing = Standing.BLOCKED
        elif event is None:
            standing = Standing.FINISHED
        elif event.kind is Kind.EXIT:
            standing = Standing.RAISED if event.operation else Standing.EXITED
        else:
            standing = Standing.OUTSIDE if event.kind is Kind.EXTERNAL else Standing.ELSEWHERE
        ahead = Counter(channel_of(call) for each in left for call in each.calls)
        any_of = bool(waits and event is not None and event.any_of)
        return Host(mine.rank, mine.thread, standing, event, waits, any_of, ahead=ahead)


def races(program: Program, exclusive: bool) -> frozenset[int]:
    """Lanes whose issue order matters: those of a rank whose threads share a queue, a channel or waited streams."""
    racing: set[int] = set()
    used: dict[tuple[int, object], set[int]] = {}
    threads = Counter(lane.rank for lane in program.lanes)
    for number, lane in enumerate(program.lanes):
        for event in lane.events if threads[lane.rank] > 1 else ():
            names: set[object] = {*queues_of(event, exclusive), *event.streams, *map(channel_of, event.calls)}
            for name in names:
                used.setdefault((lane.rank, name), set()).add(number)
    for (rank, name), lanes in used.items():
        everything = {n for n, lane in enumerate(program.lanes) if lane.rank == rank} if name == "*" else lanes
        racing |= everything if len(everything) > 1 else set()
    return frozenset(racing)


def executions(program: Program, exclusive: bool = False, budget: int = 2000) -> Iterator[Execution | None]:
    """The runs that differ, each to its end; a None last says that `budget` runs did not suffice.

    One run where no threads race. Otherwise depth-first over which racing thread issues next, each situation once.
    """
    racing = sorted(races(program, exclusive))
    if not racing:
        run = Execution(program, exclusive)
        run.run()
        yield run
        return
    calm = [lane for lane in range(len(program.lanes)) if lane not in racing]
    seen: set[object] = set()
    todo: list[tuple[int, ...]] = [()]
    runs = 0
    while todo:
        choices = todo.pop()
        run = Execution(program, exclusive)
        run.run(calm)
        for lane in choices:
            run.step(lane)
            run.run(calm)
        runs += 1
        if runs > budget:
            yield None
            return
        mark = tuple((rank, tuple((each.event, each.done) for each in one)) for rank, one in run.launches.items())
        if (state := (tuple(run.at), mark, tuple(tuple(w.order for w in waits) for waits in run.waits))) in seen:
            continue
        seen.add(state)
        able = [lane for lane in racing if run.next(lane) is not None]
        if able:
            todo += [(*choices, lane) for lane in reversed(able)]
        else:
            yield run
