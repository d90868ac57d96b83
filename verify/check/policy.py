"""A policy, judged in every scope asked for, and by the order certificate for more ranks and layers.

The policy's own code runs in a child process that is watched, whatever it does: see `supervise` and `guard` in
`verify.trial`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernel.sched import registry
from verify.blame import Certainty
from verify.check.answer import Answer, worst, wrapped
from verify.check.order import certified
from verify.check.ranks import FEW, PROCESSES, compared
from verify.explore.certify import OTHERS, SEARCH, Work
from verify.explore.policy import Report, Scope, check, is_foreign, scenarios_of
from verify.explore.result import Conclusion
from verify.sim.world import WIDE
from verify.trial.family import TELLING
from verify.trial.findings import GUARANTEES, Finding
from verify.trial.guard import Guard
from verify.trial.supervise import SILENCE_S, Beat, supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.check.args import Options
    from verify.explore.result import Result
    from verify.trial.scenario import Scenario


def check_policy(options: Options) -> Answer:
    """The answer about a policy. Raises UsageError for one that cannot be loaded or made."""
    ends = f"policy {options.target} ends its process while it is imported or made"
    answer = supervised(lambda beat: _judged(options, beat), SILENCE_S, ends)
    left = [line for each in options.left_out for line in wrapped(f"{'left out':16} {each}", 17)]
    if not isinstance(answer, Finding):
        return replace(answer, body=(*left, *answer.body), more={**answer.more, "left_out": list(options.left_out)})
    plain = {"class": str(answer.cls), "rule": answer.rule, "say": answer.say, "where": answer.where}
    return Answer(
        Conclusion.REFUTED, answer.cls, Certainty.CERTAIN, _scope(options), counterexample=plain,
        more={"left_out": list(options.left_out)}, body=(*left, *wrapped(f"failed    {answer}", 10), ""),
    )  # fmt: skip


def _judged(options: Options, beat: Beat) -> Answer | Finding:
    """In the child: one execution of every scenario, the processes of other ranks, the search of what is open, then the
    certificate. Whatever refutes comes first."""
    capacity = WIDE if options.capacity is None else options.capacity
    scopes = [
        Scope(
            options.target, world, segments, options.rounds, capacity, options.depth, bound=options.bound,
            budget=options.budget,
        )
        for world in options.worlds for segments in options.segments
    ]  # fmt: skip
    progress = Progress()
    guard = Guard(beat=beat)
    reports = _once(scopes, progress, guard)
    if not _refuted(reports) or reports[-1].unsteady:
        # What is open is hardly ever proved: then fewer processes must do.
        found = _elsewhere(scopes, progress, PROCESSES if all(report.proved for report in reports) else FEW)
        if found is not None:
            progress.clear()
            return found
    if not _refuted(reports):
        _refine(options, reports, progress, guard)
    progress.clear()
    proved = all(report.proved for report in reports)
    certificate = certified(options, registry.create, Guard(beat=beat)) if options.layers and proved else None
    return _answer(options, reports, certificate)


def _once(scopes: Sequence[Scope], progress: Progress, guard: Guard) -> list[Report]:
    """The reports on scopes by one execution of each scenario, up to the first that is refuted."""
    reports: list[Report] = []
    for scope in scopes:
        reports.append(check(replace(scope, budget=1), registry.create, progress=progress.of(scope), guard=guard))
        if _refuted(reports):
            break
    return reports


def _elsewhere(scopes: Sequence[Scope], progress: Progress, processes: int) -> Finding | None:
    """What a policy from outside decides differently in the processes of other ranks."""
    most, least = scopes[-1], scopes[0].world
    chosen = [scope for scope in scopes if scope.world == least or scope.segments == most.segments]
    scenarios = [each for scope in chosen for each in scenarios_of(scope, registry.create) if each.name in TELLING]
    policy = registry.create(scopes[0].policy, scenarios[0].limits)
    if not is_foreign(policy):
        return None
    progress.say(f"{scopes[0].policy}: the same in every process?")
    return compared(scenarios, policy, processes)


def _refine(options: Options, reports: list[Report], progress: Progress, guard: Guard) -> None:
    """Search the scenarios that one execution each has left open, until the work for all of them is spent, or one scope
    stays open: then so does the answer, unless another scope refutes, and only little is spent on those."""
    work = Work(SEARCH * options.budget)
    budget = options.budget
    for place, report in enumerate(reports):
        if not report.open:
            continue
        scope = replace(report.scope, budget=budget)
        again = check(scope, registry.create, report.open, progress=progress.of(scope), work=work, guard=guard)
        reports[place] = replace(
            again, scenarios=report.scenarios, executions=report.executions + again.executions,
            steps=report.steps + again.steps,
        )  # fmt: skip
        if again.verdict is Conclusion.REFUTED:
            reports[place + 1 :] = []
            return
        if again.verdict is Conclusion.INCONCLUSIVE:
            budget = max(1, options.budget // 10)
        if work.steps <= 0:
            return


def _refuted(reports: Sequence[Report]) -> bool:
    return bool(reports) and reports[-1].verdict is Conclusion.REFUTED


class Progress:
    """One line on standard error, written over again and again, where that is a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def of(self, scope: Scope) -> Callable[[Scenario], None] | None:
        """Shows a scenario of a scope."""
        if not self._shown:
            return None
        return lambda scenario: self.say(f"{scope}: {scenario.name}")

    def say(self, text: str) -> None:
        """Show what is done now."""
        if self._shown:
            self._write(text[:100])

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _answer(options: Options, reports: Sequence[Report], certificate: Answer | None) -> Answer:
    last = reports[worst([(report.verdict, report.certainty) for report in reports])]
    rules = {rule: _worst_of(rule, reports) for rule in (*GUARANTEES, OTHERS)}
    verdict, cls, certainty = last.verdict, last.cls, last.certainty
    if certificate is not None and last.proved and certificate.verdict is not Conclusion.PROVED:
        verdict, cls, certainty = certificate.verdict, certificate.cls, certificate.certainty
    plain = last.to_dict()
    guarantees = {
        rule: {**report.to_dict()["guarantees"][rule], "scope": str(report.scope)}
        for rule, (report, _) in rules.items()
    }
    more: dict[str, Any] = {
        "steps": sum(report.steps for report in reports),
        "scenarios": sum(report.scenarios for report in reports),
        "guarantees": guarantees,
        "scopes": [
            {"scope": str(report.scope), "verdict": str(report.verdict), "executions": report.executions}
            for report in reports
        ],
        "certificate": certificate.to_dict() if certificate is not None else None,
    }
    body = [_line(rule, result, last.claims.get(rule, "")) for rule, (_, result) in rules.items()]
    if certificate is not None:
        body += certificate.body
    if last.counterexample is not None:
        body += ["", *str(last.counterexample).splitlines(), ""]
    executions, scenarios = sum(report.executions for report in reports), more["scenarios"]
    return Answer(
        verdict, cls, certainty, f"{_scope(options, reports)}, {scenarios} scenario{'s'[: scenarios != 1]}", executions,
        plain["replay"], plain["counterexample"], more, tuple(body), _how(last, executions, scenarios),
    )  # fmt: skip


