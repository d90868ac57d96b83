"""A rank that waits in its own process for what the end of a call of it brings: a callback of a future sets an event.

Whoever keeps that call keeps the rank, and everybody who waits for the rank in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from verify import words
from verify.blame import Certainty, Class, judge
from verify.hang.case import unattended
from verify.hang.idling import may_need_a_call
from verify.hang.stacks import At
from verify.matching import Standing

if TYPE_CHECKING:
    from verify.hang.case import Case
    from verify.matching import Host, Launch

APART = (Standing.ELSEWHERE, Standing.OUTSIDE)


def whoever_keeps_its_call(case: Case) -> Case | None:
    """A rank that is missing, or blocked outside, and that only the end of a call of its own can let go on: a member
    that this call lacks is to blame in its place.
    """
    verdict = case.verdict
    if verdict.cls not in (Class.MISSING, Class.OUTSIDE) or verdict.certainty is Certainty.UNDECIDED:
        return None
    held: dict[int, tuple[Host, tuple[Launch, ...]]] = {}
    for host in case.situation.hosts:
        if host.rank not in verdict.ranks or host.thread or host.standing not in APART:
            continue
        calls = unattended(case.situation, host.rank)
        if calls and all(_lacks(launch) for launch in calls) and _only_calls(case, host.rank):
            held[id(host)] = host, tuple(calls)
    if not held:
        return None
    hosts = [
        replace(host, standing=Standing.BLOCKED, waits=held[id(host)][1], any_of=len(held[id(host)][1]) > 1)
        if id(host) in held
        else host
        for host in case.situation.hosts
    ]
    onward = case.in_(replace(case.situation, hosts=hosts))
    found = judge(onward.situation, onward.graph, set(onward.core))
    kept = {host.rank for host, _ in held.values()}
    if found.cls not in (Class.EXCEPTION, Class.MISSING, Class.OUTSIDE) or not set(found.ranks) - kept:
        return None
    told = [
        f"rank {host.rank} waits for the end of {words.operation(calls[0].meetings[0])}, which it has open"
        for host, calls in held.values()
    ]
    found = replace(found, chain=(*found.chain, *verdict.chain))
    return replace(onward, verdict=found.only_if(" and ".join(told[:3])))


def _lacks(launch: Launch) -> bool:
    """Whether another rank has yet to come to a call."""
    return any(
        seat[0] != launch.rank and seat not in meeting.arrived for meeting in launch.meetings for seat in meeting.seats
    )


def _only_calls(case: Case, rank: int) -> bool:
    """Whether nothing else lets a rank go on: as its process shows, or else its stack."""
    now = case.look({rank}).get(rank)
    if now is not None:
        return now.closed
    place = case.where.get(rank)
    return place is not None and place.at is At.OUTSIDE and may_need_a_call(place.what)
