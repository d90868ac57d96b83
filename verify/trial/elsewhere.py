"""A process as another rank has it: with another hash seed, process id, host, clock, folder, chance and environment.

Simulated ranks share one process, real ones share nothing but what they exchange. So the same scenarios are run in
several processes that differ in all of this, and what the policy decides there must be the same (`verify.check.ranks`
compares). Run as `python -m verify.trial.elsewhere`: a task on standard input, what was decided on standard output.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import random
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import said
from kernel.sched import registry
from verify.sim.world import SimWorld
from verify.trial.enact import attempt
from verify.trial.guard import Guard
from verify.trial.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.sched.policy import Limits, Policy

LATER_S: Final = 3_935_011
"""Seconds by which the clock of each process is ahead of the one before: an odd number, of some weeks."""
PIDS: Final = 7_919
"""Between their process ids."""
RANKED: Final = ("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "CUDA_VISIBLE_DEVICES")
"""What launchers tell each process by its environment."""


def environment(number: int) -> dict[str, str]:
    """What a process of this number is started with, besides what the host has."""
    return {**dict.fromkeys(RANKED, str(number)), "HOSTNAME": _host(number), "PYTHONHASHSEED": str(101 + number)}


def settle(number: int) -> None:
    """Make this process look like that of another rank. Nothing that the package itself needs changes."""
    later = number * LATER_S
    _clock(later)
    _dates(datetime.timedelta(seconds=later))
    host = _host(number)
    told = os.uname()
    named = os.uname_result((told.sysname, host, told.release, told.version, told.machine))
    for module, name, value in (
        (os, "getpid", 5_000 + PIDS * number), (os, "getppid", 4_000 + PIDS * number), (os, "uname", named),
        (os, "cpu_count", 4 + number), (os, "getloadavg", (float(number),) * 3), (socket, "gethostname", host),
        (socket, "getfqdn", host), (platform, "node", host),
    ):  # fmt: skip
        setattr(module, name, _always(value))
    random.seed(number)
    sys.argv = [f"rank{number}", *("-v" for _ in range(number))]


def decided(scenario: Scenario, make_policy: Callable[[str, Limits], Policy] = registry.create) -> dict[str, Any]:
    """What the policy decides in one execution, as JSON takes it: the plans of rank 0, what each rank then did, how it
    ended."""
    made: list[SimWorld] = []

    def world(*args: Any, **options: Any) -> SimWorld:
        made.append(SimWorld(*args, **options))
        return made[0]

    outcome = attempt(scenario, make_policy, world, guard=_Blind(), log=True)
    did = [
        [f"{what} {which}" for _, what, where, which in rank.log if what == "enqueue" or where == "host"]
        for rank in made[0].ranks
    ]
    return {
        "plans": [dataclasses.asdict(plan) for plan in outcome.plans],
        "did": did,
        "ended": [f"{finding.cls} ({finding.rule})" for finding in outcome.findings],
    }


class _Blind(Guard):
    """Watches nothing: the same code has been watched in these scenarios."""

    def knows(self, policy: object) -> bool:
        return False


def main() -> None:
    """Read a task, `{number, path, scenarios}`, and write `{claims, scenarios}` or `{failed}`."""
    task = json.loads(sys.stdin.read())
    answers = os.dup(1)
    os.dup2(2, 1)  # what a policy prints is no answer
    settle(task["number"])
    sys.path[:] = task["path"]
    scenarios = [Scenario.from_dict(plain) for plain in task["scenarios"]]
    answer: dict[str, Any]
    try:
        policy = registry.create(scenarios[0].policy, scenarios[0].limits)
        claims = [repr(policy.guarantees), repr(getattr(policy, "route", None))]
        answer = {"claims": claims, "scenarios": [decided(scenario) for scenario in scenarios]}
    except (Exception, SystemExit) as error:
        answer = {"failed": f"{type(error).__name__}: {said(error)}"}
    with os.fdopen(answers, "w") as out:
        json.dump(answer, out)


def absolute(spec: str) -> str:
    """A policy's spec, good in any folder."""
    path, colon, rest = spec.partition(".py:")
    return f"{Path(path).absolute()}{colon}{rest}" if colon else spec


def _host(number: int) -> str:
    return f"host{'-' * number}{number}"


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _clock(later: int) -> None:
    """All clocks of `time` go `later` seconds ahead."""

    def ahead(tell: Callable[[], Any], by: int) -> Callable[[], Any]:
        return lambda: tell() + by

    now: Callable[[], float] = time.time

    def told(tell: Callable[..., Any], at: int) -> Callable[..., Any]:
        """A function of a time that is now by default."""
        return lambda *args: tell(*args) if len(args) > at else tell(*args, _moment(tell, now() + later))

    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, f"{name}_ns", ahead(getattr(time, f"{name}_ns"), later * 10**9))
        setattr(time, name, ahead(getattr(time, name), later))
    for name, at in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("asctime", 0), ("strftime", 1)):
        setattr(time, name, told(getattr(time, name), at))


_LOCAL = time.localtime


def _moment(tell: Callable[..., Any], seconds: float) -> Any:
    return _LOCAL(seconds) if tell.__name__ in ("asctime", "strftime") else seconds


def _dates(later: datetime.timedelta) -> None:
    """`datetime` goes by the same clock."""

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + later

        @classmethod
        def utcnow(cls) -> Any:
            return super().now(datetime.UTC).replace(tzinfo=None) + later

        @classmethod
        def today(cls) -> Any:
            return super().now() + later

    class LaterDay(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return super().today() + later

    setattr(datetime, "datetime", Later)  # noqa: B010 - a class is not assigned to, says a type checker
    setattr(datetime, "date", LaterDay)  # noqa: B010


if __name__ == "__main__":
    main()
