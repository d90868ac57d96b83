"""From a failing schedule to a counterexample that fits on a screen.

    scenario     smaller ones first, as long as they fail in the same way
    fidelity     what was found with the tasks of a rank in any order is run again as asyncio orders them
    decisions    left out as long as it still fails; they are what the token holds
    order        the same trace with few switches between ranks is what is printed, after a run that failed like it
    step         the last one before which some way to go on succeeded

All of it is deterministic: the same failure gives the same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from verify.blame import Certainty, Class
from verify.explore.critical import Critical, critical_step
from verify.explore.execution import Unsteady, execute
from verify.explore.render import as_text
from verify.explore.rules import Rule, rule_of
from verify.explore.schedule import Schedule, followed, made, one_away
from verify.explore.search import mixture
from verify.explore.shrink import (
    STEPS,
    Sign,
    failure_of,
    fewer_decisions,
    in_order,
    rank_of,
    sign,
    smaller_scenario,
    standstill,
)
from verify.explore.story import Cut, Row, arrange, as_it_is, planned, subject, tell
from verify.explore.token import Token, prints
from verify.sim.standstill import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from verify.explore.execution import Execution, Failure, Program
    from verify.explore.schedule import Decision
    from verify.sim.errors import Standstill
    from verify.sim.trace import Trace

S = TypeVar("S")


@dataclass(frozen=True)
class Case(Generic[S]):
    """What can fail. program: of a scenario, see `verify.explore.execution.Program`. scope, plain: of a scenario, one
    line and what a token keeps. smaller: scenarios a step smaller, the most promising first."""

    scenario: S
    program: Callable[[S], Program]
    scope: Callable[[S], str] = str
    plain: Callable[[S], Mapping[str, Any]] = lambda scenario: {"scenario": str(scenario)}
    smaller: Callable[[S], Iterable[S]] = lambda scenario: ()


@dataclass(frozen=True)
class Effort:
    """Executions at most: search of one smaller `scenario` and how many of these, leaving out `decisions`, ways to go
    on from one prefix for the `critical` step, looking for the failure under `fifo`. steps: of the executions that the
    search of smaller scenarios takes."""

    scenario: int = 30
    scenarios: int = 60
    decisions: int = 200
    critical: int = 24
    fifo: int = 120
    steps: int = STEPS


@dataclass(frozen=True)
class Counterexample:
    """One failing schedule, as people read it.

    cls, rule, certainty, condition, say: what failed. scope: the scenario in one line. fidelity: `fifo`, or `any` where
    it was not seen with the tasks of a rank in asyncio's order. steps: of the schedule. caption, lanes: its end. ranks:
    those in the lanes, of a world of this size. chain: who waits for whom. hosts: where each rank's own code waits.
    critical: the step at which it went wrong, in words. broken: the paper's rule. decisions, token: how to run it
    again. plan: what the last rounds did, where one starves.
    """

    cls: Class
    rule: str
    certainty: Certainty
    condition: str
    say: str
    scope: str
    fidelity: str
    steps: int
    ranks: tuple[int, ...]
    size: int
    caption: str
    lanes: tuple[Row, ...]
    chain: tuple[str, ...]
    hosts: tuple[tuple[int, str], ...]
    critical: str
    broken: Rule
    decisions: tuple[Decision, ...]
    token: str
    plan: tuple[str, ...] = ()

    @property
    def switches(self) -> int:
        """How often the rank changes in the lanes that are printed."""
        return sum(one.rank != other.rank for one, other in pairwise(self.lanes))

    def __str__(self) -> str:
        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "class": str(self.cls), "rule": self.rule, "certainty": str(self.certainty), "condition": self.condition,
            "say": self.say, "scope": self.scope, "fidelity": self.fidelity, "steps": self.steps,
            "switches": self.switches, "caption": self.caption,
            "lanes": [{"rank": row.rank, "text": row.text, "critical": row.critical} for row in self.lanes],
            "chain": list(self.chain), "hosts": {str(rank): text for rank, text in self.hosts},
            "critical": self.critical, "plan": list(self.plan),
            "broken": {"name": self.broken.name, "section": self.broken.section, "say": self.broken.say},
            "decisions": [list(each) for each in self.decisions], "replay": self.token,
        }  # fmt: skip


def explain(
    case: Case[S],
    execution: Execution,
    *,
    fifo: bool = False,
    rule: str = "",
    certainty: Certainty | None = None,
    effort: Effort | None = None,
) -> Counterexample:
    """The counterexample that a failing execution of `case` shows.

    fifo: the fidelity under which it was found. rule: which of its failures; the first by default. certainty: where it
    is known; otherwise a standstill that needs a device too small for all kernels is conditional, and what was not seen
    in asyncio's order is undecided. Raises ValueError for an execution that does not fail, and Unsteady where it does
    not fail again.
    """
    effort = effort or Effort()
    wanted = sign(execution, rule)
    if wanted is None:
        raise ValueError(f"the execution does not fail{f' in {rule}' if rule else ''}: there is nothing to explain")
    least = smaller_scenario(
        case.scenario, execution, wanted, case.program, case.smaller, fifo=fifo, limit=effort.scenario,
        tries=effort.scenarios, steps=effort.steps,
    )  # fmt: skip
    scenario, program = least.scenario, case.program(least.scenario)
    fifo, schedule = _confirmed(program, least.execution, wanted, fifo, effort.fifo)
    if not wanted.of(schedule.execution):
        now = failure_of(schedule.execution)
        how = f"as {now.cls}: {now.say}" if now is not None else "without a failure"
        first = failure_of(least.execution, wanted.rule)
        assert first is not None
        raise Unsteady(f"{first.say}; and the same schedule ended {how} when it was run again")
    schedule = _nearer(program, schedule, wanted, fifo)
    schedule = fewer_decisions(program, schedule, wanted, fifo, effort.decisions)
    schedule = made(program, schedule.decisions, fifo, notes=True)
    failure = failure_of(schedule.execution, wanted.rule)
    if failure is None:
        raise Unsteady("a schedule that failed does not fail again")
    still = standstill(failure)
    trace, cuts = _arranged(program, schedule, wanted, fifo)
    critical = _always(program, wanted) or critical_step(program, trace.names, wanted.rule, fifo, effort.critical)
    story = tell(trace, cuts, critical.step, still.ops if still else (), _concerned(trace, still, critical.step))
    conditional = still is not None and still.conditional
    names = schedule.names
    return Counterexample(
        cls=wanted.cls,
        rule=wanted.rule,
        certainty=certainty or _certainty(fifo, conditional),
        condition="the device has no room for all of its kernels at once" if conditional else "",
        say=failure.say,
        scope=case.scope(scenario),
        fidelity="fifo" if fifo else "any",
        steps=len(names),
        ranks=story.ranks,
        size=1 + max((note.rank for note in trace.notes), default=0),
        caption=story.caption,
        lanes=story.rows,
        chain=still.chain if still else (),
        hosts=still.hosts if still else (),
        critical=_critical(trace, critical),
        broken=rule_of(wanted.cls, wanted.rule, still, _ordered(trace, still)),
        decisions=schedule.decisions,
        token=str(
            Token(
                case.plain(scenario), schedule.decisions, "fifo" if fifo else "any", wanted.cls, wanted.rule,
                len(names), prints(names),
            )
        ),
        plan=_rounds(schedule.execution, failure) if wanted.cls is Class.STARVATION else (),
    )  # fmt: skip


def _rounds(execution: Execution, failure: Failure) -> tuple[str, ...]:
    """What the rounds before a failure did, as far as the program tells its plans."""
    finding = next((each for each in getattr(execution.value, "findings", ()) if each.rule == failure.rule), None)
    return planned(getattr(execution.value, "plans", ()), finding.round if finding is not None else -1)


def _certainty(fifo: bool, conditional: bool) -> Certainty:
    if not fifo:
        return Certainty.UNDECIDED
    return Certainty.CONDITIONAL if conditional else Certainty.CERTAIN


def _confirmed(program: Program, execution: Execution, wanted: Sign, fifo: bool, limit: int) -> tuple[bool, Schedule]:
    """The same failure in an order that production has, where one is found; else as it was found."""
    if not fifo:
        for schedule in islice(_in_production(program, execution.trace), limit):
            if wanted.of(schedule.execution):
                return True, schedule
    schedule = followed(program, execution.trace.names, fifo)
    return fifo, schedule if wanted.of(schedule.execution) else Schedule((), execution)


def _in_production(program: Program, trace: Trace) -> Iterator[Schedule]:
    """Schedules of fidelity `fifo` that are near a trace of fidelity `any`, then any."""
    yield followed(program, [trace.names[step] for step in trace.lazily()], fifo=True)
    yield followed(program, trace.names, fifo=True)
    yield from islice(one_away(program, fifo=True), _NEAR)
    for choose in mixture(len(trace.names)):
        yield followed(program, (), fifo=True, instead=choose)


_NEAR = 60
"""Schedules near the default one that are tried."""


def _nearer(program: Program, schedule: Schedule, wanted: Sign, fifo: bool) -> Schedule:
    """A schedule that fails in the same way and is one decision away from the default at most, if there is one."""
    if len(schedule.decisions) < 2:
        return schedule
    near = islice(one_away(program, fifo), _NEAR)
    return next((each for each in near if wanted.of(each.execution)), schedule)


def _arranged(program: Program, schedule: Schedule, wanted: Sign, fifo: bool) -> tuple[Trace, tuple[Cut, ...]]:
    """An equal trace that is easier to read, if running it fails in the same way; else the trace itself."""
    trace = schedule.execution.trace
    arrangement = arrange(trace)
    again = in_order(program, trace, arrangement.order, wanted, fifo)
    if again is None or _chain(again, wanted.rule) != _chain(schedule.execution, wanted.rule):
        return trace, as_it_is(trace).cuts
    if again.trace.names == [trace.names[step] for step in arrangement.order]:
        return again.trace, arrangement.cuts
    # Under `fifo` what is delivered, and what a rank finds ready by itself, depends on the order.
    return again.trace, as_it_is(again.trace).cuts


def _always(program: Program, wanted: Sign) -> Critical | None:
    """An execution without a race stands for all: where it fails, every schedule does."""
    execution = execute(program)
    return Critical(-1, False, 1) if not execution.trace.races and wanted.of(execution) else None


def _chain(execution: Execution, rule: str) -> tuple[str, ...]:
    """Who waited for whom in the end."""
    failure = failure_of(execution, rule)
    still = standstill(failure) if failure is not None else None
    return still.chain if still is not None else ()


def _concerned(trace: Trace, still: Standstill | None, step: int) -> tuple[int, ...]:
    """The ranks to show: those of a cycle and of the critical step; of anything else all."""
    if still is None or still.cls is not Class.CYCLE:
        return ()
    rank = rank_of(trace.names[step]) if step >= 0 else None
    return tuple(sorted({*still.ranks, *(() if rank is None else (rank,))}))


def _critical(trace: Trace, critical: Critical) -> str:
    """The critical step in words."""
    step = critical.step
    if step < 0:
        tried = f"none of {critical.runs} schedules succeeded" if critical.bounded else "every schedule ends like this"
        return f"no single step is to blame: {tried}"
    rank = rank_of(trace.names[step])
    who = f"rank {rank} " if rank is not None else ""
    text = f"{who}{subject(trace, step)}"
    if rank is not None and "goes on in task" in text:
        later = next((note.step for note in trace.notes if note.rank == rank and note.step > step), -1)
        text += f", and so it {subject(trace, later)}" if later >= 0 else ""
    races = [race for race in trace.races if race.first == step]
    if races:
        told = [(_WEIGHT.get(str(race.thing[0]), 9), subject(trace, race.second), race.second) for race in races]
        text += f" before it {min(told, key=lambda each: (each[0], '[' not in each[1], each[2]))[1]}"
    end = f"none of the {critical.runs} that were tried does" if critical.bounded else "none does"
    return f"{text}; up to here some schedule still succeeds, from here on {end}"


_WEIGHT = {"stream": 0, "room": 1, "done": 2, "gate": 3, "python": 4, "ready": 5}


def _ordered(trace: Trace, still: Standstill | None) -> bool | None:
    """Whether the ranks of a cycle have enqueued its operations in one order; None where that cannot be told."""
    if still is None or len(still.ops) < 2:
        return None
    orders = set()
    for rank in still.ranks:
        enqueued = [brief(note.which) for note in trace.notes if note.rank == rank and note.what == "enqueue"]
        mine = [each for each in enqueued if each in still.ops]
        if len(mine) < len(still.ops):
            return None
        orders.add(tuple(mine))
    return len(orders) == 1


__all__ = ["Case", "Counterexample", "Effort", "explain"]
