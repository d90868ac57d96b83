"""A failing schedule made smaller: a smaller scenario, fewer decisions, fewer switches between ranks.

Whatever is made smaller, the failure must stay the same: class and rule, and for a standstill its kind.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from verify.explore.dpor import explore
from verify.explore.execution import execute
from verify.explore.schedule import DELIVERED, Decision, Schedule, followed, made
from verify.sim.errors import Deadlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from verify.blame import Class
    from verify.explore.execution import Execution, Failure, Program
    from verify.sim.errors import Standstill
    from verify.sim.trace import Trace

S = TypeVar("S")

STEPS = 20_000
"""Steps of all executions that looking for a smaller scenario may take."""

RUNS = 200
"""Executions that making a list of decisions shorter may take."""


@dataclass(frozen=True)
class Sign:
    """What must stay the same. kinds: of a standstill (`verify.sim.errors.Standstill.kinds`)."""

    cls: Class
    rule: str
    kinds: tuple[str, ...] = ()

    def of(self, execution: Execution) -> bool:
        """Whether an execution shows the same."""
        return sign(execution, self.rule) == self


def sign(execution: Execution, rule: str = "") -> Sign | None:
    """What an execution shows of a rule, or first of all; None where it does not fail."""
    failure = failure_of(execution, rule)
    if failure is None:
        return None
    found = standstill(failure)
    kinds = found.kinds if found is not None else ()
    if "room" in kinds:
        # How long a queue stands before the kernel that waits for room is a detail.
        kinds = tuple(kind for kind in kinds if kind not in ("queue", "event"))
    return Sign(failure.cls, failure.rule, kinds)


def failure_of(execution: Execution, rule: str = "") -> Failure | None:
    """The failure of a rule, or the first of all."""
    return execution.fails(rule) if rule else execution.failure


def standstill(failure: Failure) -> Standstill | None:
    """Who waited for whom, if the failure is that nothing could go on."""
    return failure.cause.standstill if isinstance(failure.cause, Deadlock) else None


# -- smaller scenario -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smaller(Generic[S]):
    """The smallest scenario found that fails in the same way. execution: that does. tried: scenarios."""

    scenario: S
    execution: Execution
    tried: int


def smaller_scenario(
    scenario: S,
    execution: Execution,
    wanted: Sign,
    program_of: Callable[[S], Program],
    smaller: Callable[[S], Iterable[S]],
    *,
    fifo: bool = False,
    limit: int = 30,
    tries: int = 60,
    steps: int = STEPS,
) -> Smaller[S]:
    """Go on to the first smaller scenario that fails in the same way, for as long as there is one.

    smaller: scenarios a step smaller, the most promising first. limit: executions that the search of one may take.
    tries: scenarios altogether. steps: of all executions altogether. Where the default schedule fails already, it is
    the only one that is tried.
    """
    tried, going = 0, True
    if tries and wanted.of(execute(program_of(scenario), fifo=fifo)):
        limit = 1
    while going:
        going = False
        for candidate in smaller(scenario):
            if tried >= tries or steps <= 0:
                return Smaller(scenario, execution, tried)
            tried += 1
            found, ran = _search(program_of(candidate), wanted, fifo, limit, steps)
            steps -= ran
            if found is not None:
                scenario, execution, going = candidate, found, True
                break
    return Smaller(scenario, execution, tried)


def search(program: Program, wanted: Sign, fifo: bool = False, limit: int = 30) -> Execution | None:
    """The first of up to `limit` executions that fails in the wanted way."""
    return _search(program, wanted, fifo, limit)[0]


def _search(
    program: Program, wanted: Sign, fifo: bool, limit: int, steps: int = STEPS
) -> tuple[Execution | None, int]:
    """See `search`; and how many steps they had."""
    ran = 0
    for number, execution in enumerate(explore(program, fifo), start=1):
        ran += len(execution.trace.names)
        if not execution.cut and wanted.of(execution):
            return execution, ran
        if number >= limit or ran >= steps:
            break
    return None, ran


# -- fewer decisions --------------------------------------------------------------------------------------------


def fewer_decisions(
    program: Program, schedule: Schedule, wanted: Sign, fifo: bool = False, runs: int = RUNS
) -> Schedule:
    """Leave out decisions as long as the failure stays: delta debugging, to a list of which each one is needed.

    runs: executions at most. Reference: Zeller and Hildebrandt, IEEE TSE 2002.
    """
    left = runs

    def attempt(decisions: Sequence[Decision]) -> Schedule | None:
        nonlocal left
        left -= 1
        found = made(program, decisions, fifo)
        return found if wanted.of(found.execution) else None

    best = attempt(()) if schedule.decisions else None
    if best is not None:
        return best
    best, parts = schedule, 2
    while len(best.decisions) > 1 and left > 0:
        size = -(-len(best.decisions) // parts)
        for start in range(0, len(best.decisions), size):
            found = attempt(best.decisions[:start] + best.decisions[start + size :])
            if found is not None and len(found.decisions) < len(best.decisions):
                best, parts = found, max(2, parts - 1)
                break
            if left <= 0:
                return best
        else:
            if size == 1:
                return best
            parts = min(len(best.decisions), 2 * parts)
    return best


# -- fewer switches ---------------------------------------------------------------------------------------------


def rank_of(name: str) -> int | None:
    """The rank that an actor belongs to; None for what several share, such as a collective."""
    if not name.startswith("rank "):
        return None
    digits = name[5:].partition(" ")[0].partition(":")[0]
    return int(digits) if digits.isdigit() else None


def few_switches(trace: Trace, inside: Sequence[int] | None = None) -> list[int]:
    """The steps of a trace in an order that its causes and conflicts allow, with few switches between ranks.

    A rank goes on for as long as it can; then the one that can go on longest. What ranks share happens as soon as it
    can. inside: only these steps, whose causes are among them or are done.
    """
    steps = range(len(trace.names)) if inside is None else inside
    best: list[int] = []
    least = -1
    for start in sorted({rank for step in steps if (rank := rank_of(trace.names[step])) is not None}) or [0]:
        order = list(_order(trace, steps, start))
        count = switches(trace, order)
        if least < 0 or count < least:
            best, least = order, count
    return best


def switches(trace: Trace, order: Iterable[int]) -> int:
    """How often the rank changes along an order of steps."""
    ranks = [rank for step in order if (rank := rank_of(trace.names[step])) is not None]
    return sum(one != other for one, other in itertools.pairwise(ranks))


def _order(trace: Trace, steps: Sequence[int], start: int) -> Iterator[int]:
    pool = set(steps)
    left: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    also = also_before(trace)
    for step in steps:
        before = {each for each in (*trace.before[step], *also.get(step, ())) if each in pool}
        left[step] = len(before)
        for each in before:
            after.setdefault(each, []).append(step)
    ready = {step for step, count in left.items() if not count}
    rank = start
    while ready:
        run = _run(trace, rank, ready, left, after)
        if not run:
            others = sorted({other for step in ready if (other := rank_of(trace.names[step])) is not None})
            runs = {other: _run(trace, other, ready, left, after) for other in others}
            rank = max(others, key=lambda other: (len(runs[other]), -other))
            run = runs[rank]
        for step in run:
            ready.discard(step)
            for each in after.get(step, ()):
                left[each] -= 1
                if not left[each]:
                    ready.add(each)
        yield from run


def also_before(trace: Trace) -> dict[int, list[int]]:
    """Step -> steps that came before it though `trace.before` does not say so.

    The last rank to arrive at a rendezvous leaves it in the same step, after the arrivals of the others (seen from the
    notes). Under `fifo` the handles of a rank run in the order in which they became ready.
    """
    arrivals: dict[int, list[int]] = {}
    counts: dict[tuple[int, str], int] = {}
    found: dict[int, list[int]] = {}
    for note in trace.notes:
        if note.where == "host" and note.what in ("arrive", "leave") and note.step >= 0:
            number = counts.get((note.rank, note.what), 0)
            counts[note.rank, note.what] = number + 1
            if note.what == "arrive":
                arrivals.setdefault(number, []).append(note.step)
            else:
                found.setdefault(note.step, []).extend(step for step in arrivals[number] if step != note.step)
    if any(name.endswith(DELIVERED) for name in trace.names):
        last: dict[int, int] = {}
        for step, name in enumerate(trace.names):
            rank = rank_of(name)
            if rank is not None and name.startswith(f"rank {rank}: ") and not name.endswith(DELIVERED):
                if rank in last:
                    found.setdefault(step, []).append(last[rank])
                last[rank] = step
    return found


def _run(
    trace: Trace, rank: int, ready: set[int], left: dict[int, int], after: dict[int, list[int]]
) -> list[int]:
    """The steps that `rank` can take now without any other rank, and those that are shared."""
    run: list[int] = []
    freed: dict[int, int] = {}
    todo = sorted(step for step in ready if rank_of(trace.names[step]) in (rank, None))
    while todo:
        step = todo.pop(0)
        run.append(step)
        for each in after.get(step, ()):
            freed[each] = freed.get(each, 0) + 1
            if freed[each] == left[each] and rank_of(trace.names[each]) in (rank, None):
                todo.append(each)
        todo.sort()
    return run


def in_order(
    program: Program, trace: Trace, order: Sequence[int], wanted: Sign, fifo: bool = False
) -> Execution | None:
    """Run the steps of a trace in another order; the execution, if it fails in the same way."""
    execution = followed(program, [trace.names[step] for step in order], fifo, notes=True).execution
    return execution if wanted.of(execution) else None
