"""Who waits for whom, as top shows it: the wait-for graph that `turnstile hang` judges, and a line for each operation.

Shown besides are the streams that are in a call which somebody lacks, though no host waits for it:

    ("device", rank, "P")   one of a rank's streams; a leaf at its call, part of no judgement
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networkx as nx

from verify import words
from verify.readers.record import RENDEZVOUS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from verify.hang.diagnosis import Diagnosis
    from verify.matching import Meeting


def nothing() -> nx.DiGraph[Any]:
    """A graph in which nobody waits."""
    return nx.DiGraph()


def shown(diagnosis: Diagnosis, ring: Collection[Any] = ()) -> nx.DiGraph[Any]:
    """The graph of a diagnosis, its operations labelled as a record names them, with the streams that are in them.

    Operations that are only queued behind others are left out: they wait for no more than these do.
    """
    graph: nx.DiGraph[Any] = diagnosis.graph.copy() if diagnosis.graph is not None else nx.DiGraph()
    kept = _in_front(graph, ring)
    graph.remove_nodes_from([node for node in graph if node[0] == "op" and node not in kept])
    for op in [node for node in graph if node[0] == "op"]:
        meeting: Meeting = graph.nodes[op]["meeting"]
        graph.nodes[op]["label"] = _label(meeting)
        if not graph.out_degree(op):
            continue
        waiting = {graph.nodes[node]["rank"] for node in graph.predecessors(op)}
        for launch, call in meeting.arrived.values():
            if launch.rank not in waiting and not launch.done and call.stream:
                actor = ("device", launch.rank, call.stream)
                graph.add_node(actor, rank=launch.rank, label=f"rank {launch.rank}'s {call.stream} stream")
                graph.add_edge(actor, op)
    return graph


def _in_front(graph: nx.DiGraph[Any], ring: Collection[Any]) -> set[Any]:
    """The operations in which somebody waits in front, those of the ring, and whatever else these wait for."""
    kept: set[Any] = set()
    todo = [node for node, data in graph.nodes(data=True) if node[0] == "op" and (data.get("active") or node in ring)]
    todo += [op for node in graph if node[0] == "host" for op in _first(graph, node)]
    while todo:
        if (op := todo.pop()) not in kept:
            kept.add(op)
            todo += [needed for actor in graph.successors(op) for needed in _first(graph, actor)]
    return kept


def _first(graph: nx.DiGraph[Any], actor: Any) -> list[Any]:
    """Of the operations that an actor waits for, those with somebody in front, if there are any."""
    ops = list(graph.successors(actor))
    return [op for op in ops if graph.nodes[op].get("active")] or ops


def _label(meeting: Meeting) -> str:
    (_, name, _), number = meeting.key
    calls = [call for _, (_, call) in sorted(meeting.arrived.items()) if call.operation]
    if not calls:
        return words.operation(meeting)
    if name == RENDEZVOUS:
        return f"{RENDEZVOUS} {calls[0].tag} #{number + 1}"
    return f"{calls[0].operation} {name} #{number + 1}"


def blockers(graph: nx.DiGraph[Any], standing: Collection[int]) -> set[int]:
    """Ranks whose host waits for nobody, while another rank that stands still waits for them."""
    found = set()
    for node in graph:
        if node[0] != "host" or graph.out_degree(node):
            continue
        waiting = {graph.nodes[one]["rank"] for op in graph.predecessors(node) for one in graph.predecessors(op)}
        if any(rank != node[1] and rank in standing for rank in waiting):
            found.add(node[1])
    return found


def told(graph: nx.DiGraph[Any], cycle: Sequence[Any]) -> list[str]:
    """Who waits for whom, a line for each operation that somebody is in and somebody is not; a ring first."""
    lines = []
    if cycle:
        start = next(at for at, node in enumerate(cycle) if node[0] != "op")
        ring = [*cycle[start:], *cycle[:start], cycle[start]]
        names = [_name(graph, node) for node in ring]
        steps = [f"{names[at]} waits in {names[at + 1]} for {names[at + 2]}" for at in range(0, len(names) - 2, 2)]
        lines.append("in a ring: " + "; ".join(steps))
    ops = [node for node in graph if node[0] == "op" and graph.out_degree(node)]
    for op in sorted(ops, key=str):
        waiting = words.ranks(graph.nodes[node]["rank"] for node in graph.predecessors(op))
        verb = "waits" if waiting.startswith("rank ") else "wait"
        absent = words.ranks(graph.nodes[node]["rank"] for node in graph.successors(op))
        lines.append(f"{waiting} {verb} in {graph.nodes[op]['label']} for {absent}")
    return lines


def _name(graph: nx.DiGraph[Any], node: Any) -> str:
    if node[0] == "op":
        return str(graph.nodes[node]["label"])
    return f"rank {node[1]}" + ("'s queue" if node[0] == "queue" else "")
