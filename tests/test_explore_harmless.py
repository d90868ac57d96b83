"""Changes that look wrong and are not: under a shared plan each is proved, with no false alarm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from kernel.sched import registry
from kernel.topology import World
from tests.mutants import LAUNCH, MEET, P_TASK, PAIR, POST_D, PRE_D, REACHED, RELEASE, TURN
from tests.planted import Change, planted
from tests.scripts import played, recorded
from tests.spin_twins import ALONE, NO_DIGEST, NO_ORDER
from verify.blame import Class
from verify.explore.certify import judge
from verify.explore.policy import Scope, check
from verify.explore.result import Conclusion
from verify.trial.enact import run
from verify.trial.family import family
from verify.trial.findings import GUARANTEES

if TYPE_CHECKING:
    from verify.explore.policy import Report

BEFORE_LAUNCH: Final = (
    Change(TURN, LAUNCH, "gate.release(gate.plan.span); gate.launch_decode()"),
    Change(TURN, RELEASE, "pass"),
)


@dataclass(frozen=True, slots=True)
class Harmless:
    """name: what is changed. changes: how. why: it does no harm. races: more than one execution is needed."""

    name: str
    why: str
    changes: tuple[Change, ...] = ()
    policy: str = "fine"
    world: World = PAIR
    capacity: int = 1
    races: bool = False


HARMLESS: Final = (
    Harmless(
        "both rendezvous dropped, plan shared by the round's last exchange",
        "stop, launch and permit order the streams on each rank by themselves",
        (Change(TURN, PRE_D, "pass"), Change(TURN, POST_D, "pass")),
    ),
    Harmless(
        "permit after the launch and before post-d", "D is on the stream already",
        (Change(TURN, POST_D, "gate.release(gate.plan.span)"),
         Change(TURN, RELEASE, 'await gate.rendezvous("post-d")')),
    ),
    Harmless(
        "permit before the launch, no await between, guard off", "every rank enqueues P's segment first, then D",
        (*BEFORE_LAUNCH, NO_ORDER),
    ),
    Harmless(
        "pre-d dropped", "the exchange that ends the round compares the same things", (Change(TURN, PRE_D, "pass"),)
    ),
    Harmless("lean", "the same, as shipped", policy="lean"),
    Harmless("lean without digest and hash", "they find divergence, and order nothing", NO_DIGEST, policy="lean"),
    Harmless("digest and hash not compared", "they find divergence, and order nothing", NO_DIGEST),
    Harmless(
        "a pause before the launch", "P stands",
        (Change(TURN, LAUNCH, "await asyncio.sleep(0); await asyncio.sleep(0); gate.launch_decode()"),),
    ),
    Harmless(
        "a pause before the permit on one rank", "the others do not wait for it before their next rendezvous",
        (Change(TURN, RELEASE, "await asyncio.sleep(0); gate.release(gate.plan.span)", 1),),
    ),
    Harmless(
        "device of P awaited early", "all ranks have enqueued all of it",
        (Change(TURN, REACHED, "await gate.completed(); await gate.reached()"),),
    ),
    Harmless(
        "device of P awaited early on one rank", "all ranks have enqueued all of it",
        (Change(TURN, REACHED, "await gate.completed()", 1),),
    ),
    Harmless(
        "device of D awaited after the launch", "all ranks launch it without waiting",
        (Change(TURN, POST_D, 'await gate.drained(); await gate.rendezvous("post-d")', 1),),
    ),
    Harmless(
        "devices awaited in the other order", "independent waits",
        (Change(TURN, REACHED, "await gate.drained(); await gate.completed(); await gate.reached()", 0),
         Change(TURN, REACHED, "await gate.completed(); await gate.drained(); await gate.reached()", 1)),
    ),
    Harmless(
        "endpoint awaited after pre-d", "the launch still finds P stopped",
        (Change(TURN, REACHED, "pass"),
         Change(TURN, PRE_D, 'await gate.rendezvous("pre-d"); await gate.reached()')),
    ),
    Harmless(
        "endpoint not awaited", "this kernel's release enqueues at once, so that P stands already",
        (Change(TURN, REACHED, "pass"),),
    ),
    Harmless(
        "completion asked of the device, agreed in the exchange", "all ranks plan from the same answers",
        (Change("kernel.rank:Rank._settle", "            if self._p.program.routes or self.world.splits:",
                "if False:"),),
        races=True,
    ),
    Harmless(
        "tokens committed early on one replica", "a replica of one rank has no peers to differ from",
        (Change("kernel.rank:Rank._exchange", "        await self._harvest(self._plan.round - 1)",
                "await self._harvest(self._plan.round)", 1),),
    ),
    Harmless(
        "no route, room for both", "neither kernel of the pair waits for room",
        world=World(2, adp=2, route="none"), capacity=2, races=True,
    ),
)  # fmt: skip


def judged(case: Harmless, ranks: int = 2) -> Report:
    world = World(ranks, adp=ranks, route=case.world.route)
    return check(Scope(case.policy, world, 2, 3, case.capacity), explained=False)


@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: case.name)
def test_proved(case: Harmless) -> None:
    with planted(case.changes):
        report = judged(case)
    assert report.verdict is Conclusion.PROVED, (case.why, report.guarantees)
    assert all(result.verdict is Conclusion.PROVED for result in report.guarantees.values())
    assert (report.executions > report.scenarios) is case.races


@pytest.mark.slow
@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: case.name)
def test_proved_with_three_ranks(case: Harmless) -> None:
    with planted(case.changes):
        assert judged(case, 3).verdict is Conclusion.PROVED


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("member", ["P before D", MEET, "a second epoch during the first", "a prompt of three epochs"])
def test_no_rendezvous_at_all_and_the_plan_from_a_script(member: str, ranks: int) -> None:
    """Nothing passes between the hosts any more: what orders the devices is local."""
    world = World(ranks, adp=ranks, route="paper")
    scenario = next(each for each in family(world, "fine", 2, 3, capacity=1) if each.name == member)
    make = played(scenario, [recorded(scenario)] * ranks)
    with planted([ALONE]):
        results = judge(partial(run, scenario, make), member, GUARANTEES)
        outcome = run(scenario, make)
    assert outcome.clean
    for rule, result in results.items():
        assert result.verdict is Conclusion.PROVED, (rule, result)
        assert result.evidence.executions == 1


def test_the_guard_calls_it_a_rule_and_nothing_worse() -> None:
    """The kernel's order of keys is D before P; P before D on every rank breaks it, and cannot hang."""
    with planted(BEFORE_LAUNCH):
        report = judged(HARMLESS[2])
    assert (report.verdict, report.cls) == (Conclusion.REFUTED, Class.RULE)
    assert report.guarantees["deadlock_free"].verdict is not Conclusion.REFUTED
    failure = report.guarantees["rules"].evidence.failure
    assert failure is not None
    assert failure.rule == "order"


def test_a_slow_enqueue_is_awaited() -> None:
    """P's host enqueue as a task that takes its time on one rank: `reached` is what makes that harmless."""
    scenario = next(each for each in family(PAIR, "fine", 1, 3, capacity=1) if each.name == MEET)
    with planted([replace(P_TASK, rank=1)]):
        result = judge(partial(run, scenario, registry.create), MEET, GUARANTEES)["deadlock_free"]
    assert result.verdict is Conclusion.PROVED
    assert result.evidence.executions > 1


def test_without_script_and_rendezvous_the_ranks_know_nothing_of_each_other() -> None:
    """So it is the script that shares the plan above, and the rendezvous is gone indeed."""
    scenario = next(each for each in family(PAIR, "fine", 2, 3) if each.name == "idle replicas")
    with planted([ALONE]):
        result = judge(partial(run, scenario, registry.create), "alone", GUARANTEES)["deadlock_free"]
    assert result.verdict is Conclusion.REFUTED
    assert result.cls is Class.MISSING
