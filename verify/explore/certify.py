"""From a program to verdicts: one execution where that is enough, all that differ where it is not, else a search.

    one execution, without a race          stands for all schedules: proved
    partial-order reduction, to its end    proved, or a failure
    a failure among orders of `any`        is run again as production orders it (`fifo`)
    budget spent                           schedules by chance, at the fidelity `fifo`; nothing found is inconclusive

Several rules are judged by the same executions, each by itself. Whatever breaks a rule that nobody asked for counts
under OTHERS.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from verify.explore.dpor import explore
from verify.explore.execution import execute
from verify.explore.result import Evidence, Result, conclude, conditional
from verify.explore.schedule import followed
from verify.explore.search import mixture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.explore.execution import Execution, Failure, Program

BUDGET = 400
"""Executions of one scenario, by default."""

OTHERS = "rules"
"""All rules of the seam and of the kernel that are not judged by themselves."""


def certify(program: Program, scope: str, budget: int = BUDGET, roomy: Program | None = None) -> Result:
    """The verdict on `program` over all schedules of its scenario, which `scope` names. Arguments as of `judge`."""
    return judge(program, scope, (), budget, roomy)[OTHERS]


def judge(
    program: Program,
    scope: str,
    rules: Sequence[str],
    budget: int = BUDGET,
    roomy: Program | None = None,
    settled: Sequence[str] = (),
    doubt: int = 0,
) -> dict[str, Result]:
    """The verdict on each of `rules`, and on all OTHERS together.

    budget: executions. roomy: the same scenario with room for every kernel on the device; what holds there and not in
    `program` is conditional. settled: rules whose failures count nowhere, since they are known already. doubt:
    schedules of asyncio's own order to run besides, where everything seems proved: code may notice that an await
    suspends.
    """
    found = _seen(program, (*rules, OTHERS), budget, tuple(settled), doubt)
    results = {rule: conclude(scope, evidence) for rule, evidence in found.items()}
    if roomy is not None and any(evidence.failure is not None for evidence in found.values()):
        wide = judge(roomy, scope, rules, budget, settled=settled, doubt=doubt)
        return {rule: conditional(result, wide[rule]) for rule, result in results.items()}
    return results


@dataclass(slots=True)
class _Judged:
    """What is known of each rule so far.

    certain: evidence of a failure that production can have. doubtful: of one for which the tasks of a rank ran in
    another order than asyncio's. hidden: an execution ended early and shows nothing about the other rules.
    """

    program: Program
    rules: tuple[str, ...]
    settled_before: tuple[str, ...] = ()
    shared: Evidence = field(default_factory=Evidence)
    certain: dict[str, Evidence] = field(default_factory=dict)
    doubtful: dict[str, Evidence] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)

    def add(self, execution: Execution) -> None:
        trace, shared = execution.trace, self.shared
        if execution.cut:
            self.shared = replace(shared, covered=shared.covered + 1)
            return
        runs, steps, clock = shared.executions + 1, shared.steps or len(trace.names), shared.clock or trace.clock
        self.shared = replace(shared, executions=runs, steps=steps, clock=clock)
        for rule in self.rules:
            failure = self.broken(execution, rule)
            if failure is not None and rule not in self.certain:
                again = followed(self.program, [trace.names[step] for step in trace.lazily()], fifo=True).execution
                found = self.broken(again, rule)
                if found is not None and found.cls is failure.cls:
                    self.certain[rule] = replace(self.shared, fidelity="fifo", failure=found, execution=again)
                else:
                    self.doubtful.setdefault(rule, replace(self.shared, failure=failure, execution=execution))
            elif failure is None and execution.broken and execution.failure is not None:
                self.hidden.setdefault(rule, execution.failure.say)

    def broken(self, execution: Execution, rule: str) -> Failure | None:
        """The failure of `rule`; for OTHERS that of any rule that is not judged by itself."""
        if rule != OTHERS:
            return execution.fails(rule)
        known = (*self.rules, *self.settled_before)
        return next((each for each in execution.failures if each.rule not in known), None)

    @property
    def settled(self) -> bool:
        return bool(self.certain) and len(self.certain.keys() | self.hidden.keys()) == len(self.rules)


def _seen(
    program: Program, rules: tuple[str, ...], budget: int, settled: tuple[str, ...], doubt: int
) -> dict[str, Evidence]:
    judged = _Judged(program, rules, settled)
    first = execute(program)
    complete = not first.trace.races
    if complete:
        judged.add(first)
    else:
        complete = _reduced(program, judged, max(1, budget // 2))
    if complete and not judged.certain and not judged.doubtful:
        _doubted(judged, doubt)
    evidence = {}
    for rule in rules:
        seen = judged.certain.get(rule)
        if seen is None and rule in judged.doubtful:
            seen = _searched(judged, rule, budget)
            seen = seen if seen.failure is not None else judged.doubtful[rule]
        if seen is None and rule in judged.hidden:
            seen = replace(judged.shared, hidden=judged.hidden[rule])
        if seen is None:
            seen = replace(judged.shared, complete=True) if complete else _searched(judged, rule, budget)
        evidence[rule] = seen
    return evidence


def _doubted(judged: _Judged, schedules: int) -> None:
    """Run a few schedules as production orders them; whatever fails there is certain."""
    for choose in islice(mixture(judged.shared.steps), schedules):
        execution = execute(judged.program, choose, fifo=True)
        for rule in judged.rules:
            failure = judged.broken(execution, rule)
            if failure is not None and rule not in judged.certain:
                judged.certain[rule] = replace(judged.shared, fidelity="fifo", failure=failure, execution=execution)
            elif failure is None and execution.broken and execution.failure is not None:
                judged.hidden.setdefault(rule, execution.failure.say)


def _reduced(program: Program, judged: _Judged, budget: int) -> bool:
    """Explore until every rule is settled or the budget spent; True when nothing is left."""
    for execution in explore(program):
        judged.add(execution)
        if judged.settled or judged.shared.executions + judged.shared.covered >= budget:
            return False
    return True


def _searched(judged: _Judged, rule: str, budget: int) -> Evidence:
    """Schedules by chance for what is left of the budget."""
    seen = judged.shared
    left = max(0, budget - seen.executions - seen.covered)
    for number, choose in enumerate(islice(mixture(seen.steps), left), start=1):
        execution = execute(judged.program, choose, fifo=True)
        failure = judged.broken(execution, rule)
        if failure is not None:
            runs = seen.executions + number
            return replace(seen, executions=runs, fidelity="fifo", failure=failure, execution=execution)
    return replace(seen, executions=seen.executions + left)
