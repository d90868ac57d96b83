"""What evidence of one moment leaves open: whether a rank never comes or has not come yet, and what it does meanwhile
where no evidence would show it.

A dump, a stack or the log of launches of a job that works looks like one of a job that hangs, taken at the right
moment. That a wait is not one for a rank that is merely slow is known where a call has waited for as long as it may
(`Found.overdue`), where the rank has left, and from a record of everything, which has rules of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify import words
from verify.blame import Certainty, Class, Verdict
from verify.hang.stacks import At
from verify.matching import Standing

if TYPE_CHECKING:
    from verify.hang.case import Case

OF_A_MOMENT: Final = frozenset({Class.MISSING, Class.OUTSIDE, Class.DEVICE_STALL})
"""Findings that the next moment may take back."""
UNHEARD: Final = "which Flight Recorder on gloo does not record"


def nothing_shows_it_is_late(case: Case) -> Verdict | None:
    """A rank that others wait for, which may yet come, or a device that may yet finish."""
    verdict = case.verdict
    if verdict.cls not in OF_A_MOMENT or verdict.certainty is not Certainty.CERTAIN or not verdict.ranks:
        return None
    blamed = set(verdict.ranks)
    left = {host.rank for host in case.situation.hosts if host.standing in (Standing.EXITED, Standing.RAISED)}
    one = len(blamed) == 1
    conditions = []
    if verdict.cls is Class.MISSING and (mute := blamed & case.found.deaf - left - _seen_elsewhere(case)):
        conditions.append(f"{words.ranks(mute)} {'waits' if len(mute) == 1 else 'wait'} in no send or recv, {UNHEARD}")
    if not (blamed & left or blamed <= case.found.whole or set(case.open_ranks) & case.found.overdue):
        who = "" if conditions and mute == blamed else f"{words.ranks(blamed)} "
        what = "finish it" if verdict.cls is Class.DEVICE_STALL else "come"
        limit = f" ({case.found.timeout_s:g} s)" if case.found.timeout_s else ""
        unshown = f"no call here is known to have outlasted its timeout{limit}"
        conditions.append(f"{who}{'does' if one else 'do'} not {what} any more: {unshown}; {LOOK}")
    if not conditions:
        return None
    fix = words.LATE if verdict.fix == words.FIXES["missing"] else verdict.fix
    return replace(verdict, certainty=Certainty.CONDITIONAL, condition=", and ".join(conditions), fix=fix)


LOOK: Final = "dump again, or look for timeouts in the logs"


def its_transfers_are_not_seen(case: Case) -> Verdict | None:
    """No all-clear for ranks that may wait for one another in sends and receives, which their dumps never hold."""
    mute = case.found.deaf - _seen_elsewhere(case)
    if not mute:
        return None
    may = f"{words.ranks(mute)} may wait in a send or recv, {UNHEARD}"
    return case.verdict.undecided(f"no collective is open, but {may}: the stacks of all ranks tell")


def _seen_elsewhere(case: Case) -> set[int]:
    """Ranks whose main thread is seen to be in no call."""
    return {rank for rank, place in case.where.items() if place.at in (At.OUTSIDE, At.STORE)}
