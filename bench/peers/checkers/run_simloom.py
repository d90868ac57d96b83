"""simloom: its systematic search, which its README names for proofs. The simulated network and disk are not built.

The bound counts the choices in a run that were not the front of the ready queue, whichever callback was taken instead.
Some of them are its own (it notes the end of each task in a callback), so its searches are larger than they look.
The search takes no time limit, so the world ends it by failing in the first execution that starts too late.
"""

from __future__ import annotations

from time import monotonic

import simloom
from cell import Answer, read
from protocol import Protocol

ANY = 1_000_000_000


class OutOfTime(Exception):
    """Ends the search."""


def main() -> None:
    """Answer the question on the command line."""
    cell = read()
    scope = "any order of ready callbacks"
    if cell.bound is not None:
        scope += f" with at most {cell.bound} choices other than asyncio's own"
    start = monotonic()

    async def world() -> None:
        if monotonic() - start > cell.limit:
            raise OutOfTime
        await Protocol(cell.ranks, cell.segments, cell.iterations, cell.variant).main()

    found = simloom.explore_systematic(
        world,
        max_delays=ANY if cell.bound is None else cell.bound,
        max_schedules=ANY,
        max_bound=ANY,
        world=False,
    )
    seconds, error = monotonic() - start, found.first.error if found.first is not None else None
    if isinstance(error, OutOfTime):
        Answer("unfinished", found.schedules - 1, seconds, scope).print()
    elif error is not None:
        verdict = "deadlock" if isinstance(error, simloom.SimDeadlockError) else f"failure: {type(error).__name__}"
        Answer(verdict, found.schedules, seconds, scope, str(error).splitlines()[0]).print()
    else:
        verdict = "proved" if found.proven_correct else "unfinished"
        Answer(verdict, found.schedules, seconds, scope, f"proven_correct={found.proven_correct}").print()


if __name__ == "__main__":
    main()
