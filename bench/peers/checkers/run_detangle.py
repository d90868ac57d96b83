"""detangle: its exhaustive search, DFS, which its README names for proofs. Shrinking and its database are off.

DFS bounds the *sum* of the indices chosen among the ready tasks, oldest first: running the third oldest costs two. By
default it enumerates no choice among more than 16 tasks and still calls the search exhausted, so that is raised here,
to less than the 2**32 seeds of `random`, which nothing here draws from.
"""

from __future__ import annotations

from time import monotonic

import detangle
from cell import Answer, read
from protocol import Protocol

ANY = 1_000_000_000


def main() -> None:
    """Answer the question on the command line."""
    cell = read()
    search = detangle.DFS(max_delays=ANY if cell.bound is None else cell.bound, max_branch=ANY)
    scope = "any order of ready tasks"
    if cell.bound is not None:
        scope += f" whose indices in asyncio's own order sum up to at most {cell.bound}"

    async def world() -> None:
        await Protocol(cell.ranks, cell.segments, cell.iterations, cell.variant).main()

    start = monotonic()
    try:
        found = detangle.explore(
            world, strategy=search, runs=ANY, max_duration=cell.limit, shrink=False, database=False
        )
    except detangle.BugFound as bug:
        seconds, failure = monotonic() - start, bug.report.failure
        verdict = "deadlock" if failure.kind == "deadlock" else f"failure: {failure.kind}"
        Answer(verdict, bug.report.runs, seconds, scope, failure.headline().splitlines()[0]).print()
    else:
        verdict = "proved" if found.exhausted else "unfinished"
        Answer(verdict, found.runs, monotonic() - start, scope, found.summary().partition(" -- ")[2]).print()


if __name__ == "__main__":
    main()
