"""Which step of one execution had to come before which, and which pairs of steps were in a race.

A step is what one actor of the simulated world does at once. Two kinds of facts order steps. *Causes* are facts that,
once true, stay true: a kernel was enqueued, a rendezvous was reached, a future is done. To post such a fact and to wait
for it commute with everything else, so they are edges and never races. *Touches* are of things whose order matters: the
order on a stream, the order of arrival for room on a device, the answer to "is it done already?", Python state that
several tasks of a rank share. Two touches of one thing that no chain of causes orders are a race: another schedule may
see them the other way round. A run without a race stands for every schedule of its scenario (Mazurkiewicz; the
determinacy of Kahn's networks, with rendezvous for channels).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Race(NamedTuple):
    """Steps `first` and `second` touch `thing` and could have happened in the other order."""

    first: int
    second: int
    thing: tuple[Any, ...]


class Note(NamedTuple):
    """What happened in a step, for people: on rank `rank`, `what` ("start", "arrive", ...) on `where` to `which`."""

    step: int
    rank: int
    what: str
    where: str
    which: str


@dataclass(slots=True)
class Trace:
    """The steps of one execution, in the order in which they were taken.

    now: the step being taken, -1 outside. names: the actor of each step. before: the steps right before each. things:
    what each touched. races: in order of their second step. notes: for people. clock: where a rank asked for time, if
    one did: what it does then depends on more than the schedule. split: to wait is a step of its own also for what has
    happened already; otherwise, as in asyncio, only for what has not.
    """

    keep_notes: bool = True
    split: bool = True
    now: int = -1
    names: list[str] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    things: list[tuple[tuple[Any, ...], ...]] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    clock: str = ""
    _last: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _lanes: dict[Any, int] = field(default_factory=dict)
    _touched: dict[tuple[Any, ...], None] = field(default_factory=dict)

    # -- what the scheduler calls -------------------------------------------------------------------------------

    def begin(self, actor: Any) -> None:
        """A step of `actor` begins: after its own last one and after its causes."""
        self.now = step = len(self.names)
        try:
            lane, before = actor.lane, actor.causes()
        except AttributeError:
            causes = getattr(actor, "causes", None)
            lane, before = actor, causes() if causes is not None else ()
        last = self._lanes.get(lane)
        if last is not None:
            before = (*before, last)
        self._lanes[lane] = step
        self.names.append(str(actor))
        self.before.append(before)

    def end(self) -> None:
        """The step is over: see what it raced with."""
        step, touched = self.now, self._touched
        if touched:
            conflicts = []
            for thing in touched:
                last = self._last.get(thing)
                if last is not None and last != step:
                    if not self.ordered(last, step):
                        self.races.append(Race(last, step, thing))
                    conflicts.append(last)
                self._last[thing] = step
            if conflicts:
                self.before[step] = (*self.before[step], *conflicts)
            self.things.append(tuple(touched))
            touched.clear()
        else:
            self.things.append(())
        self.now = -1

    # -- what the simulated world calls -------------------------------------------------------------------------

    def touch(self, *thing: Any) -> None:
        """This step touches `thing`, for which order matters. Names the same thing in every execution."""
        if self.now >= 0:
            self._touched[thing] = None

    def note(self, rank: int, what: str, where: str, which: str) -> None:
        """Something happened in this step."""
        if self.keep_notes:
            self.notes.append(Note(self.now, rank, what, where, which))

    def last(self, lane: Any) -> tuple[int, ...]:
        """The last step of a lane, if it has taken one."""
        step = self._lanes.get(lane)
        return (step,) if step is not None else ()

    # -- asking -------------------------------------------------------------------------------------------------

    def ordered(self, first: int, second: int) -> bool:
        """Whether a chain of causes and of conflicts leads from `first` to `second`. Linear in the steps between."""
        before = self.before
        todo = [step for step in before[second] if step >= first]
        seen: set[int] = set()
        while todo:
            step = todo.pop()
            if step == first:
                return True
            if step not in seen:
                seen.add(step)
                todo += [each for each in before[step] if each >= first]
        return False

    def lazily(self) -> list[int]:
        """The steps in another order that means the same: each as late as possible before one that touches something.

        Every chain of causes stays whole then, so that it can be delivered at once.
        """
        order: list[int] = []
        taken = bytearray(len(self.names))
        wanted = [step for step, things in enumerate(self.things) if things]
        for target in (*wanted, *range(len(self.names))):
            todo, chain = [target], []
            while todo:
                step = todo.pop()
                if not taken[step]:
                    taken[step] = 1
                    chain.append(step)
                    todo += self.before[step]
            order += sorted(chain)
        return order
