"""The explorer on the real kernel and SPIN on a model written from the paper agree on every variant of both.

The table's verdicts are checked against SPIN by tests/test_spin.py, so this needs no SPIN.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from kernel.sched import registry
from kernel.topology import World
from tests.planted import planted
from tests.scripts import played
from tests.spin_twins import BARE, HELPERS, NOT_HERE, TWINS, Twin
from tests.spin_variants import VARIANTS, Variant, Verdict
from verify.blame import Class
from verify.explore.certify import judge
from verify.explore.dpor import explore
from verify.explore.result import Conclusion
from verify.trial.enact import run
from verify.trial.family import family
from verify.trial.findings import GUARANTEES

if TYPE_CHECKING:
    from collections.abc import Callable

    from _pytest.mark import ParameterSet

BUDGET = 400
STANDSTILL = (Class.CYCLE, Class.MISSING)
REFUSALS = (Class.RULE, Class.INVARIANT, Class.MISMATCH)


def cases() -> list[ParameterSet]:
    return [
        pytest.param(variant, ranks, id=f"{variant.name}, N={ranks}")
        for variant in VARIANTS
        if variant.name in TWINS
        for ranks in (2, 3)
        if ranks in variant.ranks
    ]


def program_of(twin: Twin, ranks: int) -> Callable[..., Any]:
    world = World(ranks, adp=ranks, route=twin.route)
    members = family(world, twin.policy, twin.segments, twin.rounds, capacity=twin.capacity)
    scenario = next(member for member in members if member.name == twin.only)
    make = registry.create if twin.scripts is None else played(scenario, twin.scripts(scenario))
    options: dict[str, Any] = {} if twin.depth is None else {"depth": twin.depth}
    return partial(run, scenario, make, **options)


@pytest.mark.parametrize(("variant", "ranks"), cases())
def test_the_same_verdict(variant: Variant, ranks: int) -> None:
    twin = TWINS[variant.name]
    program = program_of(twin, ranks)
    with planted(twin.changes, **HELPERS):
        results = judge(program, variant.name, GUARANTEES, BUDGET)
    hang, wrong = results["deadlock_free"], [r for r in results.values() if r.verdict is Conclusion.REFUTED]
    match variant.expected:
        case Verdict.DEADLOCK:
            assert hang.verdict is Conclusion.REFUTED, hang
            assert hang.cls in STANDSTILL
        case Verdict.STARVATION:
            assert [result.cls for result in wrong] == [Class.STARVATION]
        case Verdict.OK if stops(variant):
            assert hang.verdict is not Conclusion.REFUTED
            assert never_hangs(program, twin)
        case Verdict.OK:
            assert all(result.verdict is Conclusion.PROVED for result in results.values()), results
        case _:
            assert hang.verdict is not Conclusion.REFUTED
            assert {result.cls for result in wrong} <= set(REFUSALS)
            assert wrong


def stops(variant: Variant) -> bool:
    """Whether a run of it may end with an error, which is not a hang."""
    return variant.name.endswith((": no hang", "epoch refused")) or "one rank only, 2 slots" in variant.name


def never_hangs(program: Callable[..., Any], twin: Twin) -> bool:
    """All executions that differ, each to its end."""
    with planted(twin.changes, **HELPERS):
        found = list(islice(explore(program), BUDGET))
    assert len(found) < BUDGET, "there are more executions than were looked at"
    return not any(failure.cls in STANDSTILL for execution in found for failure in execution.failures)


def test_every_variant_is_here_or_says_why_not() -> None:
    names = [variant.name for variant in VARIANTS]
    assert sorted([*TWINS, *NOT_HERE]) == sorted(names)
    assert len(TWINS) >= 40


def test_without_its_checks_the_kernel_is_still_proved() -> None:
    """So what is found in the variants is of the variants, not of what was taken out."""
    program = program_of(Twin(), 2)
    with planted(BARE, **HELPERS):
        results = judge(program, "bare", GUARANTEES, BUDGET)
    assert all(result.verdict is Conclusion.PROVED for result in results.values()), results
