"""Every mutant of the zoo is refuted within ten executions, in the right class, and told in few lines."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from kernel.sched import registry
from tests import mutants
from tests.mutants import CONTROL, PROGRESS, Mutant
from tests.mutants_exchange import EXCHANGE
from tests.planted import Change, planted
from tests.spin_variants import VARIANTS, Verdict
from verify.blame import Class
from verify.explore.counterexample import Effort, explain
from verify.explore.execution import execute
from verify.explore.policy import Scope, check
from verify.explore.render import LINES
from verify.explore.result import Conclusion
from verify.explore.search import mixture
from verify.explore.smaller import case_of
from verify.explore.story import SWITCHES
from verify.trial.enact import run
from verify.trial.family import family

if TYPE_CHECKING:
    from verify.explore.counterexample import Counterexample
    from verify.explore.policy import Report
    from verify.trial.scenario import Scenario

MUTANTS = (*mutants.MUTANTS, *EXCHANGE)
EXECUTIONS = 10
QUICK = Effort(scenario=1, scenarios=2, decisions=10, critical=3, fifo=20)


def name_of(mutant: Mutant) -> str:
    return mutant.policy if isinstance(mutant.policy, str) else mutant.policy.__name__.lower()


def make(mutant: Mutant) -> Any:
    policy = mutant.policy
    return registry.create if isinstance(policy, str) else lambda spec, limits: policy(limits)


def scenario_of(mutant: Mutant) -> Scenario:
    members = family(mutant.world, name_of(mutant), mutant.segments, mutant.rounds, capacity=mutant.capacity)
    return next(member for member in members if member.name == mutant.member)


def judged(mutant: Mutant, *, explained: bool) -> Report:
    """The verdict on the kernel as it is now."""
    scope = Scope(
        name_of(mutant), mutant.world, mutant.segments, mutant.rounds, mutant.capacity, bound=mutant.bound
    )  # fmt: skip
    return check(scope, make(mutant), [scenario_of(mutant)], explained=explained)


def rules(mutant: Mutant) -> set[str]:
    return {mutant.rule, mutant.or_rule} - {""}


def short(mutant: Mutant, found: Counterexample) -> None:
    assert found.cls in mutant.classes
    assert found.rule in rules(mutant)
    assert found.fidelity == "fifo"
    assert len(str(found).splitlines()) <= LINES == 30
    assert found.switches <= SWITCHES == 6


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_refuted(mutant: Mutant) -> None:
    with planted(mutant.changes):
        report = judged(mutant, explained=False)
        assert report.verdict is Conclusion.REFUTED
        assert report.cls in mutant.classes
        assert report.certainty is mutant.certainty
        results = [result for result in report.guarantees.values() if result.verdict is Conclusion.REFUTED]
        failure, execution = results[0].evidence.failure, results[0].evidence.execution
        assert failure is not None
        assert execution is not None
        assert failure.rule in rules(mutant)
        assert report.executions <= mutant.executions <= EXECUTIONS
        case = case_of(scenario_of(mutant), make(mutant), mutant.bound)
        short(mutant, explain(case, execution, fifo=True, rule=failure.rule, effort=QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_explained_in_full(mutant: Mutant) -> None:
    with planted(mutant.changes):
        found = judged(mutant, explained=True).counterexample
    assert found is not None
    short(mutant, found)


def test_the_same_scenarios_are_proved_without_the_mistake() -> None:
    """Otherwise what was found might not be what was planted."""
    plain = {
        (mutant.world, mutant.segments, mutant.rounds, mutant.capacity, mutant.member): mutant
        for mutant in MUTANTS
        if mutant.changes
    }
    assert len(plain) > 5
    for mutant in plain.values():
        assert judged(mutant, explained=False).verdict is Conclusion.PROVED, mutant.name


def test_a_standstill_is_not_called_a_broken_rule_nor_the_other_way_round() -> None:
    classes = Counter(mutant.classes[0] for mutant in MUTANTS)
    assert set(classes) == {
        Class.RULE, Class.INVARIANT, Class.STARVATION, Class.CYCLE, Class.MISSING, Class.MISMATCH,
    }  # fmt: skip
    for mutant in MUTANTS:
        hangs = mutant.rule == "deadlock_free"
        assert hangs is (mutant.classes[0] in (Class.CYCLE, Class.MISSING)), mutant.name


def test_there_are_enough_of_them_and_each_is_another() -> None:
    single = [mutant for mutant in MUTANTS if len(mutant.changes) == 1]
    assert len(single) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.changes, mutant.policy, mutant.world, mutant.bound) for mutant in MUTANTS}) == len(MUTANTS)


def test_spin_refutes_or_refuses_the_same_mistakes() -> None:
    expected = {variant.name: variant.expected for variant in VARIANTS}
    for mutant in MUTANTS:
        if mutant.spin:
            assert mutant.spin in expected, f"{mutant.name}: the Promela model has no variant {mutant.spin!r}"
            assert expected[mutant.spin] is not Verdict.OK or mutant.spin.endswith("refused"), mutant.name
    assert sum(bool(mutant.spin) for mutant in MUTANTS) >= 20


def test_an_invariant_that_only_some_schedules_break_is_not_proved_by_one_of_them() -> None:
    """Whether P has finished when its rank says so is a matter of time here, so one schedule cannot tell for all."""
    mutant = next(each for each in MUTANTS if each.name == "complete once enqueued")
    scenario = next(each for each in family(mutant.world, "fine", 2, 3) if each.name == "pause in P")
    with planted(mutant.changes):
        seen = [execute(partial(run, scenario), choose) for choose in islice(mixture(300), 30)]
    assert {one.failure is None for one in seen} == {True, False}
    lucky = [one.trace.races for one in seen if one.failure is None]
    assert all(any(race.thing[0] == "done" for race in races) for races in lucky)


def test_a_line_that_is_gone_is_noticed() -> None:
    with (
        pytest.raises(AssertionError, match="has 0 lines"),
        planted([Change("kernel.gate:RankGate.close", "        self._closed = Maybe", "pass")]),
    ):
        pass


def test_nothing_stays_planted() -> None:
    from kernel.sched.fine import Fine

    turn = Fine.turn
    with planted(CONTROL[0].changes):
        assert Fine.turn is not turn
    assert Fine.turn is turn
    assert judged(PROGRESS[0], explained=False).verdict is Conclusion.PROVED
