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

SEARCH = 25
"""Steps that a search may take for each execution of a budget, where all scenarios together have one `Work`."""

OTHERS = "rules"
"""All rules of the seam and of the kernel that are not judged by themselves."""


@dataclass(slots=True)
class Work:
    """What several searches may take together. steps: left to them, of all executions. A count of executions says
    little about time, since one may be a hundred times as long as another."""

    steps: int

    def spend(self, execution: Execution) -> None:
        """One execution more."""
        self.steps -= 1 + len(execution.trace.names)


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
    work: Work | None = None,
    wide: int | None = None,
) -> dict[str, Result]:
    """The verdict on each of `rules`, and on all OTHERS together.

    budget: executions. roomy: the same scenario with room for every kernel on the device; what holds there and not in
    `program` is conditional. settled: rules whose failures count nowhere, since they are known already. doubt:
    schedules of asyncio's own order to run besides, where everything seems proved: code may notice that an await
    suspends. work: ends the search too, once it is spent. wide: executions of `roomy`, by default the budget.
    """
    found = _seen(_Judged(program, (*rules, OTHERS), tuple(settled), work), budget, doubt)
    results = {rule: conclude(scope, evidence) for rule, evidence in found.items()}
    if roomy is not None and any(evidence.failure is not None for evidence in found.values()):
        enough = judge(roomy, scope, rules, wide or budget, settled=settled, doubt=doubt)
        return {rule: conditional(result, enough[rule]) for rule, result in results.items()}
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
    work: Work | None = None
    shared: Evidence = field(default_factory=Evidence)
    certain: dict[str, Evidence] = field(default_factory=dict)
    doubtful: dict[str, Evidence] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)

    def add(self, execution: Execution) -> None:
        self.spend(execution)
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

    def spend(self, execution: Execution) -> None:
        if self.work is not None:
            self.work.spend(execution)

    @property
    def spent(self) -> bool:
        return self.work is not None and self.work.steps <= 0

    @property
    def settled(self) -> bool:
        return bool(self.certain) and len(self.certain.keys() | self.hidden.keys()) == len(self.rules)


def _seen(judged: _Judged, budget: int, doubt: int) -> dict[str, Evidence]:
    first = execute(judged.program)
    complete = not first.trace.races
    if complete or budget <= 1:
        judged.add(first)
    else:
        complete = _reduced(judged, max(1, budget // 2))
    if complete and not judged.certain and not judged.doubtful:
        _doubted(judged, doubt)
    open_ = {rule for rule in judged.rules if rule not in judged.certain and rule not in judged.hidden}
    if open_ and (not complete or open_ & judged.doubtful.keys()):
        runs = _searched(judged, open_ if not complete else open_ & judged.doubtful.keys(), budget)
        if not complete:
            judged.shared = replace(judged.shared, executions=runs)
    evidence = {}
    for rule in judged.rules:
        seen = judged.certain.get(rule) or judged.doubtful.get(rule)
        if seen is None and rule in judged.hidden:
            seen = replace(judged.shared, hidden=judged.hidden[rule])
        evidence[rule] = seen if seen is not None else replace(judged.shared, complete=complete)
    return evidence


def _doubted(judged: _Judged, schedules: int) -> None:
    """Run a few schedules as production orders them; whatever fails there is certain."""
    for choose in islice(mixture(judged.shared.steps), schedules):
        execution = execute(judged.program, choose, fifo=True)
        judged.spend(execution)
        for rule in judged.rules:
            failure = judged.broken(execution, rule)
            if failure is not None and rule not in judged.certain:
                judged.certain[rule] = replace(judged.shared, fidelity="fifo", failure=failure, execution=execution)
            elif failure is None and execution.broken and execution.failure is not None:
                judged.hidden.setdefault(rule, execution.failure.say)


def _reduced(judged: _Judged, budget: int) -> bool:
    """Explore until every rule is settled or the budget spent; True when nothing is left."""
    for execution in explore(judged.program):
        judged.add(execution)
        if judged.settled or judged.spent or judged.shared.executions + judged.shared.covered >= budget:
            return False
    return True


def _searched(judged: _Judged, rules: set[str], budget: int) -> int:
    """Schedules by chance for what is left of the budget, until each of the rules has failed; executions so far."""
    seen = judged.shared
    runs, left = seen.executions, max(0, budget - seen.executions - seen.covered)
    for choose in islice(mixture(seen.steps), left):
        if judged.spent or not rules:
            break
        execution = execute(judged.program, choose, fifo=True)
        judged.spend(execution)
        runs += 1
        for rule in sorted(rules):
            failure = judged.broken(execution, rule)
            if failure is not None:
                judged.certain[rule] = replace(
                    seen, executions=runs, fidelity="fifo", failure=failure, execution=execution
                )
                rules.discard(rule)
    return runs
