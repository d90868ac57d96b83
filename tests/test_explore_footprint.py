"""What tasks of a policy may touch is told from their code, and what cannot be told conflicts with everything."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kernel.sched.fine import Fine
from kernel.sched.unordered import Unordered
from kernel.topology import World
from verify.explore.certify import certify
from verify.explore.execution import execute
from verify.explore.policy import Scope, check
from verify.explore.result import Conclusion
from verify.sim.footprint import gate_calls
from verify.trial.enact import run
from verify.trial.family import family

if TYPE_CHECKING:
    from kernel.sched.policy import Gate, Limits, Policy

CROSSED = World(2, 2, 2)


async def plain(self: Any, gate: Gate) -> None:
    await gate.completed()
    gate.release(gate.plan.span)


async def other(self: Any, gate: Gate) -> None:
    await gate.drained()
    gate.launch_decode()


async def both(self: Any, gate: Gate) -> None:
    await gate.drained()
    gate.release(1)


async def counts(self: Any, gate: Gate) -> None:
    self.count = 1
    gate.release(1)


async def reads(self: Any, gate: Gate) -> None:
    if self.ready:
        gate.release(1)


async def meets(self: Any, gate: Gate) -> None:
    await gate.rendezvous("pre-d")


async def globals_(self: Any, gate: Gate) -> None:
    print(gate.plan)


async def stores(self: Any, gate: Gate) -> None:
    gate.plan.extra["x"] = 1  # type: ignore[attr-defined]


async def makes(self: Any, gate: Gate) -> None:
    tell = lambda: print("released")  # noqa: E731
    tell()
    gate.release(1)


def closes() -> Any:
    done = False

    async def body(self: Any, gate: Gate) -> None:
        nonlocal done
        await gate.completed()
        done = True

    return body


def test_only_calls_of_a_gate_are_plain() -> None:
    assert gate_calls(plain.__code__) == ("P",)
    assert gate_calls(other.__code__) == ("D",)
    assert gate_calls(both.__code__) == ("D", "P")
    assert gate_calls(Unordered._prefill.__code__) == ("P",)
    assert gate_calls(Unordered._decode.__code__) == ("D",)
    for anything in (counts, reads, meets, globals_, stores, makes, closes(), Fine.turn, Unordered.turn):
        assert gate_calls(anything.__code__) is None, anything


# -- policies whose tasks share something -----------------------------------------------------------------------------


class Racing(Fine):
    """Two tasks that tell each other by a variable who was first; one order of them forgets D."""

    name: ClassVar[str] = "racing"

    async def turn(self, gate: Gate) -> None:
        first: list[str] = []

        async def decode() -> None:
            await gate.drained()
            first.append("D")

        async def prefill() -> None:
            await gate.completed()
            first.append("P")

        async with asyncio.TaskGroup() as both:
            both.create_task(decode(), name="decode")
            both.create_task(prefill(), name="prefill")
        if self.broken and first[0] == "P" and gate.p_active:
            return
        gate.launch_decode()
        gate.release(gate.plan.span)

    broken: ClassVar[bool] = True


class Agreeing(Racing):
    """The same race, with nothing that depends on it."""

    broken: ClassVar[bool] = False


class Timed(Fine):
    """Waits for D, but not for long."""

    name: ClassVar[str] = "timed"

    async def turn(self, gate: Gate) -> None:
        try:
            async with asyncio.timeout(0.01):
                await gate.drained()
        except TimeoutError:
            pass
        await super().turn(gate)


def made(cls: type[Any], spec: str, limits: Limits) -> Policy:
    policy: Policy = cls(limits)
    return policy


def scenario() -> Any:
    meets = next(each for each in family(CROSSED.under(None), "mine", 2, 2) if each.name == "P meets D after 1")
    return replace(meets, policy="mine")


def test_tasks_that_share_a_variable_race() -> None:
    first = execute(partial(run, scenario(), partial(made, Agreeing)))
    assert first.failure is None
    assert {race.thing[0] for race in first.trace.races} >= {"python"}


def test_a_fault_that_one_order_of_two_tasks_has_is_found() -> None:
    result = certify(partial(run, scenario(), partial(made, Racing)), "a race", budget=60)
    assert result.verdict is Conclusion.REFUTED, result
    agreeing = certify(partial(run, scenario(), partial(made, Agreeing)), "a race", budget=20)
    assert agreeing.verdict is not Conclusion.REFUTED, agreeing


def test_a_policy_that_waits_for_a_clock_is_not_proved() -> None:
    report = check(Scope("mine", CROSSED, 2, 2, budget=20), partial(made, Timed), explained=False)
    assert report.verdict is Conclusion.INCONCLUSIVE
    assert "clock" in report.guarantees["deadlock_free"].reason
    assert "test_explore_footprint.py" in report.guarantees["deadlock_free"].reason
