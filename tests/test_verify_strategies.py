"""The strategies: what they draw is valid, varied and shrinks to the plain case; and what they find."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from kernel.errors import RankLost, UsageError
from kernel.inbox import Abort, EndSession, Flush, Pause, Submit
from kernel.topology import World
from verify.blame import Class
from verify.faults import Fault, Killed, Lateness, Picks
from verify.mistakes import MISTAKES, Mistake
from verify.sim.errors import Deadlock
from verify.sim.world import WIDE
from verify.strategies import (
    devices,
    faults,
    launch_queues,
    mistakes,
    policies,
    scenarios,
    schedules,
    skews,
    worlds,
)  # fmt: skip
from verify.trial.enact import attempt
from verify.trial.family import family

if TYPE_CHECKING:
    from verify.trial.scenario import Scenario

QUICK = settings(phases=[Phase.generate, Phase.shrink], max_examples=500, database=None, deadline=None)


# -- what is drawn -----------------------------------------------------------------------------------------------------


@given(scenarios())
def test_a_scenario_goes_through_json_and_prints_in_one_line(scenario: Scenario) -> None:
    assert type(scenario).from_dict(scenario.to_dict()) == scenario
    assert len(str(scenario).splitlines()) == 1


def least(strategy: Any, wanted: Any = lambda drawn: True) -> Any:
    return find(strategy, wanted, settings=QUICK)


def test_everything_shrinks_to_the_plain_case() -> None:
    assert least(worlds()) == World()
    assert least(worlds(2)) == World(2)
    assert least(policies()) == "fine"
    assert least(mistakes()) is MISTAKES[0]
    assert least(schedules()) == Picks()
    assert least(skews(4)) == Lateness()
    assert least(faults(4)) == Fault("dies", 0, 0)
    assert least(devices()) == {"capacity": WIDE, "weights": (1, 1)}
    assert least(launch_queues()) == {"depth": None, "graphs": False}
    plain = least(scenarios())
    ((round_, submit),) = plain.entries
    assert (round_, len(submit.request.prompt), submit.request.params.max_tokens) == (0, 1, 1)
    assert (plain.world, plain.segments, plain.late, plain.blocks, plain.rows) == (World(), 1, (), 1, 1)


def has(kind: type) -> Any:
    return lambda scenario: any(isinstance(entry, kind) for _, entry in scenario.entries)


@pytest.mark.parametrize(
    "wanted",
    [
        has(Abort), has(EndSession), has(Flush), has(Pause),
        lambda s: any(rounds for *_, rounds in s.late),
        lambda s: any(len(r.prompt) > 2 * s.prefill_tokens for r in s.requests),
        lambda s: len({r.session for r in s.requests}) < len(s.requests),
        lambda s: len({r.replica for r in s.requests}) > 1,
        lambda s: any(r.params.stop_token_ids for r in s.requests),
        lambda s: s.blocks * s.block_size < sum(r.longest for r in s.requests),
        lambda s: 1 < s.world.adp < s.world.size,
    ],
)  # fmt: skip
def test_each_kind_of_event_is_drawn(wanted: Any) -> None:
    assert wanted(find(scenarios(), wanted, settings=settings(QUICK, phases=[Phase.generate])))


def test_unusable_arguments_are_refused_when_the_strategy_is_made() -> None:
    for make in (
        lambda: worlds(0), lambda: worlds(3, 2), lambda: worlds(routes=("somewhere",)), lambda: policies(0),
        lambda: scenarios(max_segments=0), lambda: devices(0), lambda: launch_queues(0), lambda: skews(0),
        lambda: faults(0), lambda: schedules(-1),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            make()


# -- what is found with them -------------------------------------------------------------------------------------------


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_shipped_policies_are_clean_whatever_happens(data: st.DataObject) -> None:
    scenario = replace(data.draw(scenarios()), **data.draw(devices()))
    schedule, skew = data.draw(schedules()), data.draw(skews(scenario.world.size))
    outcome = attempt(scenario, choose=schedule.choose(), skew=skew, **data.draw(launch_queues(4)))
    assert outcome.clean, outcome.findings


@settings(max_examples=30)
@given(st.data())
def test_a_rank_that_is_lost_is_named_and_nobody_hangs(data: st.DataObject) -> None:
    scenario = data.draw(scenarios(worlds=worlds(2), max_requests=2, disturbed=False, late=False))
    fault = data.draw(faults(scenario.world.size, exchanges=4))
    outcome = attempt(scenario, world=fault.world, choose=data.draw(schedules()).choose())
    error = outcome.error
    if fault.kind == "dies":
        assert isinstance(error, Killed | RankLost), outcome.findings
        assert f"rank {fault.rank} " in str(error)
    else:
        assert isinstance(error, Deadlock), outcome.findings
        assert error.standstill is not None
        assert f"rank {fault.rank}" in str(error.standstill.chain) + str(error.standstill.hosts)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_each_planted_mistake_is_found_in_the_family(mistake: Mistake) -> None:
    found = set()
    for scenario in family(World(2, adp=2, ep=2), mistake.name, 3, 3):
        found |= {finding.rule for finding in attempt(scenario, mistake.make).findings}
    assert found & set(mistake.breaks), found
    assert Class.NONE not in found


def test_a_mistake_is_shrunk_to_a_small_scenario() -> None:
    hopeful = next(mistake for mistake in MISTAKES if mistake.name == "hopeful")

    def breaks(scenario: Scenario) -> bool:
        return attempt(scenario, hopeful.make).broken("promotion") is not None

    small = find(scenarios(policies=st.just("hopeful")), breaks, settings=QUICK)
    assert [type(entry) for _, entry in small.entries] == [Submit]
    assert (small.world, small.segments, small.late) == (World(), 1, ())
