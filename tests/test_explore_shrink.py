"""Making failures smaller: decisions, switches between ranks, scenarios; and where a schedule went wrong."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.topology import World
from tests.failing import Forgets, Late, on_ranks, racing
from verify.blame import Class
from verify.explore.critical import after, critical_step
from verify.explore.dpor import explore
from verify.explore.execution import execute
from verify.explore.schedule import Follower, Schedule, Steered, followed, made, one_away
from verify.explore.search import uniform
from verify.explore.shrink import (
    Sign,
    also_before,
    few_switches,
    fewer_decisions,
    in_order,
    rank_of,
    search,
    sign,
    smaller_scenario,
    switches,
)
from verify.explore.smaller import case_of, smaller
from verify.sim.trace import Trace
from verify.sim.world import WIDE
from verify.trial.family import family

if TYPE_CHECKING:
    from verify.explore.execution import Execution

ROOM = Sign(Class.CYCLE, "deadlock_free", ("D", "P", "room"))
QUEUE = Sign(Class.CYCLE, "deadlock_free", ("D", "P", "queue"))


def failing(program: Any, fifo: bool = False) -> Execution:
    if fifo:
        return by_chance(program).execution
    found = search(program, ROOM, fifo)
    assert found is not None
    return found


def by_chance(program: Any, fifo: bool = True, seed: int = 0) -> Schedule:
    tried = (followed(program, (), fifo, instead=uniform(number)) for number in range(seed, 1000))
    return next(schedule for schedule in tried if ROOM.of(schedule.execution))


# -- schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_schedule_is_followed_step_by_step_and_written_down(fifo: bool, seed: int) -> None:
    program = racing(3, rounds=2, capacity=1 + seed % 2)
    first = execute(program, uniform(seed), fifo)
    again = followed(program, first.trace.names, fifo)
    assert again.names == first.trace.names
    assert sign(again.execution) == sign(first)
    assert made(program, again.decisions, fifo).names == first.trace.names


def test_to_delay_one_actor_takes_one_decision() -> None:
    program = racing(4, capacity=2, rounds=3)
    usual = followed(program, ())
    assert usual.decisions == ()
    slow = "rank 3: P 1"
    late = made(program, [(0, f"~{slow}")])
    assert len(late.decisions) == 1
    assert late.names != usual.names
    assert len(followed(program, late.names).decisions) <= 3
    assert late.names.index(slow) > usual.names.index(slow) + 5


@pytest.mark.parametrize("fifo", [False, True])
def test_a_failure_may_be_one_reversed_race_away(fifo: bool) -> None:
    program = racing(4)
    near = list(one_away(program, fifo))
    assert near[0].names == followed(program, (), fifo).names
    assert all(len(each.decisions) == 1 for each in near[1:])
    found = next(each for each in near if ROOM.of(each.execution))
    assert made(program, found.decisions, fifo).names == found.names


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def act(self) -> None:
        """Never."""


def test_who_is_held_goes_last_and_when_named() -> None:
    a, b, c = map(Named, "abc")
    steered = Steered([(0, "~a"), (2, "a")])
    assert [steered(each) for each in ([a, b, c], [a, b], [b, a], [b, a])] == [1, 1, 1, 0]
    alone = Steered([(0, "~a"), (0, "~b")])
    assert [alone(each) for each in ([a, b], [a, c])] == [0, 0]
    assert alone.left == []


def test_a_follower_counts_steps_that_needed_no_choice() -> None:
    trace = Trace()
    follower = Follower(["a", "b", "a", "c"], trace)
    trace.names += ["a", "b"]
    assert follower([Named("c"), Named("a")]) == 1


# -- fewer decisions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_each_decision_that_is_left_is_needed(fifo: bool, seed: int) -> None:
    program = racing(3)
    long = by_chance(program, fifo, 10 * seed)
    short = fewer_decisions(program, long, ROOM, fifo)
    assert ROOM.of(made(program, short.decisions, fifo).execution)
    assert len(short.decisions) < len(long.decisions)
    for some in combinations(short.decisions, len(short.decisions) - 1):
        assert not short.decisions or not ROOM.of(made(program, some, fifo).execution)


def test_another_kind_of_failure_is_not_taken_for_the_same() -> None:
    program = racing()
    execution = failing(program)
    assert ROOM.of(execution)
    for other in (QUEUE, Sign(Class.MISSING, "deadlock_free", ROOM.kinds), Sign(Class.CYCLE, "order", ROOM.kinds)):
        assert not other.of(execution)
    schedule = followed(program, execution.trace.names)
    assert fewer_decisions(program, schedule, QUEUE) == schedule
    assert sign(execute(racing(capacity=2))) is None


# -- fewer switches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_trace_with_fewer_switches_fails_in_the_same_way(ranks: int, fifo: bool) -> None:
    program = racing(ranks, rounds=2)
    trace = followed(program, failing(program, fifo).trace.names, fifo, notes=True).execution.trace
    order = few_switches(trace)
    assert sorted(order) == list(range(len(trace.names)))
    again = in_order(program, trace, order, ROOM, fifo)
    assert again is not None
    assert again.trace.names == [trace.names[step] for step in order]
    assert switches(trace, order) < switches(trace, range(len(trace.names)))
    assert switches(trace, order) <= 3 * ranks * 3


@given(st.data())
def test_an_order_of_few_switches_respects_every_cause(data: st.DataObject) -> None:
    trace = Trace()
    count = data.draw(st.integers(1, 24))
    for step in range(count):
        rank = data.draw(st.integers(0, 2))
        trace.names.append(data.draw(st.sampled_from([f"rank {rank}: main", f"rank {rank} stream D", "D TP{0,1} #0"])))
        trace.before.append(tuple(data.draw(st.lists(st.integers(0, step - 1), max_size=3)) if step else ()))
    order = few_switches(trace)
    assert sorted(order) == list(range(count))
    place = {step: at for at, step in enumerate(order)}
    assert all(place[each] < place[step] for step in range(count) for each in trace.before[step])


def test_who_leaves_a_rendezvous_comes_after_all_arrivals() -> None:
    trace = followed(racing(3), (), notes=True).execution.trace
    arrivals = {note.step for note in trace.notes if note.what == "arrive"}
    also = also_before(trace)
    for note in trace.notes:
        if note.what == "leave":
            assert {note.step, *also.get(note.step, ()), *trace.before[note.step]} >= arrivals


@pytest.mark.parametrize(
    ("name", "rank"), [("rank 12: D 4", 12), ("rank 0 stream P", 0), ("D TP{0,1} #3", None), ("rendezvous 3", None)]
)
def test_the_rank_of_an_actor(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


# -- the critical step ------------------------------------------------------------------------------------------


def succeeds(program: Any, names: list[str]) -> bool:
    """Whether some way to go on does; all are tried."""
    return any(not each.cut and each.failure is None for each in explore(after(program, names)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_before_the_critical_step_something_succeeds_and_after_it_nothing_does(ranks: int) -> None:
    program = racing(ranks)
    names = failing(program).trace.names
    found = critical_step(program, names, limit=500)
    assert not found.bounded
    assert succeeds(program, names[: found.step])
    assert not any(succeeds(program, names[:upto]) for upto in range(found.step + 1, len(names)))


def test_no_step_is_critical_where_nothing_succeeds() -> None:
    case = case_of(family(World(2), "forgets", 1, 1)[0], on_ranks(Forgets))
    program = case.program(case.scenario)
    found = critical_step(program, execute(program).trace.names)
    assert (found.step, found.bounded, found.runs) == (-1, False, 1)


def test_a_search_that_was_cut_off_says_so() -> None:
    program = racing(3)
    assert critical_step(program, failing(program).trace.names, limit=1).bounded


# -- smaller scenarios ------------------------------------------------------------------------------------------


def test_scenarios_get_smaller_step_by_step() -> None:
    for scenario in family(World(4, adp=2, ep=2, route="none"), "fine", 2, 2, capacity=1):
        seen = list(smaller(scenario))
        assert seen
        for one in seen:
            assert one != scenario
            assert _size(one) < _size(scenario), (one, scenario)


def _size(scenario: Any) -> tuple[float, ...]:
    requests = scenario.requests
    return (
        scenario.world.size + scenario.segments + len(scenario.entries) + len(scenario.late)
        + (0 if scenario.capacity == WIDE else 1)
        + sum(len(request.prompt) + request.params.max_tokens for request in requests)
        + sum(at for at, _ in scenario.entries) / 100,
    )  # fmt: skip


def test_four_ranks_shrink_to_two_and_lose_what_does_not_matter() -> None:
    members = family(World(4, adp=2, route="none"), "fine", 2, 2, capacity=1)
    scenario = next(each for each in members if "meets" in each.name)
    case = case_of(scenario)
    found = search(case.program(scenario), wanted := ROOM)
    assert found is not None
    least = smaller_scenario(scenario, found, wanted, case.program, case.smaller)
    assert wanted.of(least.execution)
    assert least.scenario.world.size == 2
    assert (least.scenario.segments, least.scenario.capacity, len(least.scenario.entries)) == (1, 1, 2)


def test_what_fails_with_room_for_all_kernels_is_shown_with_it() -> None:
    scenario = family(World(2, adp=2, route="paper"), "late", 1, 2, capacity=2)[1]
    case = case_of(scenario, on_ranks(Late))
    found = search(case.program(scenario), QUEUE)
    assert found is not None
    least = smaller_scenario(scenario, found, QUEUE, case.program, case.smaller)
    assert least.scenario.capacity == WIDE


def test_tries_are_bounded() -> None:
    case = case_of(family(World(2), "fine", 2, 1)[0])
    execution = execute(case.program(case.scenario))
    least = smaller_scenario(case.scenario, execution, ROOM, case.program, case.smaller, tries=3)
    assert (least.scenario, least.tried) == (case.scenario, 3)
