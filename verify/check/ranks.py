"""Whether a policy decides the same in every rank's process: the same scenarios in processes that share nothing.

Real ranks have a process each, on several hosts: with hash seeds, clocks, process ids and environments of their own
(`verify.trial.elsewhere`). A decision that differs there makes plans differ, whatever a simulation in one process says.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import TurnstileError
from verify.blame import Class
from verify.sources import foreign, place
from verify.trial.elsewhere import absolute, environment
from verify.trial.findings import Finding, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.trial.scenario import Scenario

PROCESSES: Final = 6
"""An order of a set that is one of two in half of all processes is the same in all of these with 2 ** -5."""
FEW: Final = 2
"""Where no proof is at stake."""
SILENCE_S: Final = 120.0
"""Seconds after which such a process counts as stuck."""

RULE: Final = "shared plan"
_WHY: Final = (
    "the decision depends on something that ranks do not share: the order of a set, hash() or id(), chance, time, host,"
    " process, folder or environment"
)
_QUESTIONS: Final = {
    "activate": "prefill_now", "prefill": "prefill_now", "decode": "decode_now", "bucket": "decode_now", "span": "span",
}  # fmt: skip


def compared(scenarios: Sequence[Scenario], policy: Any, processes: int = PROCESSES) -> Finding | None:
    """Run the scenarios once in each of several processes; what differs between them, None for nothing.

    policy: any object of it, to cite its lines.
    """
    answers: list[dict[str, Any]] = []
    for number in range(processes):
        answer = _ran(scenarios, number)
        if isinstance(answer, Finding):
            return answer
        answers.append(answer)
        if len(answers) > 1:
            differs = _differs(scenarios, answers[-2], answers[-1], policy)
            if differs is not None:
                return differs
    return None


def _ran(scenarios: Sequence[Scenario], number: int) -> dict[str, Any] | Finding:
    """One process; what it decided."""
    path = [str(Path(entry).absolute()) for entry in sys.path]
    task = {
        "number": number, "path": path,
        "scenarios": [replace(each, policy=absolute(each.policy)).to_dict() for each in scenarios],
    }  # fmt: skip
    told = {**os.environ, **environment(number), "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory(prefix="rank" + "k" * number) as folder:
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "verify.trial.elsewhere"], input=json.dumps(task), capture_output=True,
                text=True, cwd=folder, env=told, timeout=SILENCE_S, check=False, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Finding(Class.RULE, RULE, f"in another process the policy does not return: {_WHY}")
    try:
        answer: dict[str, Any] = json.loads(ran.stdout)
    except ValueError:
        if "verify/trial/elsewhere.py" in ran.stderr:
            sys.stderr.write(ran.stderr)
            last = one_line(ran.stderr.strip().splitlines()[-1])
            raise TurnstileError(f"a process that compares decisions failed: {last}") from None
        return Finding(Class.RULE, RULE, f"in another process the policy ends it, exit code {ran.returncode}: {_WHY}")
    return answer


def _differs(
    scenarios: Sequence[Scenario], one: dict[str, Any], other: dict[str, Any], policy: Any
) -> Finding | None:
    if "failed" in one or "failed" in other:
        how = next(each["failed"] for each in (one, other) if "failed" in each)
        say = f"the policy cannot be made in every process: {how} (in a folder, and on a host, of another rank)"
        return Finding(Class.RULE, RULE, f"{say}: ranks do not share these")
    if one["claims"] != other["claims"]:
        mine, theirs = next(pair for pair in zip(one["claims"], other["claims"], strict=True) if pair[0] != pair[1])
        return _finding(f"what the policy claims differs: {mine} in one process, {theirs} in another", policy, "", -1)
    for scenario, mine, theirs in zip(scenarios, one["scenarios"], other["scenarios"], strict=True):
        found = _decision(mine, theirs, policy)
        if found is not None:
            return replace(found, say=f"{found.say} (seen in {scenario.name or 'its scenario'!r})")
    return None


def _decision(mine: dict[str, Any], theirs: dict[str, Any], policy: Any) -> Finding | None:
    """The first decision that differs in one scenario."""
    for plan, again in zip(mine["plans"], theirs["plans"], strict=False):
        for name, value in plan.items():
            if value != again[name]:
                round_ = int(plan["round"])
                values = f"{value} in one process, {again[name]} in another"
                return _finding(
                    f"plan differs in {name} at round {round_}: {values}", policy, _QUESTIONS.get(name, "plan"), round_
                )
    for rank, (did, again) in enumerate(zip(mine["did"], theirs["did"], strict=True)):
        if did != again:
            a, b = next(
                (pair for pair in zip(did, again, strict=False) if pair[0] != pair[1]),
                (f"{len(did)} steps", f"{len(again)} steps"),
            )
            say = f"what rank {rank} does differs: {a!r} in one process, {b!r} in another"
            return _finding(say, policy, "turn", -1)
    if len(mine["plans"]) != len(theirs["plans"]) or mine["ended"] != theirs["ended"]:
        ends = [", ".join(each["ended"]) or f"well after {len(each['plans'])} rounds" for each in (mine, theirs)]
        return _finding(f"one process ends {ends[0]}, another ends {ends[1]}", policy, "plan", -1)
    return None


def _finding(say: str, policy: Any, function: str, round_: int) -> Finding:
    where = _line(policy, function)
    at = f" [{where}]" if where else ""
    return Finding(Class.RULE, RULE, f"not the same in every process: {say}{at}: {_WHY}", -1, round_, where)


def _line(policy: Any, function: str) -> str:
    """Where a policy's own code answers a question; "" where it does not."""
    for name in dict.fromkeys((function, "plan")):
        code = getattr(inspect.unwrap(getattr(type(policy), name, None) or len), "__code__", None)
        if code is not None and foreign(code.co_filename):
            return place((code.co_filename, code.co_firstlineno))
    return ""

