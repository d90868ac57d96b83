"""Whether a policy keeps what it claims: each guarantee by itself, over the scenarios of a scope."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel.sched import registry
from verify.blame import Certainty, Class
from verify.explore.certify import BUDGET, OTHERS, Work, judge
from verify.explore.counterexample import Counterexample, explain
from verify.explore.execution import Unsteady
from verify.explore.result import Conclusion, Evidence, Result
from verify.explore.smaller import case_of
from verify.sim.world import WIDE
from verify.sources import foreign
from verify.trial.enact import run
from verify.trial.family import TELLING, family
from verify.trial.findings import GUARANTEES
from verify.trial.monitor import declared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.sched.policy import Policy
    from kernel.topology import World
    from verify.trial.enact import MakePolicy
    from verify.trial.monitor import Bound
    from verify.trial.scenario import Scenario

DOUBT = 1
"""Schedules in asyncio's own order that a policy from outside is run under besides its proof, in telling scenarios."""


@dataclass(frozen=True)
class Scope:
    """What is asked.

    policy: a spec as in `--policy`. world: the ranks; its route `auto` is the policy's wish, else `paper`. segments:
    safe boundaries of an epoch. rounds: D iterations of the turns that decode. capacity: collectives that fit on a
    device at once, WIDE for all. depth, graphs: see `verify.sim.launches`. bound: of the wait of a ready D, judged
    instead of what the policy claims. budget: executions of a scenario, and a tenth of it for those after one that
    stays open.
    """

    policy: str
    world: World
    segments: int = 2
    rounds: int = 3
    capacity: int = WIDE
    depth: int | None = None
    graphs: bool = False
    bound: Bound | None = None
    budget: int = BUDGET

    def __str__(self) -> str:
        room = "room for every kernel" if self.capacity == WIDE else f"capacity {self.capacity}"
        queue = f", launch queues of {self.depth}" if self.depth is not None else ""
        counts = f"{_count(self.segments, 'segment')}, {_count(self.rounds, 'D iteration')}"
        return f"{self.policy} on {self.world}, {counts}, {room}{queue}"


@dataclass(frozen=True)
class Report:
    """The verdict on a policy in a scope.

    guarantees: the worst result of each rule, with the scenario that it is of; `rules` stands for all rules of the seam
    and of the kernel. scenarios, executions: how many there were. claims: in words. counterexample: to the first rule
    that was refuted. open: scenarios that a larger budget may settle. unsteady: how the policy was seen not to do the
    same in every run, which refutes it.
    """

    scope: Scope
    verdict: Conclusion
    cls: Class
    certainty: Certainty
    guarantees: dict[str, Result]
    claims: dict[str, str]
    scenarios: int
    executions: int
    steps: int
    counterexample: Counterexample | None = field(default=None)
    open: tuple[Scenario, ...] = ()
    unsteady: str = ""

    @property
    def proved(self) -> bool:
        """Whether everything holds, for every schedule of every scenario."""
        return self.verdict is Conclusion.PROVED

    def to_dict(self) -> dict[str, Any]:
        """The object that `turnstile check --json` prints."""
        found = self.counterexample
        return {
            "verdict": str(self.verdict),
            "class": str(self.cls),
            "certainty": str(self.certainty),
            "scope": f"{self.scope}, {_count(self.scenarios, 'scenario')}",
            "executions": self.executions,
            "steps": self.steps,
            "guarantees": {
                rule: {
                    "claim": self.claims.get(rule, ""),
                    "verdict": str(result.verdict),
                    "class": str(result.cls),
                    "certainty": str(result.certainty),
                    "reason": result.reason,
                    "scenario": result.scope,
                    "fidelity": result.evidence.fidelity,
                }
                for rule, result in self.guarantees.items()
            },
            "replay": found.token if found is not None else None,
            "counterexample": found.to_dict() if found is not None else None,
        }


