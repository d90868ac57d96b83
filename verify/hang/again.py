"""A second look at a job of which the first told only that it had moved a moment ago: it goes on, or it does not.

Nobody who asks about a job has to ask twice: what a rank that moved a moment ago does next is known some seconds later.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify import words
from verify.blame import Certainty, Class, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.hang.diagnosis import Diagnosis
    from verify.readers.found import Found

EVERY_S: Final = 0.5
LONGEST_S: Final = 6.0
"""A little more than the silence after which no rank counts as one that moved a moment ago. Looks themselves count: one
at the stacks of processes takes longer than the pause before it.
"""
BRIEF_S: Final = 3.5
"""The same where processes alone are looked at, which count as still after a shorter silence."""


def settled(
    found: Found,
    read: Callable[[], Found],
    judge: Callable[[Found], Diagnosis],
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    longest_s: float = LONGEST_S,
) -> tuple[Found, Diagnosis]:
    """The evidence that decides, and its diagnosis: the first where that is decided, or nobody moved a moment ago.

    read: gathers the evidence anew. longest_s: seconds that all further looks may take together, the last one aside.
    Returns as soon as every rank has gone on, or nobody is on the move any more.
    """
    diagnosis, first = judge(found), found
    spent_s = 0.0
    while spent_s < longest_s and diagnosis.verdict.certainty is Certainty.UNDECIDED and found.lively:
        began = clock()
        sleep(EVERY_S)
        found = read()
        diagnosis = judge(found)
        spent_s += max(EVERY_S, clock() - began)
        if diagnosis.verdict.certainty is Certainty.UNDECIDED and _went_on(first, found):
            diagnosis = replace(diagnosis, verdict=_well(first, found), unknown=())
    return found, diagnosis


def _went_on(first: Found, later: Found) -> bool:
    """Whether no rank stands still, and events have come since the first look."""
    moving = later.present <= later.lively and later.present >= first.present
    return moving and later.moved_ns is not None and first.moved_ns is not None and later.moved_ns > first.moved_ns


def _well(first: Found, found: Found) -> Verdict:
    since = words.seconds(((found.moved_ns or 0) - (first.moved_ns or 0)) / 1e9, 1)
    who = "every rank goes" if len(found.present) > 1 else f"{words.ranks(found.present)} goes"
    return Verdict(Class.NONE, say=f"No alarm: {who} on, as this look of {since} saw.")
