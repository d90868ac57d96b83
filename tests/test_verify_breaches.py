"""Policies that break what makes one process stand for all ranks, each in a way that every simulated rank agrees on."""

from __future__ import annotations

import asyncio
import os
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kernel.errors import UsageError
from kernel.sched.fine import Fine
from kernel.sched.planner import Planner
from kernel.sched.policy import Guarantees
from kernel.topology import World
from verify.explore.policy import Scope, check
from verify.explore.result import Conclusion

if TYPE_CHECKING:
    from kernel.sched.planner import Situation
    from kernel.sched.policy import Gate, Limits, Policy

STARTED = time.monotonic()
SEEN: list[int] = []


class Clock(Fine):
    async def turn(self, gate: Gate) -> None:
        if time.monotonic() < STARTED + 1e9:
            await super().turn(gate)


class Chance(Fine):
    async def turn(self, gate: Gate) -> None:
        if random.random() > 1e-9:
            await super().turn(gate)


class Hashed(Fine):
    def span(self, now: Situation) -> int:
        return 1 + hash(f"{now.rows}") % 1


class Process(Fine):
    def span(self, now: Situation) -> int:
        return 1 + os.getpid() * 0


class ByEnvironment(Fine):
    def span(self, now: Situation) -> int:
        return 1 + 0 * len(os.environ["PATH"])


class Module(Fine):
    async def turn(self, gate: Gate) -> None:
        SEEN.append(gate.plan.round)
        await super().turn(gate)


class OfItsClass(Fine):
    turns: ClassVar[dict[int, int]] = {}

    async def turn(self, gate: Gate) -> None:
        self.turns[gate.plan.round] = 1
        await super().turn(gate)


class Polls(Fine):
    """Drives a wait of the gate by hand, to see whether it would suspend."""

    async def turn(self, gate: Gate) -> None:
        wait: Any = gate.drained()
        try:
            wait.send(None)
            done = False
        except StopIteration:
            done = True
        wait.close()
        await gate.reached()
        if done or not gate.p_active:
            await super().turn(gate)
        else:
            gate.launch_decode()
            await gate.rendezvous("post-d")
            gate.release(gate.plan.span)


class Withholds(Planner):
    """Claims one segment; grants one in each round, and no D as long as P is there."""

    name: ClassVar[str] = "withholds"

    def decode_now(self, now: Situation) -> bool:
        return not now.p_active

    def span(self, now: Situation) -> int:
        return 1000

    async def turn(self, gate: Gate) -> None:
        await gate.reached()
        await gate.rendezvous("pre-d")
        gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(1)


class Cancels(Fine):
    async def turn(self, gate: Gate) -> None:
        await super().turn(gate)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()


class Interrupts(Fine):
    async def turn(self, gate: Gate) -> None:
        raise KeyboardInterrupt


def made(cls: type[Any], spec: str, limits: Limits) -> Policy:
    policy: Policy = cls(limits)
    return policy


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Clock, "asks for the time"),
        (Chance, "decides by chance"),
        (Hashed, "differs from process to process"),
        (Process, "its process's own"),
        (Module, "belongs into its Memory"),
        (OfItsClass, "belongs into its Memory"),
        (Polls, ""),
        (Withholds, "the bound is one segment"),
        (Cancels, "cancelled"),
        (Interrupts, "KeyboardInterrupt"),
    ],
)
def test_what_one_process_would_hide_is_refuted(cls: type[Any], says: str) -> None:
    report = check(Scope("mine", World(2, 2, 2), 2, 3, budget=40), partial(made, cls), explained=False)
    assert report.verdict is Conclusion.REFUTED, report.guarantees
    refuted = [result.reason for result in report.guarantees.values() if result.verdict is Conclusion.REFUTED]
    assert any(says in reason for reason in refuted), refuted


def test_the_environment_of_a_process_is_no_input() -> None:
    report = check(Scope("mine", World(2, 2, 2), 2, 3), partial(made, ByEnvironment), explained=False)
    assert report.verdict is Conclusion.REFUTED
    assert "environment" in str([result.reason for result in report.guarantees.values()])


def test_a_policy_claims_a_bound_that_there_is() -> None:
    with pytest.raises(UsageError, match="span, epoch, backlog"):
        Guarantees(decode_bound="whatever")