def check(
    scope: Scope,
    make_policy: MakePolicy = registry.create,
    scenarios: Iterable[Scenario] | None = None,
    *,
    explained: bool = True,
    progress: Callable[[Scenario], None] | None = None,
    work: Work | None = None,
    **options: Any,
) -> Report:
    """Judge the policy of `scope` on each of its scenarios.

    make_policy: from a spec and limits, once a rank. scenarios: instead of `verify.trial.family`. explained: whether a
    failure is shrunk and told. progress: called before each scenario. work: bounds the search of scenarios that one
    execution does not settle, all together. options: others of `verify.trial.enact.run`. Raises UsageError for a policy
    that cannot be used.
    """
    scenarios = list(scenarios) if scenarios is not None else []
    chosen = scenarios or scenarios_of(scope, make_policy)
    scope = replace(scope, world=chosen[0].world) if chosen else scope
    policy = make_policy(scope.policy, chosen[0].limits)
    own = is_foreign(policy)
    worst: dict[str, tuple[Result, Scenario]] = {}
    executions = steps = ran = 0
    unsettled: list[Scenario] = []
    unsteady = ""
    for scenario in chosen:
        if progress is not None:
            progress(scenario)
        settled = [rule for rule in GUARANTEES if rule in worst and worst[rule][0].verdict is Conclusion.REFUTED]
        rules = [rule for rule in GUARANTEES if rule not in settled]
        # Once one scenario has spent its budget in vain the answer is open at best: less of it for the others.
        open_ = any(result.verdict is Conclusion.INCONCLUSIVE for result, _ in worst.values())
        roomy = replace(scenario, capacity=WIDE) if scope.capacity < WIDE else None
        doubt = DOUBT if own and (scenarios or scenario.name in TELLING) else 0
        ran += 1
        try:
            results = judge(
                _program(scope, scenario, make_policy, options), str(scenario), rules,
                max(1, scope.budget // 10) if open_ else scope.budget,
                _program(scope, roomy, make_policy, options) if roomy is not None else None,
                settled, doubt, work, max(scope.budget, BUDGET),
            )  # fmt: skip
        except Unsteady as seen:
            unsteady = str(seen)
            worst[OTHERS] = _unsteady(str(scenario), unsteady), scenario
            break
        if any(_may_be_settled(result) for result in results.values()):
            unsettled.append(scenario)
        executions += max(result.evidence.executions for result in results.values())
        steps += max(result.evidence.steps for result in results.values())
        for rule, result in results.items():
            if rule not in worst or _rank(result) < _rank(worst[rule][0]):
                worst[rule] = result, scenario
        if any(result.evidence.hidden for result in results.values()):
            break
    order = [rule for rule in (*GUARANTEES, OTHERS) if rule in worst]
    first = min(order, key=lambda rule: _rank(worst[rule][0]))
    result, scenario = worst[first]
    found = None
    try:
        if explained and not unsteady:
            found = _explained(scope, scenario, result, make_policy, options)
    except Unsteady as seen:
        unsteady = str(seen)
        result = _unsteady(str(scenario), unsteady)
        worst[OTHERS] = result, scenario
        order = [rule for rule in (*GUARANTEES, OTHERS) if rule in worst]
    return Report(
        scope=scope,
        verdict=result.verdict,
        cls=result.cls,
        certainty=result.certainty,
        guarantees={rule: worst[rule][0] for rule in order},
        claims=_claims(policy, scope.bound),
        scenarios=ran,
        executions=executions,
        steps=steps,
        counterexample=found,
        open=tuple(unsettled),
        unsteady=unsteady,
    )


def _may_be_settled(result: Result) -> bool:
    """Whether more executions could settle it: not where all are known already, or where it is hidden."""
    evidence = result.evidence
    return result.verdict is Conclusion.INCONCLUSIVE and not evidence.complete and not evidence.hidden


def _unsteady(scenario: str, say: str) -> Result:
    """What is the matter with a policy that does not do the same twice; it refutes, whatever else was found."""
    evidence = Evidence(executions=1, fidelity="fifo")
    return Result(Conclusion.REFUTED, scenario, evidence, Class.RULE, Certainty.CERTAIN, say)


def is_foreign(policy: Policy) -> bool:
    """Whether any of a policy's code is not ours."""
    files = [getattr(sys.modules.get(cls.__module__), "__file__", None) or "" for cls in type(policy).__mro__[:-1]]
    return any(foreign(file) for file in files)


def scenarios_of(scope: Scope, make_policy: MakePolicy = registry.create) -> list[Scenario]:
    """The scenarios of a scope, on the route that the policy wants."""
    made = family(scope.world, scope.policy, scope.segments, scope.rounds, capacity=scope.capacity)
    world = scope.world.under(getattr(make_policy(scope.policy, made[0].limits), "route", None))
    return [replace(each, world=world) for each in made]


def _program(scope: Scope, scenario: Scenario, make_policy: MakePolicy, options: dict[str, Any]) -> Callable[..., Any]:
    return partial(run, scenario, make_policy, bound=scope.bound, **_launch(scope), **options)


def _launch(scope: Scope) -> dict[str, Any]:
    return {"depth": scope.depth, "graphs": scope.graphs} if scope.depth is not None else {}


def _explained(
    scope: Scope,
    scenario: Scenario,
    result: Result,
    make_policy: MakePolicy,
    options: dict[str, Any],
) -> Counterexample | None:
    execution, failure = result.evidence.execution, result.evidence.failure
    if execution is None or failure is None:
        return None
    case = case_of(scenario, make_policy, scope.bound, **_launch(scope))
    if options:
        case = replace(case, program=lambda one: _program(scope, one, make_policy, options))
    certainty = result.certainty if result.verdict is Conclusion.REFUTED else None
    fifo = result.evidence.fidelity == "fifo"
    return explain(case, execution, fifo=fifo, rule=failure.rule, certainty=certainty)


def _rank(result: Result) -> tuple[int, int]:
    """The worst first; a refutation that is certain before one that is not."""
    order = (Conclusion.REFUTED, Conclusion.INCONCLUSIVE, Conclusion.PROVED)
    certain = (Certainty.CERTAIN, Certainty.CONDITIONAL, Certainty.UNDECIDED)
    return order.index(result.verdict), certain.index(result.certainty)


def _claims(policy: Policy, bound: Bound | None) -> dict[str, str]:
    asked = declared(policy) if bound is None else bound
    words = {
        "span": "a ready D launches after at most one segment",
        "epoch": "a ready D launches after at most one epoch of P",
        "backlog": "a ready D launches once P has no more work",
    }
    count = asked if isinstance(asked, int) else 0
    launches = words.get(str(asked), f"a ready D launches after at most {_count(count, 'segment')}")
    claims = {
        "deadlock_free": "every schedule ends",
        "epochs_complete": "every admitted P completes and every turn ends",
        "decode_bound": launches + ("" if bound is None else " (asked)"),
        OTHERS: "the rules of the seam and the kernel's invariants hold",
    }
    told = policy.guarantees
    if not told.deadlock_free:
        claims["deadlock_free"] += " (not claimed)"
    if not told.epochs_complete:
        claims["epochs_complete"] += " (not claimed)"
    return claims


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
