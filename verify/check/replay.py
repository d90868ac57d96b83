"""The schedule of a counterexample, run again from its token: the same failure, another one, or none any more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.errors import UsageError
from kernel.sched import registry
from verify.blame import Certainty, Class
from verify.check.answer import Answer, wrapped
from verify.explore.counterexample import Effort, explain
from verify.explore.result import Conclusion
from verify.explore.smaller import case_of_token
from verify.explore.token import Token, rerun
from verify.trial.findings import Finding
from verify.trial.guard import Guard
from verify.trial.supervise import SILENCE_S, Beat, supervised

if TYPE_CHECKING:
    from verify.check.args import Options
    from verify.explore.token import Rerun

AS_IT_IS = Effort(scenario=0, scenarios=0, decisions=0)
"""A token holds a schedule that has been made small already."""


def check_replay(options: Options) -> Answer:
    """The answer about a token. Raises UsageError for a damaged one, and for a policy that cannot be loaded."""
    token = Token.parse(options.replay)
    case = case_of_token(token, registry.create)
    _there(case.scenario.policy)
    ends = f"policy {case.scenario.policy} ends its process while it is imported or made"
    answer = supervised(lambda beat: _again(options, token, beat), SILENCE_S, ends)
    if not isinstance(answer, Finding):
        return answer
    plain = {"class": str(answer.cls), "rule": answer.rule, "say": answer.say, "where": answer.where}
    return Answer(
        Conclusion.REFUTED, answer.cls, Certainty.CERTAIN, case.scope(case.scenario), 1, options.replay, plain,
        body=(*wrapped(f"failed    {answer}", 10), ""),
    )  # fmt: skip


def _there(spec: str) -> None:
    """A token says where the policy's file was as the check was told it. Raises UsageError where it is not there."""
    path, colon, _ = spec.partition(".py:")
    file = Path(f"{path}.py")
    if colon and not file.is_absolute() and not file.is_file():
        say = f"the token is of {file}, seen from the folder of that check, and here there is no {file.absolute()}"
        raise UsageError(f"--replay: {say}: run it in that folder, or check again with an absolute path")


def _again(options: Options, token: Token, beat: Beat) -> Answer:
    """In the child."""
    case = case_of_token(token, registry.create)
    registry.create(case.scenario.policy, case.scenario.limits)
    guarded = case.program

    def program(scenario: Any) -> Any:
        return partial(guarded(scenario), guard=Guard(beat=beat))

    made = rerun(token, program(case.scenario), notes=True)
    scope = f"one schedule of {case.scope(case.scenario)}"
    replayed = {"same": made.same, "exact": made.exact, "say": made.say}
    failure = made.execution.fails(token.rule) or made.execution.failure
    if failure is None:
        return Answer(
            Conclusion.INCONCLUSIVE, Class.NONE, Certainty.UNDECIDED, scope, 1, more={"replayed": replayed},
            body=(*wrapped(f"replayed  {made.say}", 10, 2), ""),
            reason="this schedule no longer fails; check again for all schedules",
        )  # fmt: skip
    fifo = token.fidelity == "fifo"
    found = explain(
        replace(case, program=program), made.execution, fifo=fifo, rule=failure.rule, effort=AS_IT_IS
    )
    return Answer(
        Conclusion.REFUTED, found.cls, found.certainty, scope, 1, found.token, found.to_dict(), {"replayed": replayed},
        (*str(found).splitlines(), "", *wrapped(f"replayed  {_state(made)}: {made.say}", 10, 2), ""),
    )  # fmt: skip


def _state(made: Rerun) -> str:
    if made.exact and made.same:
        return "exact"
    return "still fails" if made.same else "fails in another way"
