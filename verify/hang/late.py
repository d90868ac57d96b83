"""What evidence of one moment leaves open: whether a rank never comes or has not come yet, and what it does meanwhile
where no evidence would show it.

A dump, a stack or the log of launches of a job that works looks like one of a job that hangs, taken at the right
moment. That a wait is not one for a rank that is merely slow is known where a call has waited for as long as it may
(`Found.overdue`) and the rank's own evidence is not of before that (`Found.earlier`), where it has left, and from a
record of everything, which has rules of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify import words
from verify.blame import Certainty, Class, Verdict
from verify.events import Kind
from verify.hang.stacks import At, places_of
from verify.matching import Standing

if TYPE_CHECKING:
    from collections.abc import Collection

    from verify.events import Site
    from verify.hang.case import Case
    from verify.matching import Host
    from verify.readers.found import Found

OF_A_MOMENT: Final = frozenset({Class.MISSING, Class.OUTSIDE, Class.DEVICE_STALL})
"""Findings that the next moment may take back."""
UNREACHED: Final = "perhaps before any call here had outlasted its timeout"
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
    # A record of everything tells what a host waits for, and not how long a device may take.
    told = blamed <= case.found.whole and verdict.cls is not Class.DEVICE_STALL
    if not (blamed & left or told or set(case.open_ranks) & case.found.overdue):
        who = "" if conditions and mute == blamed else f"{words.ranks(blamed)} "
        what = "finish it" if verdict.cls is Class.DEVICE_STALL else "come"
        limit = f" ({case.found.timeout_s:g} s)" if case.found.timeout_s else ""
        unshown = f"no call here is known to have outlasted its timeout{limit}; {LOOK}"
        if evidence_of(case.found, blamed) == RECORD:
            unshown = f"{'its record does' if one else 'their records do'} not hold all calls; look again"
        conditions.append(f"{who}{'does' if one else 'do'} not {what} any more: {unshown}")
    elif not told and (old := blamed & case.found.earlier - left):
        stands = "still stands where its dump shows it" if len(old) == 1 else "still stand where their dumps show them"
        conditions.append(f"{words.ranks(old)} {stands}, {UNREACHED}; dump all ranks at one moment")
    if not conditions:
        return None
    fix = words.LATE if verdict.fix == words.FIXES["missing"] else verdict.fix
    return replace(verdict, certainty=Certainty.CONDITIONAL, condition=", and ".join(conditions), fix=fix)


def it_may_only_be_slow(case: Case) -> Verdict | None:
    """A call that all members are in may go on, whatever the medium: it moves much data, or one of them, as its stack
    shows, does something else inside of it first.
    """
    verdict = case.verdict
    if verdict.cls is not Class.BELOW or verdict.certainty is not Certainty.CERTAIN:
        return None
    ranks = set(case.open_ranks)
    if ranks & case.found.overdue:
        return None
    mine = places_of(replace(case.found, lively=frozenset()))
    shown = [
        f"{place.who} {'runs' if place.at is At.RUNNING else 'stands'} in {place.what} at {place.spot}, inside of it"
        for rank, place in sorted(mine.items())
        if rank in ranks and place.at in (At.OUTSIDE, At.RUNNING)
    ]
    waited = dict(case.found.waited)
    if ranks and ranks <= waited.keys():
        since = min(waited[rank] for rank in ranks)
        shown.append(f"the last of them has been in it for {words.seconds(since, 1)}")
    limit = f" ({case.found.timeout_s:g} s)" if case.found.timeout_s else ""
    shown.append(f"no call here is known to have outlasted its timeout{limit}")
    slow = verdict.only_if(f"it is not just slow: {'; '.join(shown[:4])}")
    return replace(slow, fix=words.SLOW, say=slow.plain)


LOOK: Final = "dump again, or look for timeouts in the logs"
RECORD: Final = "record"


def evidence_of(found: Found, ranks: Collection[int]) -> str:
    """What there is of the calls of some ranks: a record, a dump, or a log."""
    if found.recorded.issuperset(ranks):
        return RECORD
    return "log" if found.loose else "dump"


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


def dumps_and_stacks_are_of_two_moments(case: Case) -> Verdict | None:
    """A ring of which the dumps tell what is open, and the stacks that hosts wait: what was open may have ended when
    the stacks were taken, unless each stack stands in the call that is open.
    """
    verdict = case.verdict
    if verdict.cls is not Class.CYCLE or verdict.certainty is not Certainty.CERTAIN:
        return None
    ring = {node for node in case.core if node[0] == "host"}
    joined = [
        f"the main thread of rank {rank} waits for its thread {place.thread}"
        for rank, place in sorted(case.where.items())
        if place.thread and rank not in case.known and ("host", rank, "") in ring
    ]
    if joined:
        return verdict.only_if(" and ".join(joined))
    loose = {
        host.rank
        for host in case.situation.hosts
        if ("host", host.rank, host.thread) in ring and not host.presumed and _by_its_stack(case, host)
    }
    if not loose or loose <= case.found.overdue:
        return None
    return verdict.only_if(f"the stacks of {words.ranks(loose)} are of the moment of their dumps")


def _by_its_stack(case: Case, host: Host) -> bool:
    """Whether only a stack says that a host waits, and not all that it has open was called where it stands."""
    place, event = case.where.get(host.rank), host.event
    if host.thread or place is None or host.rank in case.known or event is None or event.kind is not Kind.WAIT:
        return False
    lines = {_line(one.event.site) for one in host.waits}
    return lines != {_line(place.site)}


def _line(site: Site | None) -> tuple[str, int] | None:
    """A line of the program, whether its file was told with its folder or without."""
    return None if site is None else (site.file.rpartition("/")[2], site.line)
