"""The simulated device: streams, edges, room and collectives, against an independent brute force of the same rules."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import ModelError, OrderViolation, RankLost, UsageError
from kernel.program import Program
from kernel.request import Phase
from kernel.topology import Role, World
from verify.sim.errors import Deadlock
from verify.sim.kernels import Chip, Kernel
from verify.sim.loop import RankLoop
from verify.sim.scheduler import Scheduler
from verify.sim.world import WIDE, SimRank, SimWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.sim.scheduler import Actor

FOUR = World(4, adp=2)
ROUTED = next(call for call in Program(FOUR, Phase.P, 1).calls if call.routed)


# -- tiny device programs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One collective of a program: `group` of `role`, of `phase`, on D's stream if routed."""

    phase: Phase
    role: Role
    group: tuple[int, ...]
    routed: bool = False

    @property
    def stream(self) -> Phase:
        return Phase.D if self.routed else self.phase


@dataclass(frozen=True)
class DeviceProgram:
    """orders: for each rank, indices into `pieces` in the order in which its host enqueues them."""

    pieces: tuple[Piece, ...]
    orders: tuple[tuple[int, ...], ...]
    capacity: int
    weights: tuple[int, int]


@st.composite
def programs(draw: st.DrawFn) -> DeviceProgram:
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        phase = draw(st.sampled_from(list(Phase)))
        role = draw(st.sampled_from([Role.TP, Role.ATP, Role.ADP]))
        group = draw(st.sampled_from(FOUR.groups[role]))
        pieces.append(Piece(phase, role, group, phase is Phase.P and draw(st.booleans())))
    orders = []
    for rank in range(4):
        mine = draw(st.permutations([i for i, piece in enumerate(pieces) if rank in piece.group]))
        # Members of one communicator make its calls in the same order, on the same stream: the rest is free.
        last: dict[Any, list[int]] = {}
        for i in mine:
            last.setdefault((pieces[i].phase, pieces[i].group), []).append(i)
        queues = {key: iter(sorted(found)) for key, found in last.items()}
        orders.append(tuple(next(queues[pieces[i].phase, pieces[i].group]) for i in mine))
    weights = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    return DeviceProgram(tuple(pieces), tuple(orders), draw(st.integers(max(weights), 4)), weights)


def chains(program: DeviceProgram, rank: int) -> dict[int, set[int]]:
    """For each piece of a rank, the pieces that must have finished before it starts: the stream's order and edges."""
    before: dict[int, set[int]] = {}
    tails: dict[Phase, set[int]] = {Phase.D: set(), Phase.P: set()}
    for i in program.orders[rank]:
        piece = program.pieces[i]
        before[i] = set(tails[piece.stream])
        if piece.routed:
            before[i] |= tails[Phase.P]
            tails[Phase.P] = {i}
        tails[piece.stream] = {i}
    return before


def can_deadlock(program: DeviceProgram) -> bool:
    """Explicit search over all states: which pieces are resident where, and which have finished."""
    before = [chains(program, rank) for rank in range(4)]
    weight = dict(zip((Phase.D, Phase.P), program.weights, strict=True))
    start: tuple[frozenset[tuple[int, int]], frozenset[int]] = (frozenset(), frozenset())
    seen, todo = {start}, [start]
    while todo:
        resident, done = todo.pop()
        nexts = []
        for rank in range(4):
            used = sum(weight[program.pieces[i].phase] for r, i in resident if r == rank)
            for i in program.orders[rank]:
                fits = used + weight[program.pieces[i].phase] <= program.capacity
                if (rank, i) not in resident and i not in done and before[rank][i] <= done and fits:
                    nexts.append((resident | {(rank, i)}, done))
        for i, piece in enumerate(program.pieces):
            members = {(rank, i) for rank in piece.group}
            if i not in done and members <= resident:
                nexts.append((resident - members, done | {i}))
        if not nexts and len(done) < len(program.pieces):
            return True
        for state in nexts:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return False


def host(program: DeviceProgram) -> Callable[[SimRank], Any]:
    """The program as host code: everything is enqueued at once."""

    async def main(sim: SimRank) -> None:
        device, route = sim.device, sim.device.route()
        for i in program.orders[sim.rank]:
            piece = program.pieces[i]
            group = device.collectives(piece.phase)

            def work(piece: Piece = piece, group: Any = group) -> None:
                if piece.routed:
                    route.reserve([ROUTED])
                    route.run(ROUTED, lambda: group.all_reduce(piece.role, 1))
                else:
                    group.all_reduce(piece.role, 1)

            device.stream(piece.phase).submit(work, f"piece {i}")

    return main


class Seen(Exception):
    """The rest of this execution has been explored from an equal state."""


