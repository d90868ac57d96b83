"""Rings that lead through what a rank waits for outside of calls, where it is another rank that holds it: the lock on a
file, the other end of a pipe or a socket, a child process that is a rank.

Whoever holds it is known from /proc (`verify.live.outside`), and waits itself, by its record, in a call that lacks the
one that waits, or for what a further rank holds. Such a wait lasts if every process that could end it is stuck: it is
an OR over the holders. A holder that is none of these ranks, or has a thread that moves, is free, and opens the ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from verify import words
from verify.blame import Certainty, Class, Verdict, shortest_cycle
from verify.hang.case import unattended
from verify.live.holders import named
from verify.live.outside import WHO
from verify.matching import Standing
from verify.waitgraph import stuck

if TYPE_CHECKING:
    from collections.abc import Mapping

    import networkx as nx

    from verify.hang.case import Case
    from verify.live.outside import Outside
    from verify.live.threads import Moves

HELD: Final = "held"
"""How the nodes begin that stand for what a rank waits for outside of calls."""
FREE: Final = ("free",)
"""A node for everybody who may let a rank go on."""
LEFT: Final = (Standing.EXITED, Standing.RAISED)


def ring_through_holders(case: Case) -> Verdict | None:
    """The ring that a rank which is blocked outside of calls, or does not come, is in; None where none is certain."""
    verdict = case.verdict
    if verdict.cls not in (Class.OUTSIDE, Class.MISSING) or verdict.certainty is Certainty.UNDECIDED:
        return None
    hosts = {host.rank: host for host in case.situation.hosts if not host.thread}
    away = [rank for rank in verdict.ranks if rank in hosts and hosts[rank].standing not in LEFT]
    seen = case.look(case.everybody) if away else {}
    kept = {rank: now.outside for rank, now in seen.items() if now.outside is not None and _kept(case, rank, now)}
    if not set(away) & kept.keys():
        return None
    graph = _with_holders(case, kept, seen)
    core = stuck(graph, free=[node for node in graph if not graph.out_degree(node)])
    nodes = shortest_cycle(graph.subgraph(core))
    hops = [(nodes[at], nodes[at + 1], nodes[(at + 2) % len(nodes)]) for at in range(0, len(nodes), 2)]
    ranks = tuple(sorted({graph.nodes[actor]["rank"] for actor, _, _ in hops}))
    # A rank that holds itself what it waits for is blocked outside of calls, and by nobody else.
    if len(ranks) < 2 or not any(what[0] == HELD for _, what, _ in hops) or not case.found.whole.issuperset(ranks):
        return None
    if case.found.lively.intersection(ranks):
        return None
    first = min(range(len(hops)), key=lambda n: graph.nodes[hops[n][0]]["rank"])
    hops = [*hops[first:], *hops[:first]]
    chain = tuple(
        _holds(case, actor[1], needs[1], kept, seen) if what[0] == HELD
        else words.clause(case.situation, graph, actor, what, needs)
        for actor, what, needs in hops
    )  # fmt: skip
    say = f"{words.ranks(ranks).capitalize()} wait in a ring: {'; '.join(chain)}."
    found = Verdict(Class.CYCLE, ranks=ranks, chain=chain, say=say, fix=words.HELD)
    lacking = sorted({graph.nodes[needs]["rank"] for _, what, needs in hops if what[0] != HELD})
    if may := [f"rank {rank} has {_other(seen.get(rank))}" for rank in lacking if _other(seen.get(rank))]:
        return found.only_if(f"no other thread makes the call that is missing: {' and '.join(may[:2])}")
    return found


def _other(now: Moves | None) -> str:
    """What else in a process may make a call, "" where nothing can."""
    return "threads that cannot be seen from here" if now is None else now.others[0] if now.others else ""


def _kept(case: Case, rank: int, now: Moves) -> bool:
    """Whether only the holders of what a rank waits for outside of calls let it go on."""
    blocked = any(host.rank == rank and not host.thread and host.waits for host in case.situation.hosts)
    return not now.main and not blocked and not unattended(case.situation, rank)


def _with_holders(case: Case, kept: Mapping[int, Outside], seen: Mapping[int, Moves]) -> nx.DiGraph[Any]:
    """The wait-for graph with a node for what each of these ranks waits for, which waits for any of its holders."""
    graph = case.graph.copy()
    graph.add_node(FREE, mode="and", rank=-1)
    by_pid = {now.pid: rank for rank, now in seen.items() if now.pid}
    for rank, outside in kept.items():
        mine, what = ("host", rank, ""), (HELD, rank, "")
        if mine not in graph:
            continue
        graph.add_node(what, mode="or", rank=rank)
        graph.add_edge(mine, what)
        for pid in outside.holders or ():
            other = by_pid.get(pid)
            threads = [
                node for node in graph
                if node[0] == "host" and node[1] == other and graph.nodes[node]["host"].standing not in LEFT
            ]  # fmt: skip
            if other is None or seen[other].others or unattended(case.situation, other) or not threads:
                graph.add_edge(what, FREE)
            graph.add_edges_from((what, node) for node in threads)
        if not outside.holders:
            graph.add_edge(what, FREE)
    return graph


def _holds(case: Case, rank: int, holder: int, kept: Mapping[int, Outside], seen: Mapping[int, Moves]) -> str:
    """For what a rank waits that another one holds, as a clause."""
    pid, place = named([seen[holder].pid]), case.where.get(rank)
    text = kept[rank].unless.replace(WHO, f"rank {rank}").replace(pid, f"rank {holder} ({pid})")
    return f"{text}, at {place.spot}" if place is not None and place.line is not None else text
