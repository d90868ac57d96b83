"""Who called the line at which ranks stand, where that is one for all of them: a function of the program that makes
their calls tells nothing about which call it is. Stacks hold the callers; a record holds one line of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verify import words
from verify.events import KERNEL
from verify.hang.stacks import LIBRARY

if TYPE_CHECKING:
    from verify.blame import Verdict
    from verify.events import Site
    from verify.hang.case import Case


def callers(verdict: Verdict, case: Case) -> tuple[str, ...]:
    """Lines for the ranks that stand at one line that the verdict names: from where each of them came there.

    That is the innermost caller that is not the same for all of them; where all are, the nearest one, once.
    """
    alike: dict[Site, dict[int, list[Site]]] = {}
    for stack in case.found.stacks:
        own = [frame for frame in stack.frames if frame.file != KERNEL and not LIBRARY.search(frame.file)]
        if stack.rank is None or "MainThread" not in stack.thread or len(own) < 2 or str(own[0]) not in verdict.say:
            continue
        alike.setdefault(own[0], {}).setdefault(stack.rank, own[1:])
    lines = []
    for site, mine in alike.items():
        if len(mine) < 2:
            continue
        shared = min(len(frames) for frames in mine.values())
        at = next((n for n in range(shared) if len({frames[n] for frames in mine.values()}) > 1), 0)
        told: dict[Site, list[int]] = {}
        for rank, frames in mine.items():
            told.setdefault(frames[at], []).append(rank)
        lines += [f"{words.ranks(ranks)} came to {site} from {caller}" for caller, ranks in list(told.items())[:4]]
    return tuple(lines)
