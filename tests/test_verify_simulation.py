"""The real rank and the shipped policies on the simulated world, end to end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import Divergence
from kernel.inbox import Abort, EndSession, Flush, Pause, Resume, UsePolicy
from kernel.request import SamplingParams
from kernel.sched import registry
from kernel.sched.fine import Fine
from kernel.topology import World
from verify.sim.arrivals import SimTurn, Trajectory, trajectories
from verify.sim.errors import Deadlock
from verify.sim.kv import continuation
from verify.sim.model import FREE, CostModel
from verify.sim.rendezvous import uniform_skew
from verify.sim.simulation import Engine, Outcome, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.inbox import Entry
    from kernel.sched.policy import Gate, Limits, Memory, Plan, Policy, RankView
    from verify.sim.scheduler import Actor

ORDERED = ("normal", "global_complete", "global_enqueue", "fine", "fine:span=3", "adaptive")
CROSSED = World(4, adp=2)
FEW = trajectories(4, 2, output=(1, 6))


def check(outcome: Outcome, asked: Sequence[Trajectory], vocab: int = 32_000) -> None:
    """Every turn was released its wait after the one before, and got the tokens that its context alone decides."""
    by_session: dict[int, list[Any]] = {}
    for turn in outcome.turns.values():
        by_session.setdefault(turn.request.session, []).append(turn)
    assert {session: len(turns) for session, turns in by_session.items()} == {t.session: len(t.turns) for t in asked}
    for trajectory in asked:
        context: tuple[int, ...] = ()
        free = 0
        for part, turn in zip(trajectory.turns, by_session[trajectory.session], strict=True):
            assert turn.released_ns == free + part.wait_ns
            assert turn.request.prompt == (*context, *part.prompt)
            assert turn.tokens == list(continuation(turn.request.prompt, part.params, vocab))
            assert turn.released_ns <= turn.first_ns <= turn.done_ns
            assert turn.finish in ("length", "stop")
            context, free = (*turn.request.prompt, *turn.tokens), turn.done_ns
    assert outcome.makespan_ns == max(turn.done_ns for turn in outcome.turns.values())


def shuffled(seed: int) -> Any:
    """A choice that is random, and the same each time."""
    draws = random.Random(seed)

    def choose(options: Sequence[Actor]) -> int:
        return draws.randrange(len(options))

    return choose


@pytest.mark.parametrize("policy", [*ORDERED, "unordered"])
@pytest.mark.parametrize("world", [World(1), World(2), CROSSED, World(4, adp=4, ep=4)], ids=str)
def test_every_policy_serves_every_trajectory_exactly(world: World, policy: str) -> None:
    check(simulate(world, policy, FEW), FEW)


@settings(max_examples=settings().max_examples // 2)
@given(
    st.sampled_from(ORDERED),
    st.sampled_from([CROSSED, World(4, adp=2, gather="flat"), World(4, adp=2, route="all"), World(4, adp=4, ep=4)]),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
)
def test_tokens_are_the_same_in_any_schedule(policy: str, world: World, seed: int, late: bool, permute: bool) -> None:
    asked = trajectories(3, 2, seed=seed, prompt=(1, 40), output=(1, 6))
    cost = FREE if seed % 2 else CostModel()
    engine = Engine(layers=2, prefill_tokens=24, rows=2, blocks=20, block_size=8, cost=cost)
    skew = uniform_skew(20_000_000, seed) if late else None
    check(simulate(world, policy, asked, engine, choose=shuffled(seed), permute=permute, skew=skew), asked)


@pytest.mark.parametrize("policy", ORDERED)
def test_a_pool_of_one_and_a_fifth_of_the_largest_trajectory_serves_them_all(policy: str) -> None:
    asked = trajectories(8, 4, seed=1, prompt=(10, 40), output=(3, 9), wait_ns=(0, 30_000_000))
    largest = max(sum(len(turn.prompt) + turn.params.max_tokens for turn in t.turns) for t in asked)
    engine = Engine(blocks=-(-largest * 6 // 5 // 8), block_size=8, prefill_tokens=32, rows=4)
    outcome = simulate(CROSSED, policy, asked, engine)
    check(outcome, asked)
    known: dict[int, int] = {}
    reuse = set()
    for turn in outcome.turns.values():  # what a turn had left for the next one of its session
        if turn.turn:
            left = known[turn.request.session]
            reuse.add("none" if not turn.cached else "all" if turn.cached == left else "some")
        known[turn.request.session] = len(turn.request.prompt) + len(turn.tokens) - 1
    assert reuse == {"none", "some", "all"}


def test_runs_are_equal_and_the_first_choice_is_the_default() -> None:
    runs = [simulate(CROSSED, "fine", FEW, choose=choose) for choose in (None, None, lambda options: 0)]
    assert len({run.digest for run in runs}) == 1
    assert simulate(CROSSED, "fine", FEW, choose=shuffled(1)).digest == runs[0].digest  # with room nothing competes
    tight = [simulate(CROSSED, "fine", FEW, choose=choose, capacity=1) for choose in (None, shuffled(1))]
    assert tight[0].digest != tight[1].digest
    assert simulate(CROSSED, "fine", FEW, skew=uniform_skew(1_000_000, 1)).makespan_ns > runs[0].makespan_ns


PROGRAM = """
import sys
sys.modules["torch"] = None  # importing it fails
from kernel.topology import World
from verify.sim.arrivals import trajectories
from verify.sim.simulation import simulate
asked = trajectories(4, 2, output=(1, 6))
outcome = simulate(World(4, adp=2), "fine", asked, permute=True, choose=lambda options: len(options) // 2)
print(outcome.digest, outcome.makespan_ns, outcome.steps)
"""


def test_runs_are_equal_in_processes_with_other_hash_seeds_and_without_torch() -> None:
    root = Path(__file__).parent.parent
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
            text=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs != {""}


# -- room on the device -----------------------------------------------------------------------------------------------


def can_deadlock(world: World, policy: str, capacity: int, seeds: int = 4) -> bool:
    """Whether one of so many random schedules gets stuck."""
    asked = trajectories(4, 2, output=(1, 8), wait_ns=(0, 0))
    for seed in range(seeds):
        try:
            simulate(world, policy, asked, Engine(cost=FREE), capacity=capacity, choose=shuffled(seed))
        except Deadlock:
            return True
    return False


@pytest.mark.parametrize(
    ("policy", "route", "capacity", "can"),
    [
        # Two chains of collectives on a device: one kernel of each phase must fit, whatever the policy. The paper's
        # route leaves prefill's attention-TP collectives on their own stream, so that it does not change this.
        ("unordered", "none", 1, True),
        ("unordered", "none", 2, False),
        ("global_complete", "paper", 1, True),
        ("global_enqueue", "paper", 1, True),
        ("fine", "paper", 1, True),
        ("global_complete", "paper", 2, False),
        ("global_enqueue", "paper", 2, False),
        ("fine", "paper", 2, False),
        # One chain: any room will do.
        ("normal", "all", 1, False),
        ("global_complete", "all", 1, False),
        ("global_enqueue", "all", 1, False),
        ("fine", "all", 1, False),
    ],
)
def test_who_can_deadlock_with_how_much_room(policy: str, route: str, capacity: int, can: bool) -> None:
    # A search that is to find something goes on until it does; one that is to find nothing is only a sample.
    assert can_deadlock(World(4, adp=2, route=route), policy, capacity, seeds=200 if can else 4) is can


# -- what the policies are for ----------------------------------------------------------------------------------------


def decode_inside_prefill(policy: str) -> tuple[int, int]:
    """(D iterations whose first kernel starts while P's device work is incomplete, all of them), on rank 0."""
    asked = trajectories(4, 2, seed=5, prompt=(100, 200), output=(10, 16), wait_ns=(0, 5_000_000))
    outcome = simulate(CROSSED, policy, asked, Engine(layers=4))
    inside = total = pending = 0
    for _, what, stream, label in outcome.logs[0]:
        if label.startswith("P e"):
            pending += what == "enqueue"
            pending -= what == "finish"
        if (what, stream) == ("start", "D") and label.startswith("D ") and "#0" not in label and "attention 0" in label:
            total += 1
            inside += pending > 0
    return inside, total


def test_decode_enters_a_running_prefill_only_under_policies_that_let_it() -> None:
    for policy, lets in (("fine", True), ("global_enqueue", True), ("global_complete", False), ("normal", False)):
        inside, total = decode_inside_prefill(policy)
        assert total > 20
        assert (inside > 0) is lets, policy


def test_sixty_four_ranks() -> None:
    asked = trajectories(8, 1, prompt=(10, 20), output=(2, 3), wait_ns=(0, 0))
    check(simulate(World(64, adp=8, ep=64), "fine", asked, Engine(layers=2)), asked)


# -- entries from outside ---------------------------------------------------------------------------------------------


def test_abort_pause_and_other_entries_take_effect_on_all_ranks() -> None:
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    asked = [Trajectory(session, (SimTurn(tuple(range(20)), long),)) for session in range(4)]
    ms = 1_000_000
    extra: list[tuple[int, Entry]] = [
        (10 * ms, Pause()),
        (20 * ms, Abort(1)),
        (400 * ms, Resume()),
        (410 * ms, EndSession(2)),
        (420 * ms, Flush()),
        (420 * ms, Abort(77)),
    ]
    outcome = simulate(CROSSED, "fine", asked, extra=extra)
    finishes = [outcome.turns[request].finish for request in range(4)]
    assert finishes == ["length", "abort", "abort", "length"]
    assert 20 * ms < outcome.turns[1].done_ns < 30 * ms
    assert 410 * ms < outcome.turns[2].done_ns < 420 * ms
    pauses = [line[0] for line in outcome.logs[0] if line[1] == "start"]
    assert max(b - a for a, b in pairwise(pauses)) > 300 * ms
    for request in (0, 3):
        turn = outcome.turns[request]
        assert turn.tokens == list(continuation(turn.request.prompt, long, 32_000))


def test_a_policy_is_changed_between_runs_of_work() -> None:
    asked = trajectories(2, 2, output=(1, 5), wait_ns=(500_000_000, 500_000_000))
    used: list[str] = []

    def make(spec: str, limits: Limits) -> Policy:
        used.append(spec)
        return registry.create(spec, limits)

    outcome = simulate(CROSSED, "normal", asked, extra=[(100_000_000, UsePolicy("fine"))], make_policy=make)
    check(outcome, asked)
    assert used == ["normal"] * 4 + ["fine"] * 4


# -- policies that are wrong ------------------------------------------------------------------------------------------


class Forgetful(Fine):
    """Leaves out both rendezvous on one rank."""

    ranks = iter(range(4))

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.odd = next(self.ranks) == 2

    async def turn(self, gate: Gate) -> None:
        if self.odd and gate.p_active:
            gate.launch_decode()
            gate.release(gate.plan.span)
        else:
            await super().turn(gate)


def test_a_rank_that_skips_its_rendezvous_is_named() -> None:
    Forgetful.ranks = iter(range(4))
    with pytest.raises(Divergence, match="rank 2") as caught:
        simulate(CROSSED, "forgetful", FEW, make_policy=lambda spec, limits: Forgetful(limits))
    assert caught.value.ranks == (2,)
    assert caught.value.field == "rendezvous tag"


class Partial(Fine):
    """Plans another span on one rank."""

    ranks = iter(range(4))

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.odd = next(self.ranks) == 1

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        plan, after = super().plan(views, memory)
        return (replace(plan, span=plan.span + 1) if self.odd and plan.bucket else plan), after


def test_a_rank_that_plans_otherwise_is_named_with_the_field() -> None:
    Partial.ranks = iter(range(4))
    with pytest.raises(Divergence, match="rank 1 differs in span") as caught:
        simulate(CROSSED, "partial", FEW, make_policy=lambda spec, limits: Partial(limits))
    assert caught.value.ranks == (1,)


class Unfinished(Fine):
    """Waits for an endpoint that it never grants."""

    async def turn(self, gate: Gate) -> None:
        if gate.p_active:
            gate.release(1)
            await gate.enqueued()
        gate.launch_decode()


def test_a_policy_that_waits_for_what_it_never_grants_deadlocks_at_once() -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(CROSSED, "unfinished", FEW, make_policy=lambda spec, limits: Unfinished(limits))
    assert all(f"rank {rank}: task 'main' waits at kernel/rank.py" in caught.value.waits[rank] for rank in range(4))
