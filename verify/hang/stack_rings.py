"""Rings of waits through hosts of which only the stack tells that they wait for another rank, whichever that is.

A key of the store is set by one of the ranks; a device or a call without a known operation waits for one of those that
share a group with it. If every one of these waits for the host in turn, it does not matter which it is: nobody goes on.
Who is in the ring then depends on which it is, so only those ranks are named that are in it in any case.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import networkx as nx

from verify import words
from verify.blame import Certainty, Class, Verdict, shortest_cycle
from verify.hang.alone import for_a_key
from verify.hang.stacks import At, for_anybody, standings

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from verify.events import Event
    from verify.hang.case import Case
    from verify.hang.stacks import Place

ONE_WAY: Final = ({"send", "isend"}, {"recv", "irecv"})
"""Transfers that never meet one another."""
TRANSFERS: Final = frozenset({"batch_isend_irecv"}.union(*ONE_WAY))


def ring_of_stacks(case: Case) -> Case | None:
    """The case with such a ring as its verdict, or with who alone could set a key; None where there is neither."""
    found, where = case.found, case.where
    loose = _loose(case)
    if not loose:
        return None
    told = {*loose, *case.known}
    others = standings(found.events, {rank: place for rank, place in where.items() if rank not in told})
    events = [*others, *(event for mine in loose.values() for event in mine)]
    tied_in = case.with_(events)
    graph, core = tied_in.graph, tied_in.core
    if not any(("host", rank, "") in core for rank in loose):
        keyed = for_a_key(tied_in.situation, graph, {rank: where[rank] for rank in loose})
        return None if keyed is None else replace(tied_in, verdict=keyed)
    part = graph.subgraph(core)
    nodes = shortest_cycle(part)
    ranks = {graph.nodes[node]["rank"] for node in nodes if node[0] != "op"}
    tied = sorted(ranks & set(loose))
    if not tied or (ranks == set(tied) and all(where[rank].at is not At.STORE for rank in tied)):
        # Calls of which only stacks tell may be one and the same.
        return None
    open_to = {rank: _peers(part, rank) for rank in sorted(loose) if ("host", rank, "") in core}
    if all(len(open_to[rank]) == 1 for rank in tied):
        return replace(tied_in, verdict=_ring(nodes, graph, tied, where))
    return replace(tied_in, verdict=_knot(part, open_to, where))


def _loose(case: Case) -> dict[int, list[Event]]:
    """Rank -> its wait for any of some others; {} where these waits may end as they are for one another."""
    found, where = case.found, case.where
    open_ = {event.rank for event in found.events if event.calls and event.state != "completed"}
    keyed = {rank for rank, place in where.items() if place.at is At.STORE}
    unknown = {
        rank for rank, place in where.items()
        if place.at in (At.DEVICE, At.COLLECTIVE) and rank not in case.known | open_ | found.whole | keyed
    }  # fmt: skip
    together: dict[int, set[int]] = {rank: set() for rank in unknown}
    for one, other in combinations(sorted(unknown), 2):
        if _may_meet(where[one], where[other]):
            together[one].add(other)
            together[other].add(one)
    if any(together.values()) and (not keyed or any(where[rank].what in TRANSFERS for rank in unknown)):
        return {}
    loose = {rank: for_anybody(where[rank], case.everybody) for rank in keyed}
    for rank in unknown:
        peers = _companions(found.events, rank) or set(case.everybody)
        loose[rank] = for_anybody(where[rank], peers - together[rank])
    return {rank: mine for rank, mine in loose.items() if mine}


def _may_meet(one: Place, other: Place) -> bool:
    """Whether two ranks may be in one call, of which nothing tells but their stacks."""
    if At.DEVICE in (one.at, other.at):
        return True
    if (one.what in TRANSFERS) != (other.what in TRANSFERS):
        return False
    return not any({one.what, other.what} <= way for way in ONE_WAY)


def _companions(events: Sequence[Event], rank: int) -> set[int]:
    """Who shares a group with `rank`."""
    members = {call.communicator.members for event in events for call in event.calls if call.communicator is not None}
    return {other for each in members if rank in each for other in each} - {rank}


def _peers(part: nx.DiGraph[Any], rank: int) -> set[int]:
    """For whom a host may wait, as its stack tells."""
    ops = part.successors(("host", rank, ""))
    return {other for op in ops for other in part.nodes[op]["meeting"].key[0].members} - {rank}


def _ring(nodes: Sequence[Any], graph: nx.DiGraph[Any], tied: Sequence[int], where: Mapping[int, Place]) -> Verdict:
    """The verdict where it is known for whom everybody in it waits."""
    actors = [node for node in nodes if node[0] != "op"]
    ranks = tuple(sorted({graph.nodes[node]["rank"] for node in actors}))
    first = min(range(len(actors)), key=lambda n: graph.nodes[actors[n]]["rank"])
    turned = actors[first:] + actors[:first]
    chain = tuple(
        _link(graph, actor, turned[(n + 1) % len(turned)], nodes[nodes.index(actor) + 1], where)
        for n, actor in enumerate(turned)
    )
    say = f"{words.ranks(ranks).capitalize()} wait in a ring: {'; '.join(chain)}."
    return _verdict(ranks, chain, say, _up_to_another(tied))


def _knot(part: nx.DiGraph[Any], open_to: Mapping[int, set[int]], where: Mapping[int, Place]) -> Verdict:
    """The verdict where it is not: all of them wait for one another, whomever each waits for.

    part: the graph of what is stuck. open_to: rank -> for whom it may wait.
    """
    stuck = sorted({part.nodes[node]["rank"] for node in part if node[0] != "op"})
    sure = tuple(rank for rank in stuck if _always(part, rank))
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, peers in open_to.items():
        whom = f"which needs {words.ranks(peers)}" if len(peers) == 1 else "for whom is not in the evidence"
        if where[rank].at is At.STORE:
            whom = f"which {'one of ' * (len(peers) > 1)}{words.ranks(peers)} is to set"
        alike.setdefault((_does(where[rank]), whom), []).append(rank)
    chain = [f"{words.ranks(who)} {_verb(who)} {what}, {whom}" for (what, whom), who in alike.items()]
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for node in sorted(part.nodes):
        if node[0] == "host" and node[1] not in open_to:
            for op in part.successors(node):
                needs = tuple(sorted({part.nodes[each]["rank"] for each in part.successors(op)}))
                known.setdefault((words.operation(part.nodes[op]["meeting"]), needs), []).append(node[1])
    chain += [
        f"{words.ranks(who)} {_verb(who)} in {what}, which needs {words.ranks(needs)}"
        for (what, needs), who in known.items()
    ]
    say = f"{words.ranks(stuck).capitalize()} wait for one another, whomever each waits for: {'; '.join(chain[:4])}."
    loose = sorted(open_to)
    return _verdict(sure, tuple(chain), say, _up_to_another(loose))


def _always(part: nx.DiGraph[Any], rank: int) -> bool:
    """Whether every ring there may be leads through `rank`."""
    left = part.subgraph([node for node in part if node[0] == "op" or part.nodes[node]["rank"] != rank])
    return bool(nx.is_directed_acyclic_graph(left))


def _up_to_another(ranks: Collection[int]) -> str:
    return f"what {words.ranks(ranks)} {_verb(ranks)} for is up to another rank of the job"


def _verdict(ranks: tuple[int, ...], chain: tuple[str, ...], say: str, condition: str) -> Verdict:
    return Verdict(
        Class.CYCLE, Certainty.CONDITIONAL, ranks=ranks, chain=chain, say=say, fix=words.FIXES["cycle"],
        condition=condition,
    )  # fmt: skip


def _link(graph: nx.DiGraph[Any], actor: Any, needs: Any, op: Any, where: Mapping[int, Place]) -> str:
    rank, other = graph.nodes[actor]["rank"], graph.nodes[needs]["rank"]
    meeting = graph.nodes[op]["meeting"]
    place = where.get(rank)
    if meeting.key[0].name == f"? {At.STORE}" and place is not None:
        return f"{_stands(place)}, which rank {other} has not set"
    if meeting.key[0].name.startswith("?") and place is not None:
        return f"{_stands(place)}, which needs rank {other}"
    return f"rank {rank} waits in {words.operation(meeting)}, which needs rank {other}"


def _stands(place: Place) -> str:
    """`rank 0 waits in recv at train.py:7 in step`."""
    return f"{place.who} waits {_does(place)}"


def _does(place: Place) -> str:
    what = {At.STORE: " for a key of the store", At.DEVICE: " for its device"}.get(place.at)
    return f"in {place.what} at {place.spot}" if what is None else f"at {place.spot}{what}"


def _verb(who: Collection[int]) -> str:
    return "waits" if len(set(who)) == 1 else "wait"
