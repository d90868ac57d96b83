"""Schedules picked by chance, for scopes that are too large for all of them. Each finds other faults well.

They run at the fidelity `fifo`, so that what they find can happen in production. A seed gives the same schedule again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from verify.sim.scheduler import Actor, Choose


def uniform(seed: int) -> Choose:
    """Any enabled actor with the same probability."""
    draws = random.Random(f"uniform {seed}")

    def choose(enabled: Sequence[Actor]) -> int:
        return draws.randrange(len(enabled))

    return choose


def prioritized(seed: int, depth: int, choices: int) -> Choose:
    """Probabilistic concurrency testing: random priorities, and `depth` - 1 places where the first becomes the last.

    Finds a fault of that depth, in a run of n actors and k choices, with a probability of at least 1 / (n k^(depth-1)).
    Reference: Burckhardt et al., ASPLOS 2010.
    """
    draws = random.Random(f"priorities {seed}")
    priorities: dict[str, float] = {}
    falls = {draws.randrange(max(1, choices)): place for place in range(depth - 1)}
    at = 0

    def choose(enabled: Sequence[Actor]) -> int:
        nonlocal at
        names = [str(actor) for actor in enabled]
        for name in names:
            if name not in priorities:
                priorities[name] = 1 + draws.random()
        picked = max(range(len(names)), key=lambda index: priorities[names[index]])
        if at in falls:
            priorities[names[picked]] = -falls[at]
            picked = max(range(len(names)), key=lambda index: priorities[names[index]])
        at += 1
        return picked

    return choose


def delayed(seed: int, bound: int, choices: int) -> Choose:
    """The oldest actor, but for `bound` places where it has to wait. Reference: Emmi, Qadeer, Rakamaric, POPL 2011."""
    draws = random.Random(f"delays {seed}")
    places = {draws.randrange(max(1, choices)) for _ in range(bound)}
    at = 0
    waiting: set[str] = set()

    def choose(enabled: Sequence[Actor]) -> int:
        nonlocal at
        if at in places:
            waiting.add(str(enabled[0]))
        at += 1
        for index, actor in enumerate(enabled):
            if str(actor) not in waiting:
                return index
        waiting.clear()
        return 0

    return choose


def mixture(choices: int, seed: int = 0) -> Iterator[Choose]:
    """All of them in turn, without end. choices: about how many a run has."""
    while True:
        yield delayed(seed, 1 + seed % 3, choices)
        yield prioritized(seed, 2 + seed % 3, choices)
        yield uniform(seed)
        seed += 1
