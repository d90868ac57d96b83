"""The split dispatch on simulated worlds: proved by one execution, refuted where its kernels have no room."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kernel.exchange.sizes import Residency
from kernel.request import SamplingParams
from kernel.sched import registry
from kernel.topology import World
from rollout import cli
from verify.blame import Certainty, Class
from verify.explore.policy import Scope, check
from verify.explore.result import Conclusion
from verify.sim.arrivals import SimTurn, Trajectory
from verify.sim.exchange import room
from verify.sim.simulation import Engine, simulate
from verify.trial.family import family

PAIR = World(2, 2, 2, exchange="split")
SHARED = World(4, 2, 4, exchange="split")


@pytest.mark.parametrize("policy", ["fine", "fine:span=2", "lean", "adaptive", "normal", "global_enqueue"])
@pytest.mark.parametrize("world", [PAIR, World(2, 2, 2, cut="sublayer", exchange="split"), SHARED], ids=str)
def test_one_execution_of_each_scenario_proves_it(policy: str, world: World) -> None:
    report = check(Scope(policy, world, 2, 3), registry.create, explained=False)
    assert report.verdict is Conclusion.PROVED
    assert report.executions == report.scenarios >= 8


@pytest.mark.parametrize(
    "budget",
    [
        Residency(sms=12, low_latency=6, normal=3, notify=3, nccl=0),
        Residency(sms=12, low_latency=7, normal=3, notify=3, nccl=0),
        Residency(sms=12, low_latency=4, normal=3, notify=3, nccl=2),
        Residency(sms=12, low_latency=5, normal=3, notify=3, nccl=2),
    ],
    ids=lambda each: f"{each.used} of {each.sms}",
)
def test_the_budget_of_sms_tells_whether_it_can_deadlock(budget: Residency) -> None:
    """The rule of the validators against the search: what fits is proved, what does not has a schedule that hangs."""
    capacity, weights = room(budget)
    scenarios = [
        member
        for member in family(PAIR, "fine", 1, 3, capacity=capacity, weights=weights)
        if member.name == "P meets D after 0"
    ]
    scope = Scope("fine", PAIR, 1, 3, capacity)
    report = check(scope, registry.create, scenarios, explained=False)
    if budget.free >= 0:
        assert report.verdict is Conclusion.PROVED
    else:
        assert (report.verdict, report.cls) == (Conclusion.REFUTED, Class.CYCLE)
        assert report.certainty is Certainty.CONDITIONAL


@pytest.mark.parametrize("world", [PAIR, SHARED, World(8, 4, 8, exchange="split")], ids=str)
def test_simulated_engines_serve_the_same_tokens_with_and_without(world: World) -> None:
    prompts = [tuple(range(9 * n, 9 * n + 5 + 6 * n)) for n in range(6)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    work = [Trajectory(n, (SimTurn(prompt, params), SimTurn((7, 8), params))) for n, prompt in enumerate(prompts)]
    found = []
    for each in (world, replace(world, exchange="none")):
        outcome = simulate(each, "fine", work, Engine(layers=3))
        found.append({number: turn.tokens for number, turn in outcome.turns.items()})
    assert found[0] == found[1]


def test_the_command_proves_it_and_refutes_it_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    def checked(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = cli.main(["check", *arguments, "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, found

    asked = ("fine", "--world", "2", "--exchange", "deepep", "--segments", "1")
    code, answer = checked(*asked)
    assert (code, answer["verdict"]) == (0, "proved")
    assert "exchange" in answer["scope"]
    code, answer = checked(*asked, "--capacity", "1")
    assert (code, answer["class"]) == (1, "cycle")
    assert checked("--replay", answer["replay"])[1]["class"] == "cycle"
