"""The standstill of a simulated world in words: its cycle or its missing rank, and where each host's own code waits."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernel.sched
from verify import words
from verify.events import OPERATIONS
from verify.sim.footprint import touched
from verify.sim.waits import await_frames, machinery
from verify.sources import foreign, place

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence
    from types import FrameType

    import networkx as nx

    from verify.sim.world import SimWorld

_SHORT = {name: short for short, name in OPERATIONS.items()}
_POLICIES = str(Path(kernel.sched.__file__).parent)
_VERIFY = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Told:
    """See `verify.sim.errors.Standstill`."""

    lines: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


def brief(label: str) -> str:
    """`P all_reduce TP #3` as `P AR[TP] #3`; anything else as it is."""
    parts = label.split(" ")
    if len(parts) == 4 and parts[3].startswith("#"):
        return f"{parts[0]} {_SHORT.get(parts[1], parts[1])}[{parts[2]}] {parts[3]}"
    return label


def name(data: dict[str, Any]) -> str:
    """An operation of the graph."""
    if "meeting" in data:
        meeting = data["meeting"]
        tag = next(iter(meeting.tags.values()), "")
        return f"rendezvous '{tag}' #{meeting.number}"
    instance = data["instance"]
    communicator = instance.communicator
    return brief(f"{communicator.phase} {instance.shape.op} {communicator.role} #{instance.number}")


# -- where hosts wait -------------------------------------------------------------------------------------------


def hosts(world: SimWorld) -> Iterator[tuple[int, str]]:
    """For each rank that has not ended, the lines of its own code that wait."""
    for ports in world.ranks:
        found: dict[str, None] = {}
        tasks = [task for task in ports.loop.pending() if touched(task, ports.rank)]
        for task in tasks:
            if not _in_group(task):
                found[line_of(task)] = None
        yield ports.rank, " and ".join(found)


def _in_group(task: asyncio.Task[Any]) -> bool:
    """Whether it waits for the end of tasks of its own."""
    frames = await_frames(task.get_coro())
    return bool(frames) and frames[-1].f_code.co_qualname.startswith("TaskGroup.")


def line_of(task: asyncio.Task[Any]) -> str:
    """`file.py:line `text`` of the line at which a task waits: that of a policy, if one is in its stack."""
    frames = await_frames(task.get_coro())
    policy = [each for each in frames if _policy(each)]
    plain = [each for each in frames if not machinery(each.f_code.co_filename)]
    own = policy or [each for each in plain if not each.f_code.co_filename.startswith(_VERIFY)] or plain or frames
    if not own:
        return "?"
    site = own[-1].f_code.co_filename, own[-1].f_lineno
    text = linecache.getline(*site).strip()
    return place(site) + (f" `{text}`" if text else "")


def _policy(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    return filename.startswith((_POLICIES, "<string>")) or foreign(filename)


# -- cycles -----------------------------------------------------------------------------------------------------


def cycle(graph: nx.DiGraph[Any], nodes: Sequence[Any]) -> Told:
    """A cycle, a line for each stretch of it on one rank; it begins at the lowest rank."""
    ops = [at for at, node in enumerate(nodes) if node[0] == "op"]
    if not ops:
        rank = nodes[0][1]
        lines = (f"rank {rank} waits for itself: {_tasks(graph, nodes)}",)
        return Told(lines, (rank,), (), ("task",))
    hops: list[tuple[Any, list[Any]]] = []
    for at, following in zip(ops, [*ops[1:], ops[0] + len(nodes)], strict=True):
        hops.append((nodes[at], [nodes[n % len(nodes)] for n in range(at + 1, following)]))
    # Each operation is told from the rank on which the stretch before it ends.
    told = []
    for number, (op, path) in enumerate(hops):
        holder = hops[number - 1][1][-1]
        told.append((_rank(graph, holder), f"{_holds(graph, holder, op)} {_because(graph, op, path)}"))
    first = min(range(len(told)), key=lambda number: told[number][0])
    told = told[first:] + told[:first]
    hops = hops[first:] + hops[:first]
    return Told(
        tuple(text for _, text in told),
        tuple(sorted({rank for rank, _ in told})),
        tuple(dict.fromkeys(name(graph.nodes[op]) for op, _ in hops)),
        _kinds(graph, hops),
    )


def _kinds(graph: nx.DiGraph[Any], hops: Sequence[tuple[Any, list[Any]]]) -> tuple[str, ...]:
    found: set[str] = set()
    for op, path in hops:
        data = graph.nodes[op]
        found.add("rendezvous" if "meeting" in data else str(data["instance"].communicator.phase))
        if any(node[0] == "launch" for node in path):
            found.add("launch")
        else:
            found.add("host" if path[0][0] == "host" else graph.edges[path[0], path[1]]["how"] or "queue")
    return tuple(sorted(found))


def _rank(graph: nx.DiGraph[Any], node: Any) -> int:
    rank: int = graph.nodes[node]["rank"]
    return rank


def _holds(graph: nx.DiGraph[Any], node: Any, op: Any) -> str:
    """What a rank does in an operation that it waits in."""
    data, what = graph.nodes[node], name(graph.nodes[op])
    if "kernel" in data:
        kernel = data["kernel"]
        slots = f"holds {_slots(kernel)}" if kernel.queue.chip.crowded else f"runs on stream {kernel.queue.phase}"
        return f"rank {data['rank']}: {what} {slots} and waits for"
    return f"rank {data['rank']}: the host waits in {what}, at {line_of(data['task'])}, for"


def _slots(kernel: Any) -> str:
    capacity = kernel.queue.chip.capacity
    if kernel.weight == capacity == 1:
        return "the only slot"
    return f"{kernel.weight} of {capacity} slots"


def _because(graph: nx.DiGraph[Any], op: Any, path: Sequence[Any]) -> str:
    """Why an operation is not there yet on the rank on which `path` lies."""
    rank = _rank(graph, path[0])
    last = graph.nodes[path[-1]]
    full = next((graph.nodes[path[at + 1]]["kernel"] for at, node in enumerate(path[:-1]) if node[0] == "launch"), None)
    if full is not None:
        queue = f"the launch queue of stream {full.queue.phase} is full"
        return f"rank {rank}, which cannot launch it: {queue}, and {brief(full.label)} comes first"
    if path[0][0] == "host":
        verb = "has not come" if "meeting" in graph.nodes[op] else "has not enqueued it"
        tasks = [graph.nodes[node]["task"] for node in reversed(path) if "task" in graph.nodes[node]]
        own = [task for task in tasks if any(map(_policy, await_frames(task.get_coro())))]
        task = (own or tasks or [None])[0]
        at = f", its host waits at {line_of(task)}" if task is not None else ""
        behind = f", for {brief(last['kernel'].label)}" if "kernel" in last else ""
        return f"rank {rank}: it {verb}{at}{behind}"
    holder = last["kernel"]
    match graph.edges[path[0], path[1]]["how"] if len(path) > 1 else "":
        case "room":
            return f"rank {rank}, where {brief(holder.label)} holds {_slots(holder)}"
        case "event":
            return f"rank {rank}, where it comes after {brief(holder.label)} of stream {holder.queue.phase}"
    return f"rank {rank}, where it is queued behind {brief(holder.label)} on stream {holder.queue.phase}"


def _tasks(graph: nx.DiGraph[Any], nodes: Sequence[Any]) -> str:
    lines = [
        f"task {data['task'].get_name()!r} at {line_of(data['task'])}"
        for data in map(graph.nodes.__getitem__, nodes)
        if "task" in data
    ]
    return ", which waits for ".join(dict.fromkeys(lines))


# -- missing ----------------------------------------------------------------------------------------------------


def missing(graph: nx.DiGraph[Any], roots: Sequence[Any]) -> Told:
    """Who is waited for and waits for nobody, a line for each rank; those that an operation needs come first."""
    lines: dict[int, tuple[bool, str]] = {}
    ops: dict[str, None] = {}
    kinds: set[str] = set()
    known = [node for node in roots if graph.nodes[node].get("rank") is not None]
    for root in sorted(known, key=lambda node: (node[1], node[0])):
        rank = _rank(graph, root)
        if root[0] == "host" and not graph.in_degree(root):
            continue
        op = _waited(graph, root)
        why, kind = _why(graph, root)
        if op is not None:
            ops[name(graph.nodes[op])] = None
            kinds |= {kind, "rendezvous" if "meeting" in graph.nodes[op] else "collective"}
            text = f"{_waiters(graph, op)} in {name(graph.nodes[op])} for rank {rank}, {why}"
        else:
            kinds.add(kind)
            text = f"rank {rank}, {why}"
        if rank not in lines or (op is not None and not lines[rank][0]):
            lines[rank] = op is not None, text
    order = sorted(lines, key=lambda rank: (not lines[rank][0], rank))
    needed = [rank for rank in order if lines[rank][0]] or order
    return Told(tuple(lines[rank][1] for rank in needed), tuple(sorted(needed)), tuple(ops), tuple(sorted(kinds)))


def _waited(graph: nx.DiGraph[Any], root: Any) -> Any:
    """The nearest operation that waits for a root."""
    seen, todo = {root}, [root]
    while todo:
        node = todo.pop(0)
        for waiter in sorted(graph.predecessors(node)):
            if waiter[0] == "op":
                return waiter
            if waiter not in seen:
                seen.add(waiter)
                todo.append(waiter)
    return None


def _why(graph: nx.DiGraph[Any], root: Any) -> tuple[str, str]:
    if root[0] == "host":
        return "which has ended", "end"
    task = graph.nodes[root].get("task")
    at = f" at {line_of(task)}" if task is not None else ""
    if root[0] == "outside":
        return f"which waits for its inbox{at}", "inbox"
    return f"which waits{at} for what nothing left on that rank will do", "unset"


def _waiters(graph: nx.DiGraph[Any], op: Any) -> str:
    data = graph.nodes[op]
    if "meeting" in data:
        here = sorted(data["meeting"].tags)
    else:
        here = sorted(rank for rank, kernel in data["instance"].kernels.items() if kernel.resident)
    return f"{words.ranks(here)} wait{'s' if len(here) == 1 else ''}"
