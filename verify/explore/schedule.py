"""Schedules that are written down: followed step by step, told in few decisions, and made again.

A decision is (choice, actor): at that choice, counted from 0, this actor acts instead of the oldest. With `~` before
its name the actor is held back from there on instead, until it is named, or until nobody else can act: to delay one
actor takes one decision then, however many others pass it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verify.explore.execution import execute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from verify.explore.execution import Execution, Program
    from verify.sim.scheduler import Actor, Choose
    from verify.sim.trace import Trace

Decision = tuple[int, str]

HOLD = "~"
DELIVERED = " delivered"


class Follower:
    """A `choose` that takes actors in the order of the steps `names`, as far as it can.

    Deliveries (`verify.explore.lanes`, fidelity `fifo`) that `names` lacks happen when what they deliver is due.
    """

    def __init__(self, names: Sequence[str], trace: Trace) -> None:
        self._trace, self._seen, self._beyond = trace, 0, len(names)
        self._ahead: dict[str, deque[int]] = {}
        for step, name in enumerate(names):
            self._ahead.setdefault(name, deque()).append(step)

    def __call__(self, enabled: Sequence[Actor]) -> int:
        self._catch_up()
        return min(range(len(enabled)), key=lambda index: self._due(enabled[index]))

    def _due(self, actor: Actor) -> int:
        """Whoever is first in a rank's line (`fifo`) holds up those behind it, and is due as soon as one of them is."""
        line = getattr(actor, "line", ()) or (actor,)
        return min(self.place(str(each)) for each in line)

    def place(self, name: str) -> int:
        """When an actor is due next."""
        ahead = self._ahead.get(name)
        if not ahead and name.endswith(DELIVERED):
            ahead = self._ahead.get(name.removesuffix(DELIVERED))
        return ahead[0] if ahead else self._beyond

    def _catch_up(self) -> None:
        """Count what was done since, also where there was nothing to choose."""
        names = self._trace.names
        while self._seen < len(names):
            ahead = self._ahead.get(names[self._seen])
            if ahead:
                ahead.popleft()
            self._seen += 1


class Steered:
    """A `choose` that makes decisions, in their order. One whose actor is not enabled waits, and so do those after it.

    late: decisions that had to wait, with the choice at which they were made. left: those that never were made. made:
    the others, with the choices at which they were.
    """

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self._left = deque(decisions)
        self._held: set[str] = set()
        self._calls = 0
        self.late: list[tuple[Decision, int]] = []
        self.made: list[Decision] = []

    @property
    def left(self) -> list[Decision]:
        """Decisions not made yet."""
        return list(self._left)

    def __call__(self, enabled: Sequence[Actor]) -> int:
        call, self._calls = self._calls, self._calls + 1
        names = [str(actor) for actor in enabled]
        left, held = self._left, self._held
        while left and left[0][0] <= call:
            name = left[0][1].removeprefix(HOLD)
            if name not in names:
                break
            decision = left.popleft()
            self.made.append((call, decision[1]))
            if decision[0] < call:
                self.late.append((decision, call))
            if decision[1].startswith(HOLD):
                held.add(name)
            else:
                held.discard(name)
                return names.index(name)
        return default(names, held)


def default(names: Sequence[str], held: set[str]) -> int:
    """The oldest that is not held back; all are let go where there is none."""
    for index, name in enumerate(names):
        if name not in held:
            return index
    held.clear()
    return 0


class Writer:
    """A `choose` that does what another one chooses and writes down decisions with which `Steered` does the same.

    ahead: tells how long from now an actor that is passed over will wait, in steps; those that wait for long are held.
    """

    def __init__(self, choose: Choose, ahead: Follower | None = None) -> None:
        self._choose, self._ahead, self._calls = choose, ahead, 0
        self._held: set[str] = set()
        self.decisions: list[Decision] = []

    def __call__(self, enabled: Sequence[Actor]) -> int:
        call, self._calls = self._calls, self._calls + 1
        names = [str(actor) for actor in enabled]
        picked = self._choose(enabled)
        usual = default(names, set(self._held))
        if usual != picked and self._ahead is not None and names[picked] not in self._held:
            here = self._ahead.place(names[picked])
            passed = [name for name in names[:picked] if name not in self._held]
            if len(passed) <= 2 and all(self._ahead.place(name) > here + 2 for name in passed):
                for name in passed:
                    self._held.add(name)
                    self.decisions.append((call, HOLD + name))
        if default(names, set(self._held)) != picked:
            self._held.discard(names[picked])
            self.decisions.append((call, names[picked]))
        else:
            default(names, self._held)  # may let all go
        return picked


@dataclass(frozen=True)
class Schedule:
    """Decisions, and the execution that they lead to."""

    decisions: tuple[Decision, ...]
    execution: Execution

    @property
    def names(self) -> list[str]:
        """The actors of its steps."""
        return self.execution.trace.names


def followed(
    program: Program, names: Sequence[str], fifo: bool = False, notes: bool = False, instead: Choose | None = None
) -> Schedule:
    """Run `program` with actors in the order of `names` and write its schedule down. instead: chooses, if given."""
    writers: list[Writer] = []

    def run(**options: Any) -> Any:
        follower = Follower(names, options["trace"])
        writers.append(Writer(instead) if instead is not None else Writer(follower, follower))
        return program(**{**options, "choose": writers[0]})

    execution = execute(run, None, fifo, notes)
    return Schedule(tuple(writers[0].decisions), execution)


def made(program: Program, decisions: Sequence[Decision], fifo: bool = False, notes: bool = False) -> Schedule:
    """Run `program` with these decisions; the result has those that could be made, and when they were."""
    steered = Steered(decisions)
    execution = execute(program, steered, fifo, notes)
    return Schedule(tuple(steered.made), execution)


def one_away(program: Program, fifo: bool = False) -> Iterator[Schedule]:
    """The default schedule, then those in which one race of it is the other way round; late races first."""
    calls: dict[int, int] = {}

    def run(**options: Any) -> Any:
        trace: Trace = options["trace"]

        def choose(enabled: Sequence[Actor]) -> int:
            calls[len(trace.names)] = len(calls)
            return 0

        return program(**{**options, "choose": choose})

    usual = execute(run, None, fifo)
    yield Schedule((), usual)
    names = usual.trace.names
    for step in dict.fromkeys(race.first for race in reversed(usual.trace.races)):
        if step in calls:
            yield made(program, [(calls[step], HOLD + names[step])], fifo)
