"""Who waits for whom in a run as its records tell it: only what is certain, as a wait-for graph.

    ("host", rank, "")      the rank's event loop
    ("device", rank, "P")   one of its streams
    ("op", kind, name, members, number)   a rendezvous, or a collective

A host waits in a rendezvous for the hosts that have not entered it, or for its own stream. A stream waits in a
collective for the streams of members that have enqueued it and not started it, and for the hosts of members that have
not enqueued it. What a stream waits for in front of its next collective is not in the record, and not guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networkx as nx

from verify import words
from verify.blame import shortest_cycle
from verify.waitgraph import stuck

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.record import Event
    from verify.top.state import RankState


def graph_of(states: Mapping[int, RankState]) -> nx.DiGraph[Any]:
    """The graph. Node attributes: rank and label (actors: where they stand), label (operations)."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    everybody = set(states) | {
        member for state in states.values() for group in state.recording.groups.values() for member in group
    }
    for rank, state in sorted(states.items()):
        _host(graph, rank, state, states, everybody)
        for event in state.open.values():
            _collective(graph, rank, event, state, states)
    return graph


def _host(
    graph: nx.DiGraph[Any], rank: int, state: RankState, states: Mapping[int, RankState], everybody: set[int]
) -> None:
    me = _actor(graph, "host", rank, "")
    op: Any
    if (event := state.exchange) is not None:
        absent = [other for other in everybody if other not in states or states[other].exchanges < event.seq]
        op = ("op", "rendezvous", event.text, (), event.seq)
        if absent:  # else it has only to wake up
            graph.add_node(op, label=f"rendezvous {event.text} #{event.seq}")
            graph.add_edge(me, op)
            graph.add_edges_from((op, _actor(graph, "host", other, "")) for other in absent)
    if state.wait is not None and (stream := state.wait.text[:2]) in ("D ", "P "):
        op = ("op", "wait", stream, (rank,), 0)
        what = "its P work" if state.wait.text == "P device" else state.wait.text
        graph.add_node(op, label=f"{what} on its device")
        graph.add_edges_from([(me, op), (op, _actor(graph, "device", rank, stream[0]))])


def _collective(
    graph: nx.DiGraph[Any], rank: int, event: Event, state: RankState, states: Mapping[int, RankState]
) -> None:
    members = state.recording.groups.get(event.group, (rank,))
    absent: list[tuple[str, int, str]] = []
    for other in members:
        theirs = states.get(other)
        if theirs is None or theirs.enqueued.get(event.group, 0) < event.seq:
            absent.append(("host", other, ""))
        elif theirs.started.get(event.group, 0) < event.seq:
            absent.append(("device", other, event.stream))
    op: Any = ("op", "collective", event.group, members, event.seq)
    if absent:  # else everybody is in it, and it works
        graph.add_node(op, label=f"{event.text} {event.group} #{event.seq}", site=event.site)
        graph.add_edge(_actor(graph, "device", rank, event.stream), op)
        graph.add_edges_from((op, _actor(graph, *actor)) for actor in absent)


def _actor(graph: nx.DiGraph[Any], kind: str, rank: int, stream: str) -> tuple[str, int, str]:
    node = (kind, rank, stream)
    graph.add_node(node, rank=rank, mode="and", label=f"rank {rank}" + (f"'s {stream} stream" if stream else ""))
    return node


def cycle_of(graph: nx.DiGraph[Any]) -> list[Any]:
    """A shortest cycle, actor and operation in turn; [] where nobody waits in a ring."""
    core = stuck(graph, free=[node for node in graph if not graph.out_degree(node)])
    return shortest_cycle(graph.subgraph(core)) if core else []


def told(graph: nx.DiGraph[Any], cycle: list[Any]) -> list[str]:
    """Who waits for whom, a line for each operation that somebody is in and somebody is not; a ring first."""
    lines = []
    if cycle:
        start = next(at for at, node in enumerate(cycle) if node[0] != "op")
        ring = [*cycle[start:], *cycle[:start], cycle[start]]
        names = [graph.nodes[node]["label"] for node in ring]
        steps = [f"{names[at]} waits in {names[at + 1]} for {names[at + 2]}" for at in range(0, len(names) - 2, 2)]
        lines.append("in a ring: " + "; ".join(steps))
    ops = [node for node in graph if node[0] == "op" and node[1] != "wait" and graph.out_degree(node)]
    for op in sorted(ops, key=str):
        waiting = words.ranks(graph.nodes[node]["rank"] for node in graph.predecessors(op))
        verb = "waits" if waiting.startswith("rank ") else "wait"
        absent = words.ranks(graph.nodes[node]["rank"] for node in graph.successors(op))
        lines.append(f"{waiting} {verb} in {graph.nodes[op]['label']} for {absent}")
    return lines
