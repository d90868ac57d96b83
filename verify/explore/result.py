"""What an exploration concluded. Only `conclude` can say PROVED, and only from evidence that supports it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from verify.blame import Certainty, Class

if TYPE_CHECKING:
    from verify.explore.execution import Execution, Failure


class Conclusion(StrEnum):
    """Of an exploration, or of several."""

    PROVED = "proved"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Evidence:
    """What was seen of one scenario.

    executions: that ran to an end. covered: cut short, since others stand for them. steps: of the first one. complete:
    these executions stand for all schedules. clock: where a rank asked for time, so that schedules are not all there
    is. fidelity: `any` or `fifo` (see `verify.explore.lanes`). failure, execution: what went wrong, and where. hidden:
    what ended an execution early, before the rule in question could be judged.
    """

    executions: int = 0
    covered: int = 0
    steps: int = 0
    complete: bool = False
    clock: str = ""
    fidelity: str = "any"
    failure: Failure | None = None
    execution: Execution | None = field(default=None, compare=False, repr=False)
    hidden: str = ""


@dataclass(frozen=True)
class Result:
    """A verdict on one scenario, with its scope in words.

    cls, certainty: of what was found (class none where nothing was). reason: why it is inconclusive, or how it was
    proved. evidence: what it rests on.
    """

    verdict: Conclusion
    scope: str
    evidence: Evidence
    cls: Class = Class.NONE
    certainty: Certainty = Certainty.CERTAIN
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} for {self.scope}: {self.reason}"


def conclude(scope: str, evidence: Evidence) -> Result:
    """The verdict that `evidence` supports. This is the one place where PROVED is made."""
    failure, runs = evidence.failure, evidence.executions
    if failure is not None and evidence.fidelity == "fifo":
        reason = f"{failure.say} (execution {runs})"
        return Result(Conclusion.REFUTED, scope, evidence, failure.cls, reason=reason)
    if failure is not None:
        reason = f"only where ready tasks of a rank run in an order that asyncio does not have: {failure.say}"
        return Result(Conclusion.INCONCLUSIVE, scope, evidence, failure.cls, Certainty.UNDECIDED, reason)
    if evidence.hidden:
        return _open(scope, evidence, f"not judged, since the run ended early: {evidence.hidden}")
    if runs < 1:
        return _open(scope, evidence, "no execution reached its end")
    if not evidence.complete:
        return _open(scope, evidence, f"nothing was found in {runs} executions, and there are more")
    if evidence.clock:
        return _open(scope, evidence, f"nothing was found, but what happens depends on the clock ({evidence.clock})")
    how = "one execution without a race" if runs == 1 else f"{runs} executions, one for each order of its races"
    return Result(Conclusion.PROVED, scope, evidence, reason=f"for all schedules, by {how}")


def conditional(result: Result, roomy: Result | None) -> Result:
    """A refuted result whose certainty follows from the verdict on the same scenario with room for every kernel."""
    if result.verdict is not Conclusion.REFUTED or roomy is None or result.cls not in (Class.CYCLE, Class.MISSING):
        return result
    if roomy.verdict is Conclusion.PROVED:
        reason = f"{result.reason}; with room for every kernel it is {roomy.verdict}"
        return replace(result, certainty=Certainty.CONDITIONAL, reason=reason)
    if roomy.verdict is Conclusion.INCONCLUSIVE:
        return replace(result, certainty=Certainty.UNDECIDED)
    return result


def _open(scope: str, evidence: Evidence, reason: str) -> Result:
    return Result(Conclusion.INCONCLUSIVE, scope, evidence, Class.NONE, Certainty.UNDECIDED, reason)
