"""How threads move, and what that leaves of a finding: a ring that another thread may open, a wait that ends by itself,
a stack that shows a rank elsewhere than its record does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import networkx as nx

from verify import words
from verify.blame import Certainty, Class, Verdict, shortest_cycle
from verify.hang.case import unattended
from verify.hang.idling import By, idles, sleeps
from verify.hang.stacks import At, places_of
from verify.live.outside import WHO, beyond
from verify.matching import Standing
from verify.readers.told import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.hang.case import Case
    from verify.live.threads import Moves
    from verify.matching import Meeting

HELD: Final = re.compile(r"interpreter lock|stop signal")
"""What keeps a process whatever its main thread waits for, by a clock or not."""
STOPPED: Final = "stop signal"
CLOCK: Final = "the clock"
"""How a wait begins that ends by itself whatever else may end it (`Moves.main`)."""


def another_thread_may_call(case: Case) -> Verdict | None:
    """A ring of waits, where a rank has threads that the evidence does not show: a thread that has made no call yet is
    in no record and in no dump. Whoever made the earlier calls of a group is expected to make the next one; of a group
    that is used for the first time, what the processes do now may tell.
    """
    verdict, graph = case.verdict, case.graph
    if verdict.cls is not Class.CYCLE or not case.core:
        return None
    if verdict.certainty is Certainty.UNDECIDED:
        return _with_others(case)
    nodes = shortest_cycle(graph.subgraph(case.core))
    lacking = {(actor[1], op[1][0]) for op, actor in pairwise([*nodes, *nodes[:1]]) if op[0] == "op"}
    lacking = {(rank, channel) for rank, channel in lacking if not channel.name.startswith("?")}
    stuck = case.hosts(Standing.BLOCKED)
    lacking -= {(host.rank, channel) for host in stuck for channel in host.made}
    seen = case.look({rank for rank, _ in lacking})
    blocked = {host.rank for host in stuck if not host.thread}
    for rank, now in sorted(seen.items()):
        main = "" if rank in blocked else _main_may(now)
        if now.others or main:
            what = now.others[0] if now.others else f"its main thread, which {main}"
            ring = f"else {words.ring(verdict.say)}"
            return verdict.undecided(f"rank {rank} has {what}, and that may make the call that is missing; {ring}")
    made = {(host.rank, channel) for host in case.situation.hosts for channel in host.made}
    unseen = sorted({rank for rank, channel in lacking - made if rank not in seen})
    if not unseen or any(host.presumed for host in stuck if host.rank in unseen):
        return None
    return verdict.only_if(f"no thread of {words.ranks(unseen)} that made no call so far makes the one that is missing")


def _with_others(case: Case) -> Verdict | None:
    """A ring in doubt for threads that the evidence does not show, with what these do where they can be seen."""
    ring = {node[1] for node in case.core if node[0] == "host"}
    seen = case.look(ring)
    lines = [f"rank {rank} has {seen[rank].others[0]}" for rank in sorted(ring & seen.keys()) if seen[rank].others]
    lines = [line for line in lines if line not in case.verdict.chain]
    return replace(case.verdict, chain=(*case.verdict.chain, *lines)) if lines else None


def _main_may(now: Moves) -> str:
    """What a main thread that is in no call does, if it may come; "" where only threads of its process let it go."""
    if now.main:
        return f"waits for {now.main}"
    if now.locked or not now.pid:
        return ""
    outside = now.outside or beyond(now.pid)
    if outside is not None and outside.holders == frozenset({now.pid}):
        return ""
    return "waits for no other thread of it"


def stacks_contradict_it(case: Case) -> Verdict | None:
    """A rank that is said to wait in a call, while its main thread stands, or moves, elsewhere."""
    verdict = case.verdict
    if verdict.cls is not Class.CYCLE or verdict.certainty is Certainty.UNDECIDED:
        return None
    ring = {node[1] for node in case.core if node[0] == "host" and not node[2]}
    mine = places_of(replace(case.found, lively=frozenset()))
    for rank in sorted(ring & mine.keys()):
        place = mine[rank]
        if place.at in (At.OUTSIDE, At.RUNNING):
            how = "runs" if place.at is At.RUNNING else "stands"
            where = f"rank {rank} {how} in {place.what} at {place.spot}, by its stack, and waits in no call"
            return verdict.undecided(f"{where}; without that {words.ring(verdict.say)}")
    return None


def its_wait_may_end(case: Case) -> Verdict | None:
    """Outside of calls: what keeps a rank there may end, by the clock, by another thread of it, by another process, or
    by whoever comes. That it lasts is certain only where all are known who could end it, and are stuck themselves.
    """
    verdict = case.verdict
    if verdict.cls is not Class.OUTSIDE or verdict.certainty is Certainty.UNDECIDED:
        return None
    if early := case.found.lively.intersection(verdict.ranks):
        return verdict.undecided(f"{words.ranks(early)} moved a moment ago, and may be about to go on")
    seen = case.look(case.everybody)
    doubts = [why for rank in verdict.ranks if (why := _unless(case, rank, seen))]
    if doubts:
        return verdict.only_if(" and ".join(doubts[:2]))
    known = [(rank, now.outside) for rank in verdict.ranks if (now := seen.get(rank)) and now.outside is not None]
    lines = [
        f"whoever could end the wait of rank {rank} is stuck as well: {outside.unless.replace(WHO, f'rank {rank}')}"
        for rank, outside in known
    ]
    return replace(verdict, chain=(*verdict.chain, *lines)) if lines else None


def _unless(case: Case, rank: int, seen: Mapping[int, Moves]) -> str:
    """What must not happen for a rank to stay where it is outside of calls, as a clause; "" where nothing can."""
    now, place = seen.get(rank), case.where.get(rank)
    if now is not None and place is not None and place.thread and place.tid is not None:
        # Its main thread waits for that one.
        apart = beyond(now.pid, place.tid)
        if apart is not None:
            return apart.unless.replace(WHO, f"rank {rank}")
    what = next((h.event.operation for h in case.hosts(Standing.OUTSIDE) if h.rank == rank and h.event is not None), "")
    if NO_ANSWER in what:
        return ""  # its run has given up on it
    lasts = f"rank {rank} does not come out of {what or 'what it is in'}"
    if STOPPED in what:
        return f"nobody lets rank {rank} go on (kill -CONT, or the debugger)"
    if HELD.search(what):
        return lasts
    if now is None:
        return f"rank {rank} does not come when its sleep ends" if sleeps(what) else lasts
    ends = f"rank {rank} does not come when its wait ends by {now.main}" if now.main else ""
    if now.main.startswith(CLOCK):
        return ends
    outside = now.outside
    if outside is not None and not (now.others and outside.holders == frozenset({now.pid})):
        stuck = outside.holders is not None and all(_is_stuck(case, rank, pid, seen) for pid in outside.holders)
        return ends if stuck else outside.unless.replace(WHO, f"rank {rank}")
    if ends:
        return ends
    if now.others and (outside is not None or now.locked or now.polls):
        return f"rank {rank} is not let go on by another thread of it: it has {now.others[0]}"
    return "" if now.locked else lasts


def _is_stuck(case: Case, rank: int, pid: int, seen: Mapping[int, Moves]) -> bool:
    """Whether the process `pid` is that of `rank`, or of one that is stuck before that comes, and no other thread of it
    moves.
    """
    other = next((each for each, now in seen.items() if now.pid == pid and not now.others), None)
    return other is not None and (other == rank or _lacks(case, other, rank))


def _lacks(case: Case, other: int, rank: int) -> bool:
    """Whether `other` waits in a call that `rank` is missing from, itself or by way of further ranks."""
    if unattended(case.situation, other):
        return False
    # Of waits of which all must end, one that lasts is enough; of those of which any may, it is not.
    graph = case.graph.subgraph([node for node in case.graph if case.graph.nodes[node].get("mode") != "or"])
    one, end = ("host", other, ""), ("host", rank, "")
    return one in graph and end in graph and nx.has_path(graph, one, end)


def a_call_of_it_may_let_it_go(case: Case) -> Verdict | None:
    """A rank that stands elsewhere for good as far as its threads go, but has a call open that may end: what is chained
    to it, as a callback of its future, then runs on a thread of torch, and may let the rank go on.
    """
    verdict = case.verdict
    if verdict.cls not in (Class.MISSING, Class.OUTSIDE) or verdict.certainty is not Certainty.CERTAIN:
        return None
    left = {host.rank for host in case.situation.hosts if host.standing in (Standing.EXITED, Standing.RAISED)}
    seen = case.look(case.everybody) if case.found.whole.intersection(verdict.ranks) else {}
    for rank in sorted(case.found.whole.intersection(verdict.ranks) - left):
        for launch in unattended(case.situation, rank):
            if not any(_never_ends(case, meeting, rank, seen) for meeting in launch.meetings):
                what = words.operation(launch.meetings[0])
                return verdict.only_if(f"the end of {what}, which rank {rank} has open, does not let it go on")
    return None


def _never_ends(case: Case, meeting: Meeting, rank: int, seen: Mapping[int, Moves]) -> bool:
    """Whether a call lacks a member that is stuck before `rank` comes."""
    lacking = {seat[0] for seat in meeting.seats if seat not in meeting.arrived}
    return any(other in seen and not seen[other].others and _lacks(case, other, rank) for other in lacking)


def it_waits_for_itself(case: Case) -> Verdict | None:
    """A rank that waits for an event, a queue, a thread or the clock is blocked by nothing outside: it is missing, as
    the same rank is where only its record is at hand.
    """
    verdict, where = case.verdict, case.where
    if verdict.cls is not Class.OUTSIDE or verdict.certainty is Certainty.UNDECIDED:
        return None
    idle = [rank for rank in verdict.ranks if rank in where and idles(where[rank].what) is By.OWN]
    return replace(verdict, cls=Class.MISSING, fix=words.THROUGH) if len(idle) == len(verdict.ranks) else None
