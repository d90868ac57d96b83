"""All schedules of a small device program, by explicit search. An oracle: it shares no code with the package.

A `Job` is ranks with host threads and one device each. What can happen, one at a time and in any order:

    host        a thread does its next operation: Enqueue (only while fewer than `depth` kernels of the stream are
                unfinished), Wait (until an instance has finished), Barrier (until all threads with that barrier are
                there; each goes on by itself)
    arrival     the first unfinished kernel of a stream, once the instances in its `after` have finished, joins the
                device's queue. Room is granted in order of arrival, first that fits, at each arrival and each release
    firing      an instance finishes when the kernels of all its members are resident: all release their room
    compute     a resident kernel without an instance finishes by itself

A state from which nothing can happen and in which something is unfinished is a deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random


@dataclass(frozen=True)
class Enqueue:
    """Put a kernel of `instance` (None: compute) on `stream`. weight: room. after: instances that must have finished,
    as an event of the device makes it wait."""

    instance: str | None
    stream: str = "s"
    weight: int = 1
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wait:
    """The thread goes on when `instance` has finished."""

    instance: str


@dataclass(frozen=True)
class Barrier:
    """The threads that have a barrier of this name go on when all of them are there. Once a thread."""

    name: str


Op = Enqueue | Wait | Barrier


@dataclass(frozen=True)
class Rank:
    """threads: what each host thread does. capacity: room of the device. depth: of a launch queue, None: no end."""

    threads: tuple[tuple[Op, ...], ...]
    capacity: int = 1
    depth: int | None = None


@dataclass(frozen=True)
class Job:
    """ranks: by number. members: instance -> ranks that must come; by default those that have a kernel of it."""

    ranks: tuple[Rank, ...]
    members: dict[str, frozenset[int]] = field(default_factory=dict)


class TooManyStates(Exception):
    """The search was not finished."""


class _State(NamedTuple):
    """at: position of each thread. queues: kernels of each stream that are unfinished. hardware: of each device, those
    that have arrived and wait for room, in order. resident: kernels. done: instances."""

    at: tuple[int, ...]
    queues: tuple[tuple[int, ...], ...]
    hardware: tuple[tuple[int, ...], ...]
    resident: frozenset[int]
    done: frozenset[str]


def search(job: Job, *, limit: int = 200_000, every: bool = False) -> dict[str, Any]:
    """{"deadlock": whether some schedule ends in one, "states": how many were visited, "stuck": an example or None}.

    every: keep also the order of host steps that commute with all else. By default such a step (a thread that shares
    its streams with no other) is taken at once: it stays possible and changes nothing for others, so that no deadlock
    is lost. Raises TooManyStates beyond `limit`.
    """
    system = _System(job, every)
    first = system.first()
    seen, todo = {first}, [first]
    stuck: _State | None = None
    while todo:
        state = todo.pop()
        following = list(system.steps(state))
        if not following and system.unfinished(state):
            stuck = stuck or state
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if len(seen) > limit:
            raise TooManyStates(f"more than {limit} states")
    return {"deadlock": stuck is not None, "states": len(seen), "stuck": stuck}


class _System:
    def __init__(self, job: Job, every: bool) -> None:
        self.job = job
        self.threads = [(rank, ops) for rank, each in enumerate(job.ranks) for ops in each.threads]
        self.kernels: list[tuple[int, Enqueue]] = []
        self.number: dict[tuple[int, int], int] = {}
        streams: dict[tuple[int, str], int] = {}
        users: dict[tuple[int, str], set[int]] = {}
        self.barriers: dict[str, list[tuple[int, int]]] = {}
        members: dict[str, set[int]] = {}
        for thread, (rank, ops) in enumerate(self.threads):
            for place, op in enumerate(ops):
                if isinstance(op, Enqueue):
                    self.number[thread, place] = len(self.kernels)
                    self.kernels.append((rank, op))
                    streams.setdefault((rank, op.stream), len(streams))
                    users.setdefault((rank, op.stream), set()).add(thread)
                    if op.instance is not None:
                        members.setdefault(op.instance, set()).add(rank)
                elif isinstance(op, Barrier):
                    self.barriers.setdefault(op.name, []).append((thread, place))
        self.stream_of = [streams[rank, op.stream] for rank, op in self.kernels]
        self.streams = len(streams)
        self.members = {**{name: frozenset(who) for name, who in members.items()}, **job.members}
        self.calm = [
            not every and all(len(users[rank, op.stream]) == 1 for op in ops if isinstance(op, Enqueue))
            for rank, ops in self.threads
        ]

    def first(self) -> _State:
        hardware: tuple[tuple[int, ...], ...] = ((),) * len(self.job.ranks)
        return _State((0,) * len(self.threads), ((),) * self.streams, hardware, frozenset(), frozenset())

    def unfinished(self, state: _State) -> bool:
        return any(state.queues) or any(at < len(ops) for at, (_, ops) in zip(state.at, self.threads, strict=True))

    def steps(self, state: _State) -> Iterator[_State]:
        hosts = [thread for thread in range(len(self.threads)) if self.may(state, thread)]
        for thread in hosts:
            if self.calm[thread]:
                yield self.host(state, thread)
                return
        for thread in hosts:
            yield self.host(state, thread)
        for line in state.queues:
            if line and self.arrives(state, line[0]):
                yield self.arrival(state, line[0])
        here: dict[str, set[int]] = {}
        for kernel in sorted(state.resident):
            rank, op = self.kernels[kernel]
            if op.instance is None:
                yield self.finish(state, [kernel], None)
            else:
                here.setdefault(op.instance, set()).add(rank)
        for instance, ranks in here.items():
            if ranks == self.members[instance]:
                fired = [each for each in state.resident if self.kernels[each][1].instance == instance]
                yield self.finish(state, fired, instance)

    def may(self, state: _State, thread: int) -> bool:
        rank, ops = self.threads[thread]
        at = state.at[thread]
        if at == len(ops):
            return False
        op = ops[at]
        if isinstance(op, Enqueue):
            depth = self.job.ranks[rank].depth
            return depth is None or len(state.queues[self.stream_of[self.number[thread, at]]]) < depth
        if isinstance(op, Wait):
            return op.instance in state.done
        return all(state.at[other] >= place for other, place in self.barriers[op.name])

    def host(self, state: _State, thread: int) -> _State:
        at = state.at[thread]
        queues = state.queues
        if isinstance(self.threads[thread][1][at], Enqueue):
            kernel = self.number[thread, at]
            stream = self.stream_of[kernel]
            queues = (*queues[:stream], (*queues[stream], kernel), *queues[stream + 1 :])
        return _State(
            (*state.at[:thread], at + 1, *state.at[thread + 1 :]), queues, state.hardware, state.resident, state.done
        )

    def arrives(self, state: _State, kernel: int) -> bool:
        rank, op = self.kernels[kernel]
        there = kernel in state.resident or kernel in state.hardware[rank]
        return not there and all(each in state.done for each in op.after)

    def arrival(self, state: _State, kernel: int) -> _State:
        rank = self.kernels[kernel][0]
        waiting, resident = self.grant(rank, (*state.hardware[rank], kernel), state.resident)
        hardware = (*state.hardware[:rank], waiting, *state.hardware[rank + 1 :])
        return _State(state.at, state.queues, hardware, resident, state.done)

    def grant(
        self, rank: int, waiting: tuple[int, ...], resident: frozenset[int]
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        used = sum(self.kernels[each][1].weight for each in resident if self.kernels[each][0] == rank)
        left: list[int] = []
        for kernel in waiting:
            weight = self.kernels[kernel][1].weight
            if used + weight <= self.job.ranks[rank].capacity:
                used += weight
                resident |= {kernel}
            else:
                left.append(kernel)
        return tuple(left), resident

    def finish(self, state: _State, kernels: list[int], instance: str | None) -> _State:
        queues, hardware = list(state.queues), list(state.hardware)
        resident = state.resident - frozenset(kernels)
        for kernel in kernels:
            queues[self.stream_of[kernel]] = tuple(each for each in queues[self.stream_of[kernel]] if each != kernel)
        for rank in sorted({self.kernels[kernel][0] for kernel in kernels}):
            hardware[rank], resident = self.grant(rank, hardware[rank], resident)
        done = state.done | {instance} if instance is not None else state.done
        return _State(state.at, tuple(queues), tuple(hardware), resident, done)


def random_job(
    rng: Random,
    *,
    ranks: tuple[int, int] = (2, 4),
    instances: tuple[int, int] = (2, 5),
    streams: tuple[int, int] = (1, 3),
    weights: tuple[int, int] = (1, 1),
    waits: float = 0.0,
    events: float = 0.0,
    computes: float = 0.0,
    barriers: float = 0.0,
    shuffled: float = 0.3,
    threads: int = 1,
) -> Job:
    """A random job of `instances` collectives over `ranks` devices, each kernel on a random stream of its rank.

    Ranges are inclusive. weights: of an instance, the same on all members; computing takes the least. shuffled: chance
    that a rank issues in an order of its own, else that of the others. waits: chance of a host wait after a call.
    events: chance that a kernel waits for an earlier one of its rank. computes: chance of a compute kernel before a
    call. barriers: chance that all ranks meet after a call that all of them have. threads: most a rank has. Devices
    have room 1: see `with_capacity`.
    """
    count, many = rng.randint(*ranks), rng.randint(*instances)
    names = [f"c{n}" for n in range(many)]
    heavy = {name: rng.randint(*weights) for name in names}
    who = {name: sorted(rng.sample(range(count), rng.randint(2, count))) for name in names}
    common = set(rng.sample(names, rng.randint(0, many))) if barriers else set()
    meets = {name for name in names if name in common and len(who[name]) == count and rng.random() < barriers}
    built: list[Rank] = []
    for rank in range(count):
        mine = [name for name in names if rank in who[name]]
        if rng.random() < shuffled:
            rng.shuffle(mine)
        lines = rng.randint(*streams)
        lanes: list[list[Op]] = [[] for _ in range(rng.randint(1, threads))]
        earlier: list[str] = []
        for name in mine:
            ops = rng.choice(lanes)
            if rng.random() < computes:
                ops.append(Enqueue(None, f"s{rng.randrange(lines)}", weights[0]))
            after = tuple(rng.sample(earlier, 1)) if earlier and rng.random() < events else ()
            ops.append(Enqueue(name, f"s{rng.randrange(lines)}", heavy[name], after))
            earlier.append(name)
            if rng.random() < waits:
                ops.append(Wait(rng.choice(earlier)))
            if name in meets:
                ops.append(Barrier(f"after {name}"))
        built.append(Rank(tuple(map(tuple, lanes))))
    return Job(tuple(built))


def with_capacity(job: Job, *capacities: int) -> Job:
    """The same job with room `capacities` of its ranks (the last one holds for all further ranks)."""
    rooms = [capacities[min(rank, len(capacities) - 1)] for rank in range(len(job.ranks))]
    return Job(
        tuple(Rank(each.threads, room, each.depth) for each, room in zip(job.ranks, rooms, strict=True)), job.members
    )
