"""One execution of a program on a simulated world, under a schedule; what came of it."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verify.blame import Class
from verify.explore.lanes import LaneLoop
from verify.sim.errors import Deadlock
from verify.sim.trace import Trace
from verify.trial.findings import Finding, from_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.sim.scheduler import Choose, Scheduler


class Program(Protocol):
    """What is explored: builds a `SimWorld` (`verify.sim.world`) with these options, runs it once and returns what came
    of it.

    It raises what a rank raises, Deadlock and Livelock, or returns something with `findings` and `error`, as
    `verify.trial.enact.run` does.
    """

    def __call__(self, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Failure:
    """What went wrong in one execution. rule: that was broken. cause: an exception, or the finding that says so."""

    cls: Class
    say: str
    cause: Any
    rule: str = ""


class Cut(BaseException):
    """An execution is not worth going on with: what is left of it is covered by others."""


class Unsteady(BaseException):
    """The same choices led to something else: what is explored depends on more than the schedule."""

    def __init__(self, say: str) -> None:
        super().__init__(f"not the same in every run: {say}")


@dataclass(frozen=True)
class Execution:
    """One run.

    trace: its steps. failures: what went wrong, one of each rule. value: what the program returned. cut: it was not
    ended, since others cover it. broken: it ended early, by an error, and shows nothing about what would have followed.
    """

    trace: Trace
    failures: tuple[Failure, ...] = ()
    value: Any = None
    cut: bool = False
    broken: bool = False

    @property
    def failure(self) -> Failure | None:
        """The first thing that went wrong."""
        return self.failures[0] if self.failures else None

    def fails(self, rule: str) -> Failure | None:
        """The failure of a rule."""
        return next((each for each in self.failures if each.rule == rule), None)


class FifoLoop(LaneLoop):
    """With production's order within a rank."""

    fifo = True


def execute(program: Program, choose: Choose | None = None, fifo: bool = False, notes: bool = False) -> Execution:
    """Run `program` once. choose: among enabled actors, the oldest first (None: always the oldest)."""
    trace = Trace(keep_notes=notes, split=not fifo)
    loop: Callable[[int, Scheduler], LaneLoop] = FifoLoop if fifo else LaneLoop
    collects = gc.isenabled()
    gc.disable()  # finalizers would run at places that no schedule has chosen, and a run makes little that is cyclic
    try:
        value = program(choose=choose, trace=trace, loop=loop, log=False)
    except Cut:
        return Execution(trace, cut=True)
    except Exception as error:
        return Execution(trace, (_failure(from_error(error), error),), broken=True)
    finally:
        if collects:
            gc.enable()
    ended: BaseException | None = getattr(value, "error", None)
    found = tuple(_failure(finding, ended) for finding in getattr(value, "findings", ()))
    return Execution(trace, found, value, broken=ended is not None)


def _failure(finding: Finding, error: BaseException | None) -> Failure:
    cyclic = isinstance(error, Deadlock) and finding.cls is Class.CYCLE
    cls = getattr(error, "cls", finding.cls) if cyclic else finding.cls
    return Failure(cls, finding.say, error or finding, finding.rule)
