"""What may be concluded from which evidence: each reason not to say `proved`, by itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kernel.request import Phase
from kernel.topology import World
from verify.blame import Certainty, Class
from verify.explore.certify import OTHERS, _Judged, judge
from verify.explore.execution import Execution, Failure
from verify.explore.policy import Scope, check
from verify.explore.result import Conclusion, Evidence, Result, conclude, conditional
from verify.sim.kernels import Chip, Kernel
from verify.sim.scheduler import Scheduler
from verify.sim.trace import Trace
from verify.sim.world import SimWorld
from verify.trial.family import family
from verify.trial.findings import Finding, Found

if TYPE_CHECKING:
    from verify.sim.world import SimRank

GOOD = Evidence(executions=1, steps=9, complete=True)
FAILURE = Failure(Class.CYCLE, "stands still", None, "deadlock_free")


@pytest.mark.parametrize(
    ("changes", "verdict", "cls", "certainty", "say"),
    [
        ({}, Conclusion.PROVED, Class.NONE, Certainty.CERTAIN, "one execution without a race"),
        ({"executions": 3}, Conclusion.PROVED, Class.NONE, Certainty.CERTAIN, "3 executions, one for each order"),
        ({"executions": 0}, Conclusion.INCONCLUSIVE, Class.NONE, Certainty.UNDECIDED, "no execution reached its end"),
        ({"complete": False}, Conclusion.INCONCLUSIVE, Class.NONE, Certainty.UNDECIDED, "and there are more"),
        ({"clock": "a.py:1"}, Conclusion.INCONCLUSIVE, Class.NONE, Certainty.UNDECIDED, "depends on the clock"),
        ({"hidden": "it broke"}, Conclusion.INCONCLUSIVE, Class.NONE, Certainty.UNDECIDED, "not judged"),
        ({"failure": FAILURE}, Conclusion.INCONCLUSIVE, Class.CYCLE, Certainty.UNDECIDED, "that asyncio does not have"),
        (
            {"failure": FAILURE, "fidelity": "fifo"}, Conclusion.REFUTED, Class.CYCLE, Certainty.CERTAIN,
            "stands still (execution 1)",
        ),
        ({"fidelity": "fifo"}, Conclusion.PROVED, Class.NONE, Certainty.CERTAIN, "for all schedules"),
    ],
)  # fmt: skip
def test_evidence_and_verdict(
    changes: dict[str, Any], verdict: Conclusion, cls: Class, certainty: Certainty, say: str
) -> None:
    result = conclude("scope", replace(GOOD, **changes))
    assert (result.verdict, result.cls, result.certainty) == (verdict, cls, certainty)
    assert say in result.reason


@pytest.mark.parametrize(
    ("of", "verdict", "cls", "certainty"),
    [
        (Conclusion.REFUTED, Conclusion.PROVED, Class.CYCLE, Certainty.CONDITIONAL),
        (Conclusion.REFUTED, Conclusion.PROVED, Class.MISSING, Certainty.CONDITIONAL),
        (Conclusion.REFUTED, Conclusion.INCONCLUSIVE, Class.CYCLE, Certainty.UNDECIDED),
        (Conclusion.REFUTED, Conclusion.REFUTED, Class.CYCLE, Certainty.CERTAIN),
        (Conclusion.REFUTED, Conclusion.PROVED, Class.RULE, Certainty.CERTAIN),
        (Conclusion.REFUTED, None, Class.CYCLE, Certainty.CERTAIN),
        (Conclusion.PROVED, Conclusion.PROVED, Class.CYCLE, Certainty.CERTAIN),
        (Conclusion.INCONCLUSIVE, Conclusion.PROVED, Class.CYCLE, Certainty.CERTAIN),
    ],
)
def test_only_a_standstill_that_room_cures_is_conditional(
    of: Conclusion, verdict: Conclusion | None, cls: Class, certainty: Certainty
) -> None:
    found = Result(of, "scope", GOOD, cls, reason="so")
    roomy = None if verdict is None else Result(verdict, "scope", GOOD)
    result = conditional(found, roomy)
    assert (result.verdict, result.cls, result.certainty) == (of, cls, certainty)


def test_a_failure_counts_for_its_rule_and_else_for_the_others() -> None:
    kv = Failure(Class.INVARIANT, "lost", None, "kv")
    execution = Execution(Trace(), (FAILURE, kv))

    def counts(rule: str, *rules: str, settled: tuple[str, ...] = ()) -> Failure | None:
        return _Judged(lambda **_: None, (*rules, OTHERS), settled).broken(execution, rule)

    assert counts("deadlock_free", "deadlock_free") is FAILURE
    assert counts("decode_bound", "decode_bound") is None
    assert counts(OTHERS, "deadlock_free") is kv
    assert counts(OTHERS, "deadlock_free", settled=("kv",)) is None
    assert counts(OTHERS, "deadlock_free", "kv") is None


class Noted(NamedTuple):
    """What a program returns that has found something and gone on."""

    findings: tuple[Finding, ...]


def racing_tasks(**options: Any) -> tuple[str, ...]:
    """Three tasks of one rank, in any order; the order."""
    order: list[str] = []

    async def note(name: str) -> None:
        order.append(name)

    async def main(sim: SimRank) -> None:
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(note(name), name=name)

    SimWorld(World(1), **options).run(main)
    return tuple(order)


def racing(fails: int, budget: int) -> tuple[dict[str, Result], int]:
    """The verdict on three tasks that touch one thing, where the order of this number fails; how many were seen."""
    orders: dict[tuple[str, ...], int] = {}

    def program(**options: Any) -> None:
        order = racing_tasks(**options)
        if orders.setdefault(order, len(orders)) == fails:
            raise Found(Finding(Class.RULE, "made up", "so"))

    return judge(program, "scope", ("deadlock_free",), budget), len(orders)


def test_all_orders_are_looked_at_before_anything_is_proved() -> None:
    results, seen = racing(fails=99, budget=100)
    assert seen == 6
    assert {result.verdict for result in results.values()} == {Conclusion.PROVED}


@pytest.mark.parametrize("fails", range(1, 6))
def test_one_order_that_fails_is_found_and_is_no_failure_of_asyncio_s(fails: int) -> None:
    """Production runs these tasks in one order, so all that can be said is that another one would fail."""
    results, _ = racing(fails, budget=100)
    assert results[OTHERS].verdict is Conclusion.INCONCLUSIVE
    assert results[OTHERS].cls is Class.RULE
    assert results["deadlock_free"].verdict is not Conclusion.PROVED


def test_the_order_that_production_has_is_refuted() -> None:
    results, _ = racing(fails=0, budget=100)
    assert (results[OTHERS].verdict, results[OTHERS].cls) == (Conclusion.REFUTED, Class.RULE)


def test_a_budget_that_does_not_suffice_proves_nothing() -> None:
    results, seen = racing(fails=99, budget=6)
    assert seen < 6
    assert {result.verdict for result in results.values()} == {Conclusion.INCONCLUSIVE}
    assert all(result.evidence.executions + result.evidence.covered <= 6 for result in results.values())


def test_executions_are_counted_once_and_those_cut_short_apart() -> None:
    results, seen = racing(fails=99, budget=100)
    evidence = results[OTHERS].evidence
    assert (evidence.executions, evidence.covered, evidence.complete) == (seen, 0, True)
    judged = _Judged(racing_tasks, (OTHERS,))
    judged.add(Execution(Trace(), cut=True))
    judged.add(Execution(Trace()))
    assert (judged.shared.executions, judged.shared.covered) == (1, 1)


def test_nothing_is_run_once_every_rule_is_settled() -> None:
    results, seen = racing(fails=0, budget=100)
    assert results[OTHERS].evidence.executions == 1
    assert seen == 1


def test_the_first_failure_of_a_rule_is_kept_while_others_are_looked_for() -> None:
    """Findings end no run, so that all orders are looked at for the other rules."""

    def program(**options: Any) -> Any:
        racing_tasks(**options)
        return Noted((Finding(Class.RULE, "made up", "so"),))

    results = judge(program, "scope", ("deadlock_free",), 100)
    assert results[OTHERS].evidence.executions == 1
    assert results["deadlock_free"].verdict is Conclusion.PROVED
    assert results["deadlock_free"].evidence.executions == 6


def test_room_is_asked_for_only_where_something_fails() -> None:
    asked: list[bool] = []

    def roomy(**options: Any) -> None:
        asked.append(True)
        racing_tasks(**options)

    assert judge(racing_tasks, "scope", (), 100, roomy)[OTHERS].verdict is Conclusion.PROVED
    assert not asked


# -- what counts as order on a device ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "weights", "steps"), [(1, (1, 1), 2), (2, (1, 1), 0), (3, (2, 2), 2), (4, (1, 4), 4)]
)
def test_who_touches_the_room_of_a_device(capacity: int, weights: tuple[int, int], steps: int) -> None:
    """Arrivals where room can be short; ends too where several kernels can be those that make room."""
    scheduler = Scheduler()
    scheduler.trace = trace = Trace()
    chip = Chip(0, scheduler, capacity)
    chip.width, chip.least = sum(weights), min(weights)
    for phase, weight in zip((Phase.D, Phase.P), weights, strict=True):
        chip.queues[phase].append(Kernel("k", weight, 1))
        chip.queues[phase].append(Kernel("nothing", 0, 1))
    chip.idle = scheduler.stop
    scheduler.run()
    assert sum(("room", 0) in things for things in trace.things) == steps


def test_what_is_proved_has_no_counterexample() -> None:
    world = World(2, adp=2, route="paper")
    report = check(Scope("lean", world, 1, 1), scenarios=family(world, "lean", 1, 1)[:1])
    assert report.verdict is Conclusion.PROVED
    assert report.counterexample is None
