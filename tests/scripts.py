"""Plans played from a script, so that the rendezvous can be taken away: ours is shared over them.

The script is what the real planner planned in an ordinary run of the same scenario. Played on every rank, the plan is
shared without a word between the ranks; played a round later on one rank, it is that rank's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernel.sched import registry
from kernel.sched.policy import Plan
from verify.trial.enact import run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.sched.policy import Limits, Memory, RankView
    from verify.trial.scenario import Scenario

Script = tuple[tuple[Plan, "Memory"], ...]


class Scripted:
    """A shipped policy whose `plan` reads from a script. rank: whose it is."""

    def __init__(self, policy: Any, rank: int, script: Script) -> None:
        self.policy, self.rank, self.script = policy, rank, script
        self.name, self.guarantees, self.limits = policy.name, policy.guarantees, policy.limits
        self.config = policy.config

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        return self.script[memory.round]

    async def turn(self, gate: Any) -> None:
        await self.policy.turn(gate)


def recorded(scenario: Scenario) -> Script:
    """What every rank plans in `scenario`."""
    seen: dict[int, tuple[Plan, Memory]] = {}

    def make(spec: str, limits: Limits) -> Any:
        policy: Any = registry.create(spec, limits)
        original = policy.plan

        def plan(views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
            answer: tuple[Plan, Memory] = original(views, memory)
            seen[memory.round] = answer
            return answer

        policy.plan = plan
        return policy

    assert run(scenario, make).clean
    return tuple(seen[round_] for round_ in range(len(seen)))


def played(scenario: Scenario, scripts: Sequence[Script]) -> Callable[[str, Limits], Any]:
    """Makes policies that play `scripts`, one a rank, in the order in which `verify.trial.enact` asks for them."""
    made = 0

    def make(spec: str, limits: Limits) -> Any:
        nonlocal made
        rank, made = made % limits.size, made + 1
        return Scripted(registry.create(spec, limits), rank, scripts[rank])

    return make


def decoding_late(script: Script) -> Script:
    """Each D iteration from the first one beside P on a round later: this rank notices ready D in its own time."""
    first = next(i for i, (plan, _) in enumerate(script) if plan.bucket and plan.activate >= 0)
    late = list(script[:first])
    before = replace(script[first][0], decode=(), bucket=0)
    for plan, memory in script[first:]:
        late.append((replace(plan, decode=before.decode, bucket=before.bucket, span=plan.span, idle=False), memory))
        before = plan
    return tuple(late)


def activating_late(script: Script) -> Script:
    """The first epoch beside D starts a round later here, and is open for as many rounds."""
    first = next(i for i, (plan, _) in enumerate(script) if plan.bucket and plan.activate >= 0)
    late = list(script[:first])
    before = replace(script[first][0], activate=-1, prefill=(), epoch=-1, promote=-1)
    for plan, memory in script[first:]:
        moved = {name: getattr(before, name) for name in ("activate", "prefill", "epoch", "promote", "span")}
        late.append((replace(plan, **moved, idle=False), memory))
        before = plan
    return tuple(late)
