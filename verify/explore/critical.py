"""The step at which a schedule went wrong: the last one before which some way to go on still succeeded.

The idea of McSimGrid's critical transition. From a prefix of the schedule, what follows is explored; once no way to go
on succeeds, none does from any longer prefix, so that the step is found by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verify.explore.dpor import explore
from verify.explore.shrink import failure_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.explore.execution import Program
    from verify.sim.scheduler import Actor, Choose
    from verify.sim.trace import Trace


@dataclass(frozen=True)
class Critical:
    """step: of the schedule; -1 where no schedule succeeded, even from the start.

    bounded: the search after the step was cut off at its limit, so that a way to succeed may exist that was not seen.
    runs: executions that this took.
    """

    step: int
    bounded: bool
    runs: int


class _Prefix:
    """A `choose` that takes the first steps of a schedule, then hands over."""

    def __init__(self, names: Sequence[str], trace: Trace, then: Choose) -> None:
        self._names, self._trace, self._then = names, trace, then

    def __call__(self, enabled: Sequence[Actor]) -> int:
        step = len(self._trace.names)
        if step >= len(self._names):
            return self._then(enabled)
        return next((index for index, actor in enumerate(enabled) if str(actor) == self._names[step]), 0)


def after(program: Program, names: Sequence[str]) -> Program:
    """`program`, in which the first steps are given and only what follows is chosen."""

    def run(**options: Any) -> Any:
        options["choose"] = _Prefix(names, options["trace"], options["choose"])
        return program(**options)

    return run


def critical_step(
    program: Program, names: Sequence[str], rule: str = "", fifo: bool = False, limit: int = 24
) -> Critical:
    """The critical step of a failing schedule. names: its actors, step by step. limit: executions from one prefix."""
    runs = 0

    def succeeds(upto: int) -> tuple[bool, bool]:
        """Whether some way to go on after so many steps succeeds, and whether the search was cut off."""
        nonlocal runs
        for number, execution in enumerate(explore(after(program, names[:upto]), fifo), start=1):
            runs += 1
            if not execution.cut and not execution.broken and failure_of(execution, rule) is None:
                return True, False
            if number >= limit:
                return False, True
        return False, False

    good, bounded = succeeds(0)
    if not good:
        return Critical(-1, bounded, runs)
    low, high, bounded = 0, len(names), False
    while high - low > 1:
        middle = (low + high) // 2
        good, cut = succeeds(middle)
        if good:
            low = middle
        else:
            high, bounded = middle, cut
    return Critical(low, bounded, runs)
