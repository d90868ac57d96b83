"""Our own explorer on the same protocol: the seam that the comparison calls, as a process like any other runner.

It does not run protocol.py but what that is a sketch of: the real rank, planner, cache and policy, on one loop a rank,
with simulated devices. `turnstile` is the policy `fine`, `free` is `unordered` on a device with one slot.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.peers.checkers.cell import Answer, read
from kernel.topology import World
from verify.explore.certify import certify
from verify.explore.result import Conclusion
from verify.sim.world import WIDE
from verify.trial.enact import run
from verify.trial.family import START, family

if TYPE_CHECKING:
    from verify.trial.scenario import Scenario

VERDICTS = {Conclusion.PROVED: "proved", Conclusion.REFUTED: "deadlock", Conclusion.INCONCLUSIVE: "unfinished"}


def scenario(ranks: int, segments: int, iterations: int, variant: str) -> Scenario:
    """An epoch of `segments` that meets `iterations` of D, as `turnstile check` has it in its family."""
    free = variant == "free"
    world = World(ranks, 1 if ranks == 1 else 2 if ranks % 2 == 0 else ranks, 1, route="none" if free else "paper")
    capacity = 1 if free else WIDE
    members = family(world, "unordered" if free else "fine", segments, iterations, capacity=capacity)
    return next(each for each in members if any(round_ == START for round_, _ in each.entries))


def ours(n: int, segments: int, iterations: int, variant: str) -> dict[str, Any]:
    """Explore `n` ranks x `segments` of P x `iterations` of D; `variant` is one of protocol.VARIANTS.

    Returns the fields of cell.Answer: `verdict` (proved, deadlock or unfinished), `executions` (up to the first
    deadlock), `seconds` (imports left out), `scope` (for which schedules a proof holds), and `says` if there is more
    to say. It may run for as long as it likes: the caller ends the process.
    """
    asked = scenario(n, segments, iterations, variant)
    start = time.perf_counter()
    result = certify(partial(run, asked), str(asked), budget=100_000)
    return {
        "verdict": VERDICTS[result.verdict],
        "executions": result.evidence.executions,
        "seconds": time.perf_counter() - start,
        "scope": "any order of ready tasks, ranks and devices",
        "says": f"{result.evidence.steps} steps; {result.reason[:200]}",
    }


def main() -> None:
    """Answer the question on the command line; its bound and limit are not for us."""
    cell = read()
    Answer(**ours(cell.ranks, cell.segments, cell.iterations, cell.variant)).print()


if __name__ == "__main__":
    main()
