"""Ranks that left inside a call: what they were in can never end, and where its calls differ, that is what ended them.

A backend that meets data of another size than it expects lets one side finish and ends the other (gloo aborts it), so
that the fault looks like a death. And a rank that is killed inside a call keeps everybody there, whoever has yet to
come: that one's being slow is no fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kernel.record.foreign import HOST_MEDIA
from verify import words
from verify.arguments import misfit_of
from verify.blame import Class, Verdict, awaited, left_inside, mismatch, place, sides_of_all
from verify.matching import Standing
from verify.readers.found import REFUSED_DATA

if TYPE_CHECKING:
    from verify.hang.case import Case
    from verify.matching import Meeting

SURELY: Final = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Ends that no watchdog gives a process of its own."""


FOR_EVER: Final = "That call can never end, whoever else is still to come."


def left_in_a_call_that_differs(case: Case) -> Case | None:
    """A rank that left inside a call whose arguments are not those of its peers, whether these have finished it."""
    verdict = case.verdict
    gone = {host.rank for host in case.situation.hosts if host.standing is Standing.RAISED and not host.thread}
    inside: dict[int, tuple[Meeting, Verdict]] = {}
    for meeting in sorted(case.situation.meetings.values(), key=place) if gone else ():
        ranks = [
            seat[0]
            for seat, (launch, call) in meeting.arrived.items()
            if seat[0] in gone and (not launch.done or call.failed)
        ]
        if ranks and (wrong := _differs(meeting)) is not None:
            inside |= {rank: (meeting, wrong) for rank in ranks if rank not in inside}
    if not inside:
        return None
    if verdict.cls is Class.EXCEPTION and not inside.keys() & set(verdict.ranks):
        return None
    first = min((meeting for meeting, _ in inside.values()), key=place)
    wrong = next(found for meeting, found in inside.values() if meeting is first)
    if verdict.cls is Class.MISMATCH and verdict.say != wrong.say:
        return None
    ranks = sorted(rank for rank, (meeting, _) in inside.items() if meeting is first)
    line = f"{words.ranks(ranks)} left inside it, which a backend may do that gets other data than it expects"
    return replace(case, verdict=replace(wrong, chain=(*wrong.chain, line)))


def _differs(meeting: Meeting) -> Verdict | None:
    return mismatch([meeting], sides_of_all) if not meeting.agrees() else misfit_of(meeting)


def data_that_was_refused(case: Case) -> Case | None:
    """What gloo says where it gets more data of another rank than its own call has room for."""
    if case.verdict.cls is Class.MISMATCH and not case.verdict.condition:
        return None
    told = sorted((rank, text) for rank, text in case.found.remarks if text.startswith(REFUSED_DATA))
    if not told:
        return None
    lines = tuple(dict.fromkeys(f"{f'rank {rank}' if rank >= 0 else 'a rank'} {text}" for rank, text in told))
    say = f"Calls that meet differ in size, or are not the same call, as gloo says: {lines[0]}."
    return replace(case, verdict=Verdict(Class.MISMATCH, chain=lines[:8], say=say, fix=words.FIXES["mismatch"]))


def left_in_the_middle(case: Case) -> Case | None:
    """A rank that is known to be gone with an open call for which others wait: they wait for ever, whoever is still to
    come. Of a device, a rank may have been ended by its own watchdog, as the one that is missing did not come.
    """
    verdict = case.verdict
    if verdict.cls in (Class.EXCEPTION, Class.MISMATCH):
        return None
    needed = awaited(case.graph)
    meetings = [data["meeting"] for node, data in case.graph.nodes(data=True) if node[0] == "op" and node in needed]
    found = left_inside(sorted((each for each in meetings if _recorded(case, each)), key=place), case.situation)
    if found is None:
        return None
    return replace(case, verdict=replace(found, say=f"{found.say} {FOR_EVER}"))


def _recorded(case: Case, meeting: Meeting) -> bool:
    """Whether those who left inside a call were seen to do so by their own records, and for nobody's being late."""
    left = {host.rank: host for host in case.situation.hosts if host.standing is Standing.RAISED and not host.thread}
    for seat, (launch, call) in meeting.arrived.items():
        host = left.get(seat[0])
        if host is None or launch.done:
            continue
        how = host.event.operation if host.event is not None else ""
        if seat[0] not in case.found.whole:
            return False
        if call.medium not in HOST_MEDIA and not any(name in how for name in SURELY):
            return False
    return True
