"""One execution of a program on a simulated world, under a schedule; what came of it."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from verify.blame import Class
from verify.errors import Deadlock
from verify.explore.lanes import LaneLoop, Turn
from verify.findings import Finding, from_error
from verify.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.scheduler import Actor, Choose, Scheduler


class Program(Protocol):
    """What is explored: builds a `verify.world.SimWorld` with these options, runs it once and returns what came of it.

    It raises what a rank raises, Deadlock and Livelock, or returns something with `findings` (`verify.findings`) and
    `error`, as `verify.enact.run` does.
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
    error = getattr(value, "error", None)
    found = tuple(_failure(finding, error) for finding in getattr(value, "findings", ()))
    return Execution(trace, found, value, broken=error is not None)


def _failure(finding: Finding, error: BaseException | None) -> Failure:
    cyclic = isinstance(error, Deadlock) and finding.cls is Class.CYCLE
    cls = getattr(error, "cls", finding.cls) if cyclic else finding.cls
    return Failure(cls, finding.say, error or finding, finding.rule)


class Recorded:
    """A `choose` that remembers what it chose where that was not the oldest: the decisions that make up a schedule."""

    def __init__(self, choose: Choose) -> None:
        self._choose, self.calls = choose, 0
        self.decisions: list[tuple[int, str]] = []

    def __call__(self, enabled: Sequence[Actor]) -> int:
        picked = self._choose(enabled)
        if picked:
            self.decisions.append((self.calls, str(enabled[picked])))
        self.calls += 1
        return picked


class Replayed:
    """A `choose` that makes recorded decisions: the oldest actor but for them.

    A decision waits until its actor is enabled, so that a schedule survives small changes of the program. late: those
    that had to wait; left: those that were never made.
    """

    def __init__(self, decisions: Sequence[tuple[int, str]]) -> None:
        self._left = list(decisions)
        self._calls = 0
        self.late: list[tuple[int, str]] = []

    @property
    def left(self) -> list[tuple[int, str]]:
        """Decisions not made yet."""
        return list(self._left)

    def __call__(self, enabled: Sequence[Actor]) -> int:
        call, self._calls = self._calls, self._calls + 1
        if not self._left or self._left[0][0] > call:
            return 0
        at, name = self._left[0]
        for index, actor in enumerate(enabled):
            if str(actor) == name:
                self._left.pop(0)
                if at < call:
                    self.late.append((at, name))
                return index
        return 0


def follow(names: Sequence[str]) -> Choose:
    """A `choose` that takes actors in the order of another execution's steps, as far as it can."""
    places: dict[str, list[int]] = {}
    for step, name in enumerate(names):
        places.setdefault(name, []).append(step)
    for each in places.values():
        each.reverse()
    beyond = len(names)

    def place(actor: Actor) -> int:
        if isinstance(actor, Turn) and (line := actor.line):
            # Whoever is first in a rank's line holds up those behind it.
            return min(own(turn) for turn in line)
        return own(actor)

    def own(actor: Actor) -> int:
        ahead = places.get(str(actor).removesuffix(" delivered"))
        return ahead[-1] if ahead else beyond

    def choose(enabled: Sequence[Actor]) -> int:
        picked = min(range(len(enabled)), key=lambda index: place(enabled[index]))
        name = str(enabled[picked])
        if not name.endswith(" delivered") and places.get(name):
            places[name].pop()
        return picked

    return choose


def replay(decisions: Sequence[tuple[int, str]]) -> Callable[[], Choose]:
    """A maker of a fresh `choose` for a recorded schedule."""
    return partial(Replayed, tuple(decisions))
