"""What a step of a rank's loop may touch, kind by kind: too little, and an order of two steps is never looked at."""

from __future__ import annotations

import asyncio
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import OrderViolation
from kernel.gate import RankGate
from kernel.prefill import Epoch
from kernel.request import Phase, Row
from kernel.sched.policy import Plan
from kernel.topology import World
from verify.explore.dpor import explore
from verify.explore.execution import execute
from verify.explore.lanes import LaneLoop
from verify.sim.footprint import everything, gate_calls, touched
from verify.sim.kv import SimKV
from verify.sim.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kernel.sched.policy import Gate
    from verify.sim.world import SimRank

SEEN: list[str] = []
MOST = 100


# -- code -------------------------------------------------------------------------------------------------------


async def three(self: Any, gate: Gate, more: Any) -> None:
    await gate.reached()


async def keyword(gate: Gate, *, more: Any = None) -> None:
    await gate.reached()


async def inner(gate: Gate) -> None:
    note: Any = lambda: SEEN.append("P")  # noqa: E731
    note()
    await gate.reached()


async def inner_with_a_cell(gate: Gate) -> None:
    plan = gate.plan
    note: Any = lambda: plan.round  # noqa: E731
    note()
    await gate.reached()


async def attribute(gate: Gate) -> None:
    gate.plan = Plan(0) if False else gate.plan
    await gate.reached()


async def stored(gate: Gate) -> None:
    gate.plan = gate.plan
    await gate.reached()


async def deleted(gate: Gate) -> None:
    del gate.plan
    await gate.reached()


async def itself(self: Any) -> None:
    await self.reached()


async def word(gate: Gate) -> None:
    what: Any = "self"
    if gate.plan != what:
        await gate.reached()


async def another_self(gate: Gate) -> None:
    self = gate
    await self.reached()


async def never_uses_self(self: Any, gate: Gate) -> None:
    what: Any = "self"
    if gate.plan != what:
        await gate.reached()


@pytest.mark.parametrize(
    "anything", [three, keyword, inner, inner_with_a_cell, attribute, stored, deleted, itself], ids=lambda f: f.__name__
)
def test_code_that_may_touch_more(anything: Any) -> None:
    assert gate_calls(anything.__code__) is None


@pytest.mark.parametrize("plain", [word, another_self, never_uses_self], ids=lambda f: f.__name__)
def test_code_that_touches_one_phase(plain: Any) -> None:
    assert gate_calls(plain.__code__) == ("P",)


def things(coro: Any) -> Any:
    try:
        return touched(SimpleNamespace(get_coro=lambda: coro), 3)  # type: ignore[arg-type]
    finally:
        if hasattr(coro, "close"):
            coro.close()


def test_what_a_task_touches() -> None:
    gate: Any = RankGate(Plan(0), SimpleNamespace(rank=3), None)  # type: ignore[arg-type]
    every = everything(3)
    assert len(every) == 3
    assert things(word(gate)) == (("gate", 3, "P"),)
    assert things(inner(gate)) == every, "harmless parameters do not make its code so"
    assert things(word([])) == every, "a list is not a gate"  # type: ignore[arg-type]
    ended = word(gate)
    ended.close()
    assert things(ended) == every
    assert things(SimpleNamespace()) == every
    epoch: Any = SimpleNamespace()
    for of_epoch in (Epoch._stand(epoch, None, 1, ""), Epoch._through(epoch, None, 1, ""), Epoch._finish(epoch, epoch)):
        assert things(of_epoch) == (), "what others see of an epoch is published by the rank's own task"


# -- steps ------------------------------------------------------------------------------------------------------


def program_of(main: Callable[[SimRank, list[str]], Coroutine[Any, Any, None]], seen: list[str]) -> Any:
    """Runs `main` on one rank, which notes an order; each execution's order goes to `seen`."""

    def program(**options: Any) -> None:
        order: list[str] = []

        async def one(sim: SimRank) -> None:
            await main(sim, order)

        SimWorld(World(1), **options).run(one)
        seen.append("".join(order))

    return program


