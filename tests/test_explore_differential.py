"""Partial-order reduction fails silently, so it is compared with a search of all states that shares no code with it."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from tests import statespace
from tests.device_jobs import program
from verify.explore.certify import certify
from verify.explore.dpor import explore
from verify.explore.execution import execute
from verify.explore.result import Conclusion

MOST = 400
"""Executions of one job; jobs that need more are left out, and counted."""


def small_job(rng: random.Random) -> statespace.Job:
    job = statespace.random_job(
        rng,
        ranks=(2, 3),
        instances=(2, 4),
        streams=(1, 2),
        waits=rng.choice((0.0, 0.3)),
        barriers=rng.choice((0.0, 0.5)),
        weights=rng.choice(((1, 1), (1, 2))),
        threads=rng.choice((1, 1, 2)),
    )
    heaviest = max(op.weight for rank in job.ranks for thread in rank.threads for op in thread if is_enqueue(op))
    return statespace.with_capacity(job, rng.randint(heaviest, heaviest + 2))


def is_enqueue(op: statespace.Op) -> bool:
    return isinstance(op, statespace.Enqueue)


def deadlocks(job: statespace.Job) -> bool | None:
    """What the explorer says; None beyond MOST executions."""
    for execution in islice(explore(program(job)), MOST):
        if execution.failure is not None:
            assert "deadlock" in execution.failure.say
            return True
    return None if sum(1 for _ in islice(explore(program(job)), MOST)) == MOST else False


def compare(seed: int, count: int) -> None:
    rng = random.Random(f"jobs {seed}")
    stuck = beyond = 0
    for _ in range(count):
        job = small_job(rng)
        mine = deadlocks(job)
        beyond += mine is None
        if mine is not None:
            stuck += mine
            assert mine == statespace.search(job)["deadlock"], job
    assert stuck >= count // 5, "too few of the jobs deadlock for this to say anything"
    assert count - stuck - beyond >= count // 8, "too few of the jobs are free of deadlock"
    assert beyond <= count // 10


def test_explorer_agrees_with_the_search_of_all_states() -> None:
    compare(0, 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_explorer_agrees_on_two_thousand_jobs(seed: int) -> None:
    compare(seed, 500)


def test_one_run_without_a_race_stands_for_all() -> None:
    """Where the first run has no race, no schedule behaves differently from it: neither better nor worse."""
    rng = random.Random("certificates")
    certified = stuck = 0
    for _ in range(300):
        job = small_job(rng)
        first = execute(program(job))
        if not first.trace.races:
            certified += 1
            stuck += first.failure is not None
            assert (first.failure is not None) == statespace.search(job)["deadlock"], job
    assert certified > 50
    assert 0 < stuck < certified


def test_verdicts_are_those_of_the_search_of_all_states() -> None:
    rng = random.Random("verdicts")
    seen = set()
    for _ in range(60):
        job = small_job(rng)
        result = certify(program(job), "a random job", budget=300)
        seen.add(result.verdict)
        if result.verdict is not Conclusion.INCONCLUSIVE:
            assert (result.verdict is Conclusion.REFUTED) == statespace.search(job)["deadlock"], (job, result)
    assert {Conclusion.PROVED, Conclusion.REFUTED} <= seen


def kernel(name: str, stream: str) -> statespace.Enqueue:
    return statespace.Enqueue(name, stream)


WOKEN = statespace.Job(
    (
        statespace.Rank(
            ((kernel("c1", "s1"), kernel("c2", "s0"), kernel("c3", "s1")), (kernel("c0", "s1"),)), capacity=3
        ),
        statespace.Rank(
            ((kernel("c3", "s1"), kernel("c0", "s2")), (kernel("c1", "s2"), kernel("c2", "s0"))), capacity=3
        ),
    )
)
"""Its deadlock needs an actor that slept and is woken by a conflict."""

TOLD = statespace.Job(
    (
        statespace.Rank(
            (tuple(map(kernel, ("c0", "c1", "c2", "c3", "c4"), ("s2", "s1", "s0", "s0", "s2"))),), capacity=2
        ),
        statespace.Rank(
            (tuple(map(kernel, ("c0", "c1", "c2", "c3", "c4"), ("s0", "s0", "s1", "s0", "s1"))),), capacity=2
        ),
    )
)
"""Its deadlock is hidden where a collective counts as the consequence of more than its members."""


@pytest.mark.parametrize("job", [WOKEN, TOLD], ids=["woken", "told"])
def test_deadlocks_that_a_wrong_reduction_misses(job: statespace.Job) -> None:
    assert statespace.search(job)["deadlock"]
    assert any(execution.failure is not None for execution in islice(explore(program(job)), 3000))
