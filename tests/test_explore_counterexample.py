"""Counterexamples: at most 30 lines, 120 columns and 6 switches; they say what failed, where it went wrong and why."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.sched import registry
from kernel.topology import World
from tests.failing import Fences, Forgets, Late, Skips, on_ranks, racing
from verify.blame import Certainty, Class
from verify.explore.counterexample import Case, Counterexample, Effort, explain
from verify.explore.dpor import explore
from verify.explore.execution import execute
from verify.explore.render import LINES, WIDTH
from verify.explore.rules import rule_of
from verify.explore.smaller import case_of, case_of_token
from verify.explore.story import ROWS, SWITCHES, Row, Story, _fit
from verify.explore.token import Token, rerun
from verify.sim.errors import Standstill
from verify.sim.world import SimWorld
from verify.trial.family import family
from verify.trial.scenario import Scenario

if TYPE_CHECKING:
    from verify.explore.execution import Execution

ROOT = Path(__file__).parent.parent
EFFORT = Effort(scenarios=12, critical=12)


def failing(case: Case[Any], limit: int = 60) -> Execution:
    for execution, _ in zip(explore(case.program(case.scenario)), range(limit), strict=False):
        if execution.failure is not None:
            return execution
    raise AssertionError("nothing fails")


def scenario_of(world: World, policy: str, capacity: int = 1, segments: int = 1) -> Scenario:
    members = family(world, policy, segments, 2, capacity=capacity)
    return next(each for each in members if each.name == "P meets D after 0")


def told(world: World, policy: Any, capacity: int = 1, **effort: Any) -> Counterexample:
    """The counterexample of a policy, of the registry or hand-made."""
    make: Any = registry.create if isinstance(policy, str) else on_ranks(policy)
    name = policy if isinstance(policy, str) else policy.__name__.lower()
    case = case_of(scenario_of(world, name, capacity), make)
    return explain(case, failing(case), effort=EFFORT)


def check(found: Counterexample) -> list[str]:
    """What holds of all; the lines."""
    lines = str(found).splitlines()
    assert len(lines) <= LINES == 30
    assert max(map(len, lines)) <= WIDTH == 120
    assert found.switches <= SWITCHES == 6
    assert 0 < len(found.lanes) <= ROWS
    assert sum(row.critical for row in found.lanes) <= 1
    assert json.loads(json.dumps(found.to_dict()))["replay"] == found.token
    joined = "\n".join(lines).replace("\\\n", "")
    assert joined.endswith(f"turnstile check --replay {found.token}")
    return lines


def replays(found: Counterexample, make: Any = registry.create) -> None:
    token = Token.parse(found.token)
    case = case_of(Scenario.from_dict(dict(token.scenario)), make)
    again = rerun(token, case.program(case.scenario))
    assert (again.same, again.exact) == (True, True), again.say


# -- shipped policies -------------------------------------------------------------------------------------------


def test_unordered_streams_without_room() -> None:
    found = told(World(2, adp=2, ep=2, route="none"), "unordered")
    lines = check(found)
    assert (found.cls, found.certainty, found.fidelity) == (Class.CYCLE, Certainty.CONDITIONAL, "fifo")
    assert "no room for all of its kernels at once" in lines[0]
    assert sum(row.critical for row in found.lanes) == 1
    assert found.critical.startswith("rank ")
    assert " before it " in found.critical
    assert found.broken.section == "paper section 4"
    starts = {row.text.partition(" starts")[0] for row in found.lanes if " starts" in row.text}
    assert starts >= {re.match(r"rank \d: (.*?) holds", line)[1] for line in found.chain}  # type: ignore[index]
    replays(found)


def test_unordered_on_one_stream_is_certain() -> None:
    found = told(World(2, adp=2, ep=2, route="paper"), "unordered", 2)
    lines = check(found)
    assert (found.cls, found.certainty, found.condition) == (Class.CYCLE, Certainty.CERTAIN, "")
    assert found.broken.name == "order of the registered pair"
    assert all("on stream D" in line for line in found.chain)
    assert any("launches D" in line for line in lines)
    assert any("enqueues P" in line for line in lines)
    assert "rounds 0-" in str(found)
    replays(found)


def test_the_turnstile_without_its_route() -> None:
    found = told(World(2, adp=2, ep=2, route="none"), "fine")
    check(found)
    assert (found.cls, found.certainty) == (Class.CYCLE, Certainty.CONDITIONAL)
    assert found.broken.name == "selective stream route"
    replays(found)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["unordered", "global_complete"])
def test_four_ranks(policy: str) -> None:
    world = World(4, adp=2, ep=2, route="none" if policy == "unordered" else "paper")
    case = case_of(scenario_of(world, policy))
    found = explain(case, failing(case), effort=Effort(scenarios=0, critical=6))
    lines = check(found)
    assert found.cls is Class.CYCLE
    assert len(found.ranks) < 4
    assert "not shown" in "".join(lines)
    replays(found)


def test_a_cycle_is_explained_in_a_smaller_world() -> None:
    found = told(World(4, adp=2, ep=2, route="none"), "fine")
    check(found)
    assert "on g2 " in found.scope


# -- hand-made policies -----------------------------------------------------------------------------------------


def test_a_rank_that_skips_a_rendezvous() -> None:
    found = told(World(2, route="paper"), Skips, 2)
    lines = check(found)
    assert (found.cls, found.rule, found.broken.name) == (Class.RULE, "shared plan", "rank-shared plan")
    assert any("rank 1 differs in rendezvous tag" in line for line in lines)
    assert "every schedule ends like this" in found.critical
    replays(found, on_ranks(Skips))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_never_comes(ranks: int) -> None:
    found = told(World(ranks, adp=2, route="paper"), Forgets, 2)
    lines = check(found)
    assert (found.cls, found.broken.name) == (Class.MISSING, "rank-aligned boundaries")
    assert "for rank 1, which waits at tests/failing.py:" in found.chain[0]
    assert any("waits in rendezvous post-d" in line for line in lines)


def test_a_rank_that_launches_late() -> None:
    found = told(World(2, adp=2, route="paper"), Late, 2)
    check(found)
    assert (found.cls, found.certainty) == (Class.CYCLE, Certainty.CERTAIN)
    assert found.broken.name == "order of the registered pair"
    assert all("tests/failing.py:" in text for _, text in found.hosts)
    orders = {
        rank: [row.text[:8] for row in found.lanes if row.rank == rank and row.text[:8] in ("launches", "enqueues")]
        for rank in (0, 1)
    }
    assert orders == {0: ["launches", "enqueues"], 1: ["enqueues", "launches"]}


@pytest.mark.slow
def test_whether_the_hosts_agree_on_the_order_decides_the_rule() -> None:
    found = told(World(2, adp=2, route="none"), Late)
    check(found)
    assert (found.certainty, found.broken.name) == (Certainty.CONDITIONAL, "order of the registered pair")


def test_a_rendezvous_that_waits_for_a_device() -> None:
    found = told(World(2, adp=2, route="paper"), Fences, 2)
    check(found)
    assert (found.cls, found.broken.name) == (Class.CYCLE, "control phases wait for no device")
    assert "has not enqueued it" in found.chain[0]


# -- fidelity ---------------------------------------------------------------------------------------------------


def test_what_asyncio_cannot_do_is_said_to_be_so() -> None:
    """Two tasks that are ready in a fixed order: only another order of ready tasks fails."""

    def program(**options: Any) -> Any:
        async def main(sim: Any) -> None:
            order: list[int] = []

            async def note(number: int) -> None:
                order.append(number)

            async with asyncio.TaskGroup() as group:
                group.create_task(note(0), name="first")
                group.create_task(note(1), name="second")
            if order != [0, 1]:
                await asyncio.Event().wait()

        return SimWorld(World(1), **options).run(main)

    case = Case("two tasks", lambda _: program)
    found = explain(case, failing(case), effort=Effort(fifo=10))
    assert (found.fidelity, found.certainty) == ("any", Certainty.UNDECIDED)
    assert "in an order that asyncio was not seen to have" in " ".join(str(found).split())
    assert Token.parse(found.token).fidelity == "any"
    assert explain(Case("racing", lambda _: racing()), failing(Case("racing", lambda _: racing()))).fidelity == "fifo"


# -- room on the screen -----------------------------------------------------------------------------------------


def test_long_texts_are_cut() -> None:
    found = told(World(2, adp=2, ep=2, route="paper"), "unordered", 2)
    longer = replace(
        found, scope="a word " * 200, critical="step " * 200,
        chain=tuple(f"rank {n}: " + "waits " * 60 for n in range(20)),
        hosts=tuple((rank, "place " * 40) for rank in range(9)), condition="perhaps " * 90,
        token="t1." + "x" * 650,
    )  # fmt: skip
    check(longer)
    assert "the token has 5003 characters" in str(replace(longer, token="t1." + "x" * 5000))


def test_a_story_of_many_switches_is_cut_and_keeps_the_critical_event() -> None:
    rows = tuple(Row(number % 2, f"event {number}", number, number == 1) for number in range(30))
    cut = _fit(Story("so far", rows, (0, 1)))
    assert 0 < cut.switches <= SWITCHES
    assert [row.step for row in cut.rows if row.critical] == [1]
    assert cut.rows[-1].step == 29
    assert cut.caption == f"so far; {30 - len(cut.rows)} earlier events not shown"


def test_what_ran_with_more_than_its_scenario_says_so_in_the_token() -> None:
    scenario = scenario_of(World(2, adp=2, ep=2, route="none"), "fine")
    case = case_of(scenario, depth=1, graphs=True)
    found = explain(case, failing(case), effort=Effort(scenarios=0, critical=2))
    token = Token.parse(found.token)
    assert token.scenario["with"] == {"depth": 1, "graphs": True}
    again = rerun(token, (same := case_of_token(token)).program(same.scenario))
    assert again.exact, again.say
    with pytest.raises(UsageError):
        case_of_token(replace(token, scenario={"policy": "fine"}))


# -- rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "ordered", "name"),
    [
        (("D", "P", "room"), True, "selective stream route"),
        (("D", "P", "room"), False, "order of the registered pair"),
        (("P", "room"), None, "residency"),
        (("D", "P", "queue"), None, "order of the registered pair"),
        (("end", "rendezvous"), None, "rank-aligned boundaries"),
        (("D", "host", "rendezvous"), None, "control phases wait for no device"),
    ],
)
def test_the_rule_behind_a_standstill(kinds: tuple[str, ...], ordered: bool | None, name: str) -> None:
    assert rule_of(Class.CYCLE, "deadlock_free", Standstill(Class.CYCLE, kinds=kinds), ordered).name == name


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("permit", "permit"),
        ("lease", "reservation"),
        ("pure plan", "rank-shared plan"),
        ("decode_bound", "progress of D"),
    ],
)
def test_the_rule_behind_a_finding(rule: str, name: str) -> None:
    assert rule_of(Class.INVARIANT, rule).name == name


# -- the same everywhere ----------------------------------------------------------------------------------------

_SCRIPT = """
from kernel.topology import World
from tests.test_explore_counterexample import told
print(told(World(2, adp=2, ep=2, route="paper"), "unordered", 2))
"""


def test_the_same_counterexample_under_other_hash_seeds() -> None:
    texts = set()
    for seed in ("0", "1", "4242"):
        run = subprocess.run(
            [sys.executable, "-c", _SCRIPT], cwd=ROOT, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        texts.add(run.stdout)
    assert len(texts) == 1


def test_nothing_to_explain_is_refused() -> None:
    program = racing(capacity=2)
    with pytest.raises(ValueError, match="does not fail"):
        explain(Case("fine", lambda _: program), execute(program))