async def waits_for_devices(sim: SimRank, order: list[str]) -> None:
    async def wait(phase: Phase) -> None:
        event = sim.device.stream(phase).submit(lambda: sim.device.compute(str(phase), 7), str(phase))
        await event.wait()
        order.append(str(phase))

    async with asyncio.TaskGroup() as group:
        for phase in Phase:
            group.create_task(wait(phase), name=str(phase))


async def calls_back(sim: SimRank, order: list[str]) -> None:
    async def nothing() -> None: ...

    tasks = [asyncio.get_running_loop().create_task(nothing(), name=name) for name in "ab"]
    for task in tasks:
        task.add_done_callback(lambda ended: order.append(ended.get_name()))
    await asyncio.gather(*tasks)


async def notes_after_a_while(sim: SimRank, order: list[str]) -> None:
    async def note(name: str, delay: float) -> None:
        await asyncio.sleep(delay)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(note("a", 0.001), name="a")
        group.create_task(note("b", 0.002), name="b")


@pytest.mark.parametrize("fifo", [False, True])
def test_what_comes_from_two_streams_comes_in_either_order(fifo: bool) -> None:
    """In production too: the queue of what is ready is one, and who joins it first is not for the rank to say."""
    seen: list[str] = []
    found = list(islice(explore(program_of(waits_for_devices, seen), fifo=fifo), MOST))
    assert set(seen) == {"DP", "PD"}
    assert len(found) < MOST


def test_callbacks_of_two_tasks_run_in_either_order() -> None:
    seen: list[str] = []
    assert len(list(islice(explore(program_of(calls_back, seen)), MOST))) < MOST
    assert {"ab", "ba"} <= set(seen)


def test_a_race_at_a_step_without_a_choice_is_passed_over() -> None:
    """The clock alone orders these two, and says so; there is no other actor to take in place of the first."""
    seen: list[str] = []
    found = list(islice(explore(program_of(notes_after_a_while, seen)), MOST))
    assert set(seen) == {"ab"}
    assert all(execution.trace.clock for execution in found)
    assert any(execution.trace.races for execution in found)


def test_a_closed_loop_takes_nothing() -> None:
    loop = LaneLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)


def test_one_run_of_one_schedule_is_always_the_same() -> None:
    seen: list[str] = []
    program = program_of(waits_for_devices, seen)
    assert execute(program).trace.names == execute(program).trace.names


def test_whether_the_other_phase_still_uses_a_block_is_a_matter_of_order() -> None:
    """D reads what P wrote once its own device work is done, which says nothing about P's."""

    def program(**options: Any) -> None:
        pool = SimKV(4)
        row = Row(0, (1, 2, 3), 0, (0,), None)

        async def main(sim: SimRank) -> None:
            device = sim.device

            def prefill() -> None:
                pool.feed(Phase.P, row)
                pool.enqueued(Phase.P, row, device.compute("P", 7))

            device.stream(Phase.P).submit(prefill, "P e0 [0,1)")
            await device.stream(Phase.D).submit(lambda: device.compute("D", 7), "D 0").wait()
            pool.feed(Phase.D, Row(0, (4,), 3, (0,), None))

        SimWorld(World(1), **options).run(main)

    found = list(islice(explore(program), MOST))
    assert len(found) < MOST
    assert {execution.failure is None for execution in found if not execution.cut} == {True, False}
    assert not found[0].trace.clock


def test_only_work_of_p_is_routed_and_only_once() -> None:
    refused: list[str] = []

    async def main(sim: SimRank) -> None:
        device = sim.device

        def routes() -> None:
            try:
                device.routed(lambda: None)
            except OrderViolation as error:
                refused.append(str(error))

        def nested() -> None:
            device.routed(routes)

        routes()
        device.stream(Phase.D).submit(routes, "D 0")
        device.stream(Phase.P).submit(nested, "P e0 [0,1)")
        device.stream(Phase.P).submit(lambda: device.routed(lambda: None), "P e0 [1,2)")

    SimWorld(World(1)).run(main)
    assert refused == ["rank 0 routes a collective outside P's work"] * 3
