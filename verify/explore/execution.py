"""One execution of a program on a simulated world, under a schedule; what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kernel.errors import PolicyError, TurnstileError
from verify.blame import Class
from verify.errors import Deadlock, Livelock, Mismatch, Outside
from verify.explore.lanes import LaneLoop
from verify.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.scheduler import Actor, Choose, Scheduler


class Program(Protocol):
    """What is explored: builds a `verify.world.SimWorld` with these options, runs it once and returns what came of it.

    It raises what a rank raises, Deadlock and Livelock. A result that has `findings`, and not an empty one, counts as a
    failure too.
    """

    def __call__(self, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Failure:
    """What went wrong in one execution. cause: an exception, or the finding that says so."""

    cls: Class
    say: str
    cause: Any


class Cut(BaseException):
    """An execution is not worth going on with: what is left of it is covered by others."""


@dataclass(frozen=True)
class Execution:
    """trace: its steps. failure: what went wrong, or None. value: what the program returned. cut: it was not ended."""

    trace: Trace
    failure: Failure | None = None
    value: Any = None
    cut: bool = False


class FifoLoop(LaneLoop):
    """With production's order within a rank."""

    fifo = True


def execute(program: Program, choose: Choose | None = None, fifo: bool = False, notes: bool = False) -> Execution:
    """Run `program` once. choose: among enabled actors, the oldest first (None: always the oldest)."""
    trace = Trace(keep_notes=notes)
    loop: Callable[[int, Scheduler], LaneLoop] = FifoLoop if fifo else LaneLoop
    try:
        value = program(choose=choose, trace=trace, loop=loop, log=False)
    except Cut:
        return Execution(trace, cut=True)
    except Exception as error:
        return Execution(trace, Failure(classify(error), say(error), error))
    findings = getattr(value, "findings", ())
    if findings:
        return Execution(trace, Failure(findings[0].cls, findings[0].say, findings[0]), value)
    return Execution(trace, None, value)


def classify(error: BaseException) -> Class:
    """The class of what a simulated run raised. Whether a deadlock has a cycle is seen from its world."""
    if isinstance(error, Deadlock):
        return Class.TIMEOUT if error.only_timers else getattr(error, "cls", Class.CYCLE)
    if isinstance(error, Livelock):
        return Class.STARVATION
    if isinstance(error, Mismatch):
        return Class.MISMATCH
    if isinstance(error, Outside):
        return Class.OUTSIDE
    if isinstance(error, TurnstileError) and not isinstance(error, PolicyError):
        return Class.RULE
    return Class.EXCEPTION


def say(error: BaseException) -> str:
    """One line."""
    return str(error) if isinstance(error, TurnstileError) else f"{type(error).__name__}: {error}"


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
