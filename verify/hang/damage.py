"""What may not be concluded where a ring has lost events: that its rank has not called what others wait in, or waits
where its last readable event shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from verify import words
from verify.blame import Certainty, Class, Verdict
from verify.matching import Standing

if TYPE_CHECKING:
    from verify.hang.case import Case
    from verify.readers.found import Damage, Found


def lost_of(found: Found) -> frozenset[tuple[int, str]]:
    """Ranks and groups in which a damaged ring may have held calls: all that any rank names."""
    names = {call.communicator.name for event in found.events for call in event.calls if call.communicator is not None}
    return frozenset((each.rank, name) for each in found.damaged if each.newest for name in names)


def its_ring_is_damaged(case: Case) -> Verdict | None:
    """Nobody is blamed for what a ring has lost, nor is a rank that stands with it in a call that is not over."""
    verdict, damaged = case.verdict, case.found.damaged
    if not damaged or verdict.certainty is Certainty.UNDECIDED:
        return None
    near = _near(case)
    left = {host.rank for host in case.situation.hosts if host.standing in (Standing.RAISED, Standing.EXITED)}
    hidden = [
        each
        for each in damaged
        if (each.rank in near and each.newest) or (each.rank in verdict.ranks and each.rank not in left)
    ]
    if not hidden:
        return None
    rings = " and the ".join(told(each) for each in hidden[:3])
    more = f", with {len(hidden) - 3} more" if len(hidden) > 3 else ""
    nothing = replace(verdict, chain=(), fix=words.DECIDE)
    return nothing.undecided(f"the {rings}{more}: what it called after that, and where it waits, may be lost")


def told(damage: Damage) -> str:
    """Which ring is damaged, and how."""
    return f"ring of rank {damage.rank} is damaged ({damage.what})"


def _near(case: Case) -> set[int]:
    """Ranks that have to do with the verdict: members of calls that are not over or that differ; all, where nothing is
    said to be wrong.
    """
    if case.verdict.cls is Class.NONE:
        return set(case.everybody)
    return set(case.verdict.ranks) | {
        seat[0]
        for meeting in case.situation.meetings.values()
        if not meeting.agrees() or any(not launch.done for launch, _ in meeting.arrived.values())
        for seat in meeting.seats
    }
