"""How threads move, and what that leaves of a finding: a ring that another thread may open, a wait that ends by itself,
a stack that shows a rank elsewhere than its record does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from verify import words
from verify.blame import Certainty, Class, Verdict, shortest_cycle
from verify.hang.stacks import At, places
from verify.live.threads import Moves
from verify.matching import Standing

if TYPE_CHECKING:
    from verify.hang.case import Case

OWN_WAIT: Final = re.compile(
    r"^(?!Popen|subprocess)(.*\.)?(wait|wait_for|get|join|_wait_for_tstate_lock|result|sleep|time_sleep|run_forever)$|"
    r"^a sleep$"
)
"""Of these, what waits for another thread of its own process, or for the clock: nothing outside blocks it."""
HELD: Final = re.compile(r"interpreter lock|stop signal")
"""What keeps a process whatever its main thread waits for, by a clock or not."""
FROM_WITHIN: Final = re.compile(rf"{OWN_WAIT.pattern}|(^|\.)(select|poll|epoll)$")
"""The same, and the wait of an event loop."""
SLEEP: Final = re.compile(r"(^|\.|a )(time_)?sleep$")


def another_thread_may_call(case: Case) -> Verdict | None:
    """A ring of waits, where a rank has threads that the evidence does not show: a thread that has made no call yet is
    in no record and in no dump. Whoever made the earlier calls of a group is expected to make the next one; of a group
    that is used for the first time, what the processes do now may tell.
    """
    verdict, graph = case.verdict, case.graph
    if verdict.cls is not Class.CYCLE or verdict.certainty is Certainty.UNDECIDED or not case.core:
        return None
    nodes = shortest_cycle(graph.subgraph(case.core))
    lacking = {(actor[1], op[1][0]) for op, actor in pairwise([*nodes, *nodes[:1]]) if op[0] == "op"}
    lacking = {(rank, channel) for rank, channel in lacking if not channel.name.startswith("?")}
    stuck = case.hosts(Standing.BLOCKED)
    lacking -= {(host.rank, channel) for host in stuck for channel in host.made}
    seen = case.look({rank for rank, _ in lacking})
    blocked = {host.rank for host in stuck if not host.thread}
    for rank, now in sorted(seen.items()):
        if now.others or (now.main and rank not in blocked):
            what = now.others[0] if now.others else f"its main thread, which waits for {now.main}"
            ring = f"else {words.ring(verdict.say)}"
            return verdict.undecided(f"rank {rank} has {what}, and that may make the call that is missing; {ring}")
    made = {(host.rank, channel) for host in case.situation.hosts for channel in host.made}
    unseen = sorted({rank for rank, channel in lacking - made if rank not in seen})
    if not unseen or any(host.presumed for host in stuck if host.rank in unseen):
        return None
    return verdict.only_if(f"no thread of {words.ranks(unseen)} that made no call so far makes the one that is missing")


def stacks_contradict_it(case: Case) -> Verdict | None:
    """A rank that is said to wait in a call, while its main thread stands, or moves, elsewhere."""
    verdict = case.verdict
    if verdict.cls is not Class.CYCLE or verdict.certainty is Certainty.UNDECIDED:
        return None
    ring = {node[1] for node in case.core if node[0] == "host" and not node[2]}
    mine = places(case.found.stacks, recorded=case.found.whole)
    for rank in sorted(ring & mine.keys()):
        place = mine[rank]
        if place.at in (At.OUTSIDE, At.RUNNING):
            how = "runs" if place.at is At.RUNNING else "stands"
            where = f"rank {rank} {how} in {place.what} at {place.site}, by its stack, and waits in no call"
            return verdict.undecided(f"{where}; without that {words.ring(verdict.say)}")
    return None


def its_wait_may_end(case: Case) -> Verdict | None:
    """Outside of calls, but in a wait that ends by the clock, or when another thread or process has done its work."""
    verdict = case.verdict
    if verdict.cls is not Class.OUTSIDE or verdict.certainty is Certainty.UNDECIDED:
        return None
    if any(HELD.search(host.event.operation) for host in case.hosts(Standing.OUTSIDE) if host.event is not None):
        return None
    seen = case.look(verdict.ranks)
    for rank in verdict.ranks:
        now, place = seen.get(rank, Moves(locked=False)), case.where.get(rank)
        if now.main:
            return verdict.only_if(f"rank {rank} does not come when its wait ends by {now.main}")
        if (now.locked or now.polls) and now.others:
            return verdict.only_if(f"rank {rank} is not let go on by another thread of it: it has {now.others[0]}")
        if rank not in seen and place is not None and SLEEP.search(place.what):
            return verdict.only_if(f"rank {rank} does not come when its sleep ends")
    return None


def it_waits_for_itself(case: Case) -> Verdict | None:
    """A rank that waits for an event, a queue, a thread or the clock is blocked by nothing outside: it is missing, as
    the same rank is where only its record is at hand.
    """
    verdict, where = case.verdict, case.where
    if verdict.cls is not Class.OUTSIDE or verdict.certainty is Certainty.UNDECIDED:
        return None
    idle = [rank for rank in verdict.ranks if rank in where and OWN_WAIT.search(where[rank].what)]
    return replace(verdict, cls=Class.MISSING, fix=words.THROUGH) if len(idle) == len(verdict.ranks) else None