@dataclass
class Search:
    """Depth-first over all choices, cut where a state of the devices comes back."""

    program: DeviceProgram
    states: set[Any] = field(default_factory=set)
    deadlocks: int = 0
    completed: int = 0

    def explore(self) -> None:
        todo: list[list[int]] = [[]]
        while todo:
            prefix, path, world = todo.pop(), list[int](), None

            def choose(options: Sequence[Actor], prefix: list[int] = prefix, path: list[int] = path) -> int:
                for index, option in enumerate(options):
                    if isinstance(option, RankLoop):  # hosts only enqueue: when they do so is no choice of the device
                        return index
                if len(path) < len(prefix):
                    path.append(prefix[len(path)])
                    return path[-1]
                state = self.state(world, options)  # noqa: B023
                if state in self.states:
                    raise Seen
                self.states.add(state)
                todo.extend([*path, other] for other in range(1, len(options)))
                path.append(0)
                return 0

            world = SimWorld(
                FOUR, capacity=self.program.capacity, weights=self.program.weights, choose=choose, log=False
            )
            try:
                world.run(host(self.program))
                self.completed += 1
            except Deadlock:
                self.deadlocks += 1
            except Seen:
                pass

    @staticmethod
    def state(world: Any, options: Sequence[Actor]) -> Any:
        chips = [sim.device.chip for sim in world.ranks]
        queues = [
            tuple((kernel.label, kernel.arrived, kernel.resident) for kernel in queue.items)
            for chip in chips
            for queue in chip.queues.values()
        ]
        waiting = [tuple(str(kernel) for kernel in chip._hardware) for chip in chips]
        return tuple(queues), tuple(waiting), tuple(sorted(map(str, options)))


