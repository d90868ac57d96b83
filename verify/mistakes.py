"""Policies with one planted mistake each, to see whether whatever looks for mistakes finds them.

All are `fine` with a few lines changed. A policy must not know its rank; some of these do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kernel.sched.fine import Fine

if TYPE_CHECKING:
    from kernel.sched.planner import Situation
    from kernel.sched.policy import Gate, Limits, Memory, Plan, Policy, RankView


@dataclass(frozen=True)
class Mistake:
    """policy: its class. breaks: rules (`verify.trial.findings`) of which one is found broken. say: what is wrong."""

    name: str
    policy: type[Fine]
    breaks: tuple[str, ...]
    say: str

    def make(self, spec: str, limits: Limits) -> Policy:
        """As `make_policy` of `verify.trial.enact.run`."""
        return self.policy(limits)

    def __repr__(self) -> str:
        return f"<mistake {self.name}: {self.say}>"


def rank_of(gate: Any) -> int:
    """The rank behind a gate, which no policy should ask for."""
    inner = getattr(gate, "_gate", gate)
    return int(inner._rank.rank)


class Greedy(Fine):
    """The span is twice what it says."""

    def span(self, now: Situation) -> int:
        return 2 * int(self.config.span)


class Starving(Fine):
    """Prefill first, decode when there is none left."""

    def decode_now(self, now: Situation) -> bool:
        return not now.p_active


class Forgetful(Fine):
    """No permit in rounds without decode."""

    async def turn(self, gate: Gate) -> None:
        if gate.d_ready:
            await super().turn(gate)


class Early(Fine):
    """The permit before the launch, with a wait between."""

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        await gate.reached()
        gate.release(gate.plan.span)
        await gate.rendezvous("pre-d")
        gate.launch_decode()
        await gate.rendezvous("post-d")


class Absent(Fine):
    """Rank 0 spares the first rendezvous."""

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active or rank_of(gate) != 0:
            await super().turn(gate)
            return
        await gate.reached()
        gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span)


class Local(Fine):
    """Rank 0 lets prefill go on by one boundary more."""

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        await gate.reached()
        await gate.rendezvous("pre-d")
        gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span + (rank_of(gate) == 0))


class Idle(Fine):
    """A rank without decode rows makes no launch."""

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active and gate.d_ready and not min(gate.plan.decode):
            return
        await super().turn(gate)


class Hopeful(Fine):
    """Promotes an epoch before it is complete."""

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        plan, after = super().plan(views, memory)
        if plan.epoch >= 0 and plan.promote < 0 and plan.activate < 0:
            plan = replace(plan, promote=plan.epoch)
        return plan, after


class Moody(Fine):
    """The plan depends on how often it was asked."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.asked: list[int] = []

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        self.asked.append(memory.round)
        plan, after = super().plan(views, memory)
        return replace(plan, lookahead=len(self.asked) % 3), after


def _mistake(policy: type[Fine], *breaks: str) -> Mistake:
    return Mistake(policy.__name__.lower(), policy, breaks, (policy.__doc__ or "").strip().rstrip("."))


MISTAKES = (
    _mistake(Greedy, "decode_bound"),
    _mistake(Starving, "decode_bound"),
    _mistake(Forgetful, "epochs_complete", "decode_bound", "deadlock_free"),
    _mistake(Early, "order", "permit"),
    _mistake(Absent, "shared plan"),
    _mistake(Local, "shared plan", "order", "permit"),
    _mistake(Idle, "turnstile"),
    _mistake(Hopeful, "promotion"),
    _mistake(Moody, "pure plan"),
)
"""All of them, the simplest first."""
