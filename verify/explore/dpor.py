"""Dynamic partial-order reduction: every schedule that differs in the order of a race, and few others.

After Flanagan and Godefroid (POPL 2005) with sleep sets: each execution is run from the start; where two steps raced,
the first of them is a place to come back to and take the other actor. What commutes is not tried both ways. Waiting for
a fact never races (see `verify.sim.trace`), so that a protocol whose order is fixed by what it waits for needs one
execution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify.explore.execution import Cut, Execution, Program, Unsteady, execute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from verify.sim.scheduler import Actor
    from verify.sim.trace import Trace

Things = tuple[tuple[Any, ...], ...]


class _Place:
    """A step at which there was a choice. step: its number. chosen: who acts there now."""

    __slots__ = ("again", "chosen", "done", "enabled", "sleep", "step")

    def __init__(self, enabled: tuple[str, ...], chosen: str, sleep: dict[str, Things], step: int) -> None:
        self.enabled, self.chosen, self.sleep, self.step = enabled, chosen, sleep, step
        self.again: dict[str, None] = {chosen: None}
        self.done: dict[str, Things] = {}


class _Guide:
    """Leads one execution along the places known so far, then along the first actor that does not sleep."""

    def __init__(self, places: list[_Place]) -> None:
        self.places = places
        self._known = len(places)
        self._depth = 0
        self._seen = 0
        self._sleep: dict[str, Things] = {}
        self.trace: Trace

    def __call__(self, enabled: Sequence[Actor]) -> int:
        names = [str(actor) for actor in enabled]
        depth, self._depth = self._depth, self._depth + 1
        if depth < self._known:
            place = self.places[depth]
            place.step = len(self.trace.names)
            if depth == self._known - 1:
                # What was tried here before, and what slept here, sleeps on until something conflicts with it.
                self._sleep = {**place.sleep, **dict(place.done.items())}
                self._sleep.pop(place.chosen, None)
                self._seen = place.step
            if place.chosen not in names:
                raise Unsteady(f"after {place.step} steps that were the same, {place.chosen!r} is not there any more")
            return names.index(place.chosen)
        self._wake()
        for index, name in enumerate(names):
            if name not in self._sleep:
                self.places.append(_Place(tuple(names), name, dict(self._sleep), len(self.trace.names)))
                return index
        raise Cut

    def _wake(self) -> None:
        """Steps since the last choice wake those that they conflict with; one that slept has been taken elsewhere."""
        names, things = self.trace.names, self.trace.things
        while self._seen < len(things) and self._sleep:
            step, self._seen = self._seen, self._seen + 1
            if names[step] in self._sleep:
                raise Cut
            touched = set(things[step])
            if touched:
                self._sleep = {name: mine for name, mine in self._sleep.items() if touched.isdisjoint(mine)}
        self._seen = len(things)


def explore(program: Program, fifo: bool = False, notes: bool = False) -> Iterator[Execution]:
    """Executions that stand for all schedules of `program`; those cut short as covered by others are yielded too.

    The program must do the same whenever it is given the same choices; raises Unsteady where it is seen not to. fifo:
    see `verify.explore.lanes`.
    """
    places: list[_Place] = []
    while True:
        guide = _Guide(places)

        def run(**options: Any) -> Any:
            guide.trace = options["trace"]  # noqa: B023 - called before the loop goes on
            return program(**options)

        execution = execute(run, guide, fifo, notes)
        yield execution
        _plan(places, execution.trace)
        while places:
            place = places[-1]
            if place.step < len(execution.trace.things):
                place.done[place.chosen] = execution.trace.things[place.step]
            else:
                place.done[place.chosen] = ()
            again = [name for name in place.again if name not in place.done and name not in place.sleep]
            if again:
                place.chosen = again[0]
                break
            places.pop()
        if not places:
            return


def _plan(places: list[_Place], trace: Trace) -> None:
    """Where to come back to, for each race of an execution."""
    at = {place.step: place for place in places}
    for race in trace.races:
        place = at.get(race.first)
        if place is None:
            continue
        enabled = set(place.enabled)
        name = trace.names[race.second]
        if name not in enabled:
            between = range(race.first + 1, race.second)
            leads = (
                trace.names[step]
                for step in between
                if trace.names[step] in enabled and trace.ordered(step, race.second)
            )
            name = next(leads, "")
        place.again.update(dict.fromkeys([name] if name else place.enabled))