@settings(max_examples=max(20, settings().max_examples // 3))
@given(programs())
def test_a_program_can_deadlock_here_exactly_if_brute_force_says_so(program: DeviceProgram) -> None:
    search = Search(program)
    search.explore()
    assert (search.deadlocks > 0) is can_deadlock(program)
    assert search.deadlocks or search.completed


def test_the_brute_force_is_worth_comparing_with() -> None:
    """Both answers occur, for one crossed pair, as room is taken away."""
    two = (0, 1)
    pair = (Piece(Phase.D, Role.ATP, two), Piece(Phase.P, Role.ATP, two))
    routed = (pair[0], Piece(Phase.P, Role.ATP, two, routed=True))
    apart = (pair[0], Piece(Phase.P, Role.ADP, (0, 2)))  # only rank 0 has to choose
    crossed, aligned = ((0, 1), (1, 0), (), ()), ((0, 1), (0, 1), (), ())
    cases = [
        (pair, crossed, 1, (1, 1), True),
        (pair, crossed, 2, (1, 1), False),
        (pair, crossed, 2, (1, 2), True),
        (routed, aligned, 1, (1, 1), False),
        (routed, crossed, WIDE, (1, 1), True),
        (apart, ((0, 1), (0,), (1,), ()), 1, (1, 1), False),
    ]
    for pieces, orders, capacity, weights, stuck in cases:
        search = Search(DeviceProgram(pieces, orders, capacity, weights))
        search.explore()
        assert (can_deadlock(search.program), search.deadlocks > 0) == (stuck, stuck)
        assert stuck or search.completed


# -- order and time ---------------------------------------------------------------------------------------------------


def spans(log: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """(start, finish) of each kernel that took room or time, by label."""
    starts: dict[str, int] = {}
    found: dict[str, tuple[int, int]] = {}
    for at, what, _, label in log:
        if what == "start":
            starts[label] = at
        elif what == "finish" and label in starts:
            found[label] = (starts[label], at)
    return found


@st.composite
def timed(draw: st.DrawFn) -> list[tuple[Phase, int, int, bool]]:
    """(phase, compute before, compute after, routed) of successive submissions, the same on all ranks."""
    times = st.integers(0, 5)
    parts = st.tuples(st.sampled_from(list(Phase)), times, times, st.booleans())
    return [(phase, a, b, phase is Phase.P and routed) for phase, a, b, routed in draw(st.lists(parts, min_size=1))]


@given(timed(), st.integers(0, 3), st.integers(0, 2**32))
def test_streams_are_fifo_and_routed_work_has_edges_both_ways(
    parts: list[tuple[Phase, int, int, bool]], cost: int, seed: int
) -> None:
    async def main(sim: SimRank) -> None:
        device, route, slow = sim.device, sim.device.route(), 1 + sim.rank
        for i, (phase, first, second, routed) in enumerate(parts):

            def work(i: int = i, phase: Phase = phase, a: int = first, b: int = second, routed: bool = routed) -> None:
                group = device.collectives(phase)
                device.compute(f"before {i}", a * slow)
                if routed:
                    route.reserve([ROUTED])
                    route.run(ROUTED, lambda: group.all_reduce(Role.TP, i))
                else:
                    group.all_reduce(Role.TP, i)
                device.compute(f"after {i}", b * slow)

            device.stream(phase).submit(work, f"work {i}")

    draws = random.Random(seed)
    world = SimWorld(FOUR, collective_ns=lambda op, members, rows: cost, choose=lambda o: draws.randrange(len(o)))
    world.run(main)
    meetings: dict[str, list[tuple[int, int]]] = {}
    for sim in world.ranks:
        found, count = spans(sim.log), dict.fromkeys(Phase, 0)
        sequences: dict[Phase, list[str]] = {phase: [] for phase in Phase}
        for i, (phase, first, second, routed) in enumerate(parts):
            label = f"{phase} all_reduce TP #{count[phase]}"
            count[phase] += 1
            own = [f"before {i}"] * bool(first) + [label] + [f"after {i}"] * bool(second)
            sequences[phase] += own  # P's kernels and what is routed for them: the edges make one chain of them
            if routed:
                sequences[Phase.D].append(label)
            meetings.setdefault(label, []).append(found[label])
        for sequence in sequences.values():
            for earlier, later in pairwise(sequence):
                assert found[earlier][1] <= found[later][0], (earlier, later)
        for i, (_, first, second, _) in enumerate(parts):
            for label, units in ((f"before {i}", first), (f"after {i}", second)):
                if units:
                    assert found[label][1] - found[label][0] == units * (1 + sim.rank)
    for label, members in meetings.items():
        assert {finish for _, finish in members} == {max(start for start, _ in members) + cost}, label


def test_the_event_of_a_submission_is_the_end_of_all_it_enqueued() -> None:
    async def main(sim: SimRank) -> list[int]:
        device, group, route = sim.device, sim.device.collectives(Phase.P), sim.device.route()
        d, p = device.stream(Phase.D), device.stream(Phase.P)
        times = []

        def routed() -> str:
            route.reserve([ROUTED])
            route.run(ROUTED, lambda: group.all_reduce(Role.TP, 1))
            return "routed"

        blocked = d.submit(lambda: device.compute("d", 30) and "d", "D 0")
        event = p.submit(routed, "P 0")
        nothing = p.submit(lambda: "nothing", "P 1")
        assert not event.done()
        for each, value in ((event, "routed"), (nothing, "nothing"), (blocked, None)):
            result = await each.wait()
            assert value is None or result == value
            times.append(sim.clock.now_ns())
            assert each.done()
            assert await each.wait() is result
        empty = d.submit(lambda: "at once", "D 1")
        assert empty.done()
        assert await empty.wait() == "at once"
        return times

    assert SimWorld(FOUR, collective_ns=lambda *_: 7).run(main) == [[37, 37, 37]] * 4


def test_thousands_of_empty_submissions_in_a_row() -> None:
    async def main(sim: SimRank) -> None:
        stream = sim.device.stream(Phase.D)
        stream.submit(lambda: sim.device.compute("long", 10), "D")
        events = [stream.submit(lambda: None, f"D {i}") for i in range(5000)]
        await events[-1].wait()
        assert all(event.done() for event in events)

    SimWorld(World(1)).run(main)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_compute_of_two_streams_shares_the_device(a: int, b: int, later: int, contention: float) -> None:
    """Fluid model: while both run, each goes at 1 / (1 + contention)."""
    a, b, later = a * 1000, b * 1000, later * 1000

    async def main(sim: SimRank) -> tuple[int, int]:
        first = sim.device.stream(Phase.D).submit(lambda: sim.device.compute("a", a), "D")
        ends = [0, 0]

        async def second() -> None:
            await asyncio.sleep(later / 1e9)
            await sim.device.stream(Phase.P).submit(lambda: sim.device.compute("b", b), "P").wait()
            ends[1] = sim.clock.now_ns()

        task = sim.loop.create_task(second())
        await first.wait()
        ends[0] = sim.clock.now_ns()
        await task
        return ends[0], ends[1]

    world = World(1)
    simulated = SimWorld(world, contention=contention)
    found = simulated.run(main)[0]
    slow = 1 + contention
    if later >= a:
        expected = (a, later + b)
    else:
        left = a - later
        both = min(left, b)
        ends = later + both * slow
        expected = (ends + (left - both), ends + (b - both))  # type: ignore[assignment]
    assert found == pytest.approx(expected, abs=10)


# -- rules ------------------------------------------------------------------------------------------------------------


def raises(kind: type[BaseException], match: str, main: Any, **options: Any) -> None:
    with pytest.raises(kind, match=match):
        SimWorld(FOUR, **options).run(main)


def test_work_outside_a_submission_and_of_the_other_phase_is_refused() -> None:
    async def outside(sim: SimRank) -> None:
        sim.device.collectives(Phase.D).all_reduce(Role.TP, 1)

    raises(OrderViolation, "rank 0 called all_reduce outside work submitted to a stream", outside)

    async def others(sim: SimRank) -> None:
        group = sim.device.collectives(Phase.P)
        await sim.device.stream(Phase.D).submit(lambda: group.all_reduce(Role.TP, 1), "D").wait()

    raises(OrderViolation, "rank 0 used the TP communicator of P in work of D", others)

    async def nested(sim: SimRank) -> None:
        stream = sim.device.stream(Phase.D)
        await stream.submit(lambda: stream.submit(lambda: None, "inner"), "outer").wait()

    raises(OrderViolation, "submitted inner from inside work of D", nested)


def test_routed_calls_run_in_the_order_of_their_reservation_and_before_the_next_decode() -> None:
    calls = [call for call in Program(FOUR, Phase.P, 2).calls if call.routed]

    async def swapped(sim: SimRank) -> None:
        route = sim.device.route()
        route.reserve(calls[:2])
        await sim.device.stream(Phase.P).submit(lambda: route.run(calls[1], lambda: None), "P").wait()

    raises(OrderViolation, "routes .*, but .* is reserved next", swapped)

    async def unreserved(sim: SimRank) -> None:
        route = sim.device.route()
        await sim.device.stream(Phase.P).submit(lambda: route.run(calls[0], lambda: None), "P").wait()

    raises(OrderViolation, "but nothing is reserved next", unreserved)

    async def overtaken(sim: SimRank) -> None:
        sim.device.route().reserve(calls[:1])
        sim.device.stream(Phase.D).submit(lambda: None, "D 0")

    raises(OrderViolation, "launched D 0 before .* whose place was reserved earlier", overtaken)

    async def from_decode(sim: SimRank) -> None:
        route = sim.device.route()

        def work() -> None:
            route.reserve(calls[:1])
            route.run(calls[0], lambda: None)

        await sim.device.stream(Phase.D).submit(work, "D").wait()

    raises(OrderViolation, "outside P's work", from_decode)

    async def forgotten(sim: SimRank) -> None:
        sim.device.route().reserve(calls[:1])

    raises(Exception, "reserved a place for .* and never ran it", forgotten)


def test_row_counts_must_add_up() -> None:
    async def splits(sim: SimRank) -> None:
        group = sim.device.collectives(Phase.D)
        await sim.device.stream(Phase.D).submit(lambda: group.reduce_scatter(Role.TP, 5, [1, 1, 1, 1]), "D").wait()

    raises(ModelError, "splits 5 rows", splits)

    async def shapes(sim: SimRank) -> list[int]:
        group = sim.device.collectives(Phase.D)

        def work() -> list[int]:
            return [
                group.all_reduce(Role.TP, 5),
                group.all_gather(Role.ADP, 5),
                group.all_gather(Role.TP, 5, dim=-1),
                group.reduce_scatter(Role.TP, 10, [1, 2, 3, 4]),
                sim.device.layout.place(2, 3, 9),
                sim.device.layout.take(9, [(0, 2), (5, 9)]),
            ]

        return await sim.device.stream(Phase.D).submit(work, "D").wait()

    assert SimWorld(FOUR).run(shapes) == [[5, 10, 5, share, 9, 6] for share in (1, 2, 3, 4)]
    layout = SimWorld(FOUR).ranks[0].device.layout
    with pytest.raises(ModelError, match="do not fit"):
        layout.place(3, 7, 9)
    with pytest.raises(ModelError, match="of a tensor of 9 rows"):
        layout.take(9, [(5, 10)])


def test_closing_drops_what_has_not_started() -> None:
    async def main(sim: SimRank) -> int:
        stream = sim.device.stream(Phase.D)
        running = stream.submit(lambda: sim.device.compute("a", 100), "D 0")
        waiting = stream.submit(lambda: sim.device.compute("b", 100), "D 1")
        await asyncio.sleep(50e-9)
        await sim.device.close()
        await sim.device.close()
        with pytest.raises(RankLost, match=f"rank {sim.rank} closed its device before D 1"):
            await waiting.wait()
        with pytest.raises(RankLost, match="submitted D 2 to a closed device"):
            stream.submit(lambda: None, "D 2")
        assert not running.done()
        return sim.clock.now_ns()

    world = SimWorld(World(2))
    assert world.run(main) == [50, 50]
    assert world.now_ns == 100
    assert [what for _, what, _, label in world.ranks[0].log if label == "b"] == ["enqueue", "drop"]


def test_a_kernel_larger_than_the_device_is_refused() -> None:
    chip = Chip(0, Scheduler(), 2)
    with pytest.raises(UsageError, match="takes 3 slots of a device that has 2"):
        chip.queues[Phase.D].append(Kernel("big", 3))
