"""frontrun: dynamic partial-order reduction, its default, over awaits. Without a bound it is its complete search.

Each actor is one of its workers, since it does not schedule tasks that a worker starts. Only with the virtual clock
does it tell a deadlock on events from a slow run. Nothing here uses I/O, and counterexamples are not replayed. The
property is that all actors end. The result of a search cut short by its time limit reads as a pass, hence `finished`.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import frontrun
from cell import Answer, read
from protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class State:
    """What an execution starts from."""

    def __init__(self, protocol: Protocol) -> None:
        self.actors = protocol.actors()


def worker(number: int) -> Callable[[State], Coroutine[object, object, None]]:
    """The actor of that number."""

    async def run(state: State) -> None:
        await state.actors[number]()

    return run


async def main() -> None:
    """Answer the question on the command line."""
    cell = read()

    def setup() -> State:
        return State(Protocol(cell.ranks, cell.segments, cell.iterations, cell.variant))

    scope = "all interleavings of awaits up to independent steps"
    if cell.bound is not None:
        scope += f" with at most {cell.bound} preemptions"
    start = monotonic()
    found = await frontrun.explore(
        setup=setup,
        workers=[worker(number) for number in range(len(setup().actors))],
        invariant=lambda _state: True,
        preemption_bound=cell.bound,
        total_timeout=cell.limit,
        clock="virtual",
        detect_io=False,
        reproduce_on_failure=0,
    )
    seconds = monotonic() - start
    finished = seconds < cell.limit
    says = (found.explanation or f"property_holds={found.property_holds}, exhausted={found.exhausted}").splitlines()[0]
    if found.property_holds is False:
        verdict = "deadlock" if says.startswith("Deadlock") else "failure"
    else:
        verdict = "proved" if found.property_holds and finished else "unfinished"
    Answer(verdict, found.num_explored, seconds, scope, says).print()


if __name__ == "__main__":
    asyncio.run(main())