def _how(last: Report, executions: int, scenarios: int) -> str:
    if last.verdict is Conclusion.PROVED:
        each = "one execution of each" if executions == scenarios else f"{executions} executions"
        return f"for all schedules, by {each}"
    if last.verdict is Conclusion.INCONCLUSIVE:
        open_ = next(result for result in last.guarantees.values() if result.verdict is Conclusion.INCONCLUSIVE)
        return open_.reason
    return last.unsteady


def _worst_of(rule: str, reports: Sequence[Report]) -> tuple[Report, Result]:
    found = [(report, report.guarantees[rule]) for report in reports if rule in report.guarantees]
    return found[worst([(result.verdict, result.certainty) for _, result in found])]


def _line(rule: str, result: Result, claim: str) -> str:
    verdict = str(result.verdict)
    if result.verdict is Conclusion.REFUTED:
        verdict = f"REFUTED ({result.certainty})"
    return f"{rule:16} {verdict:21} {claim}"[:120]


def _scope(options: Options, reports: Sequence[Report] = ()) -> str:
    """What was looked at, in words: up to the scope that was refuted."""
    scopes = [report.scope for report in reports]
    if len(scopes) == 1:
        return str(scopes[0])
    worlds = list(dict.fromkeys(scope.world for scope in scopes)) or list(options.worlds)
    segments = sorted({scope.segments for scope in scopes}) or list(options.segments)
    first, last = segments[0], segments[-1]
    room = "room for every kernel" if options.capacity is None else f"capacity {options.capacity}"
    parts = [
        " and ".join(map(str, worlds)),
        f"{first} to {last} segments" if first < last else f"{first} segment{'s'[: first > 1]}",
        f"{options.rounds} D iteration{'s'[: options.rounds > 1]}",
        room,
    ]
    if options.depth is not None:
        parts.append(f"launch queues of {options.depth}")
    return f"{options.target} on {', '.join(parts)}"
