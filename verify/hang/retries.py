"""Calls that failed for want of a member: nobody waits in them any more, as each raised an exception that the program
caught, to try again or to go on. Whoever has not come to the first of them is what the others lack.

The one that failed is put back as if its rank still waited in it, and what judges open calls judges it: whether the
member left, is blocked, or may yet come.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from verify import words
from verify.blame import Certainty, Class, absent, judge
from verify.events import Event, Kind, State
from verify.evidence import situation_of
from verify.hang.stacks import standings
from verify.matching import Standing

if TYPE_CHECKING:
    from verify.hang.case import Case
    from verify.matching import Channel, Launch, Meeting

WANTS: Final = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "remote peer",
                "socket closed", "failed to pass monitoredbarrier")  # fmt: skip
"""What an exception of a call says, in small letters, that may come of a member's absence."""
UNREACHED: Final = "timed out connecting"
"""What it says where hosts cannot be reached: a fault of the network."""
LEFT: Final = (Standing.EXITED, Standing.RAISED)


class Failed(NamedTuple):
    """Calls of one rank on one channel that failed, one after the other, up to its newest one there."""

    launches: tuple[Launch, ...]
    meeting: Meeting
    """That of the first one."""

    @property
    def rank(self) -> int:
        """Whose they are."""
        return self.launches[0].rank


def calls_that_lacked_a_member(case: Case) -> Case | None:
    """Nobody waits for another, but calls of ranks that live on have failed, and a member has not come to them."""
    verdict, graph = case.verdict, case.graph
    if verdict.cls not in (Class.NONE, Class.OUTSIDE):
        return None
    if any(node[0] == "host" and graph.in_degree(node) for node in graph):
        return None
    hosts = {host.rank: host for host in case.situation.hosts if not host.thread}
    here = [rank for rank in case.situation.launches if rank in hosts and hosts[rank].standing not in LEFT]
    failed = [each for rank in here for each in _failures(case, rank)]
    lacked = [(each, absent_) for each in failed if (absent_ := _lacking(case, each.meeting))]
    if not lacked:
        return None
    first, missing = min(lacked, key=lambda each: (each[0].meeting.key, each[0].rank))
    blamed = {rank: hosts[rank] for rank in missing if rank in hosts}
    if missing & case.found.lively or len(blamed) < len(missing):
        return None
    waiting = [each for each, _ in lacked if each.meeting is first.meeting]
    again = _reopened(case, waiting)
    found = judge(again.situation, again.graph, set(again.core))
    if found.cls not in (Class.MISSING, Class.OUTSIDE, Class.EXCEPTION) or not found.ranks:
        return None
    hosts_now = [host for host in again.situation.hosts if host.rank in found.ranks and not host.thread]
    who = absent(found.cls, hosts_now, again.graph)
    call = first.launches[0].event
    operation = words.operation(first.meeting)
    tried = max(len(each.launches) for each in waiting)
    more = f" {tried} times, one after the other" if tried > 1 else ""
    failing = words.ranks(each.rank for each in waiting)
    say = f"{operation} failed on {failing}{words.at(call)}{more}, for want of {words.standings(hosts_now)}"
    raised = f"{failing}: {words.brief(call.failed)}"
    # Before what is said of a rank that others wait for, which nobody does.
    chain = (say, raised, *(line for line in who.chain if words.operation(first.meeting) not in line))
    found = replace(found, say=f"{say[0].upper()}{say[1:]}.", chain=chain)
    if found.certainty is Certainty.CERTAIN and tried == 1:
        needs = "still needs" if len(waiting) == 1 else "still need"
        found = replace(
            found, certainty=Certainty.CONDITIONAL, condition=f"{failing} {needs} that call, which is not open any more"
        )
    return replace(again, verdict=found)


def _failures(case: Case, rank: int) -> list[Failed]:
    """The failed calls at the end of what a rank called on each channel of a whole group."""
    mine: dict[Channel, list[tuple[Launch, Meeting]]] = {}
    for launch in case.situation.launches[rank]:
        for meeting in launch.meetings:
            if meeting.key[0].kind == "collective" and launch.order >= 0:
                mine.setdefault(meeting.key[0], []).append((launch, meeting))
    found = []
    for calls in mine.values():
        tail: list[tuple[Launch, Meeting]] = []
        for launch, meeting in reversed(calls):
            if not _wanted(launch.event):
                break
            tail.append((launch, meeting))
        # What others came to is a failure of its own; the first one that lacks a member begins the story.
        tail = [each for each in tail[::-1] if _lacking(case, each[1])]
        if tail:
            found.append(Failed(tuple(launch for launch, _ in tail), tail[0][1]))
    return found


def _wanted(call: Event) -> bool:
    text = call.failed.lower()
    return UNREACHED not in text and any(word in text for word in WANTS)


def _lacking(case: Case, meeting: Meeting) -> frozenset[int]:
    """The members that have not come to it, by their own evidence."""
    name = meeting.key[0].name
    lacking = {seat[0] for seat in meeting.seats if seat not in meeting.arrived}
    return frozenset(rank for rank in lacking & case.found.present if (rank, name) not in case.found.unsure)


def _reopened(case: Case, failed: list[Failed]) -> Case:
    """As if these ranks still waited in the first of their calls that failed."""
    firsts = {id(each.launches[0].event) for each in failed}
    ranks = {each.rank for each in failed}
    found = case.found
    events = [replace(each, state=State.SCHEDULED) if id(each) in firsts else each for each in found.events]
    places = {rank: place for rank, place in case.where.items() if rank not in case.known | ranks}
    told = standings(found.events, places)
    first = [each.launches[0].event for each in failed]
    waits = [
        Event(each.rank, Kind.WAIT, thread=each.thread, streams=each.queues, site=each.site, state=State.STARTED)
        for each in first
    ]
    return case.in_(situation_of([*events, *told, *waits], case.everybody, case.quiet, found.present, found.unsure))
