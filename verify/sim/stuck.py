"""The wait-for graph of a simulated world that cannot go on: who waits for whom, and what kind of standstill that is.

    ("host", rank, 0)            a rank's program; waits for its main task
    ("task", rank, number)       a suspended task: waits for what it awaits; OR for an 'any of' wait
    ("flag", rank, number)       something that only tasks of the rank itself can set; OR over those that could
    ("kernel", rank, place)      device work: waits for what is before it on its stream, for events, for room (OR over
                                 sets of kernels whose room suffices), and once resident for its collective
    ("launch", rank, 0)          a full launch queue, at which the rank's host stands still: waits for its first launch
    ("op", name)                 a collective or a rendezvous: waits for the members that are missing

The graph is judged as that of a program or of a live job is (`verify.waitgraph`): a node is stuck unless the release
fixpoint frees it.
"""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import TYPE_CHECKING, Any

import networkx as nx

from kernel.inbox import Inbox
from verify.blame import Class, shortest_cycle
from verify.sim import standstill
from verify.sim.errors import Standstill
from verify.sim.footprint import touched
from verify.sim.waits import await_frames
from verify.waitgraph import stuck

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verify.sim.collectives import Instance
    from verify.sim.kernels import Kernel
    from verify.sim.launches import Launches
    from verify.sim.world import SimWorld

Node = tuple[str, Any, Any]

_ALL_OF = ("FIRST_EXCEPTION", "ALL_COMPLETED")


def examine(world: SimWorld, only_timers: bool = False) -> Standstill:
    """Why `world` cannot go on. Changes nothing in it; call before its loops are closed."""
    graph = wait_graph(world)
    hosts = tuple((rank, text) for rank, text in standstill.hosts(world) if text)
    roots = [node for node in graph if not graph.out_degree(node)]
    core = stuck(graph, free=roots)
    cycle = shortest_cycle(graph.subgraph(core)) if core else []
    told = standstill.cycle(graph, cycle) if cycle else standstill.missing(graph, roots)
    cls = Class.CYCLE if cycle else Class.MISSING
    if only_timers:
        cls = Class.TIMEOUT
    elif not cycle and all(node[0] == "outside" for node in roots):
        waited = {node[1] for node in graph if node[0] == "op"}
        cls = Class.MISSING if waited else Class.OUTSIDE
    return Standstill(cls, told.lines, hosts, told.ranks, told.ops, told.kinds)


def wait_graph(world: SimWorld) -> nx.DiGraph[Any]:
    """Who waits for whom. Node attributes: mode ("and" | "or"), rank, kernel, instance, meeting, task, how."""
    return _Builder(world).build()


class _Builder:
    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._graph: nx.DiGraph[Any] = nx.DiGraph()
        self._pending = {ports.rank: ports.loop.pending() for ports in world.ranks}
        self._node_of = {
            task: ("task", rank, number) for rank, tasks in self._pending.items() for number, task in enumerate(tasks)
        }
        self._events = {
            id(waiter): marker
            for ports in world.ranks
            for marker, event in ports.device._open.items()
            for waiter in event._waiters
        }
        self._exchanges = {
            id(waiter): exchange for exchange in world.hall.open.values() for waiter in exchange.waiters.values()
        }
        self._awaited = self._awaits()

    def build(self) -> nx.DiGraph[Any]:
        """The graph."""
        for ports in self._world.ranks:
            self._host(ports.rank)
            if ports.device.launches:
                self._launch(ports.rank, ports.device.launches)
            for queue in ports.device.chip.queues.values():
                for kernel in queue.items:
                    self._kernel(kernel)
        for task, node in self._node_of.items():
            self._task(node, task)
        for exchange in self._world.hall.open.values():
            meeting = _op(exchange)
            self._graph.add_node(meeting, mode="and", meeting=exchange)
            for rank in range(self._world.world.size):
                if rank not in exchange.tags:
                    self._edge(meeting, ("host", rank, 0))
        return self._graph

    def _edge(self, waiter: Node, needs: Node, how: str = "") -> None:
        self._graph.add_edge(waiter, needs, how=how)

    # -- hosts --------------------------------------------------------------------------------------------------

    def _host(self, rank: int) -> None:
        node, mains = ("host", rank, 0), self._world._mains
        self._graph.add_node(node, mode="and", rank=rank)
        if rank < len(mains) and not mains[rank].done():
            self._edge(node, self._node_of[mains[rank]])

    def _task(self, node: Node, task: asyncio.Task[Any]) -> None:
        self._graph.add_node(node, mode="and", rank=node[1], task=task)
        waiter = getattr(task, "_fut_waiter", None)
        if self._world.ranks[node[1]].device.launches:
            self._edge(node, ("launch", node[1], 0), "launch")
            return
        if waiter is None:
            return
        if any(frame.f_code is Inbox.beyond.__code__ for frame in await_frames(task.get_coro())):
            self._graph.add_node(("outside", node[1], node[2]), mode="and", rank=node[1], task=task)
            self._edge(node, ("outside", node[1], node[2]))
            return
        needs, any_of = self._needs(waiter)
        if needs:
            self._graph.nodes[node]["mode"] = "or" if any_of else "and"
            for each in needs:
                self._edge(node, each)
            return
        # Nobody is known to complete it: an Event, a Lock, a Queue. Only the rank's own tasks can; those that wait for
        # a piece of device work and do nothing else cannot.
        flag = ("flag", node[1], node[2])
        self._graph.add_node(flag, mode="or", rank=node[1], task=task)
        self._edge(node, flag)
        for other in self._pending[node[1]]:
            if other is not task and touched(other, node[1]) and not self._leads(other, task):
                self._edge(flag, self._node_of[other])

    def _needs(self, future: asyncio.Future[Any], depth: int = 8) -> tuple[list[Node], bool]:
        """What completes a future, and whether any one of these does."""
        if future in self._node_of:
            return [self._node_of[future]], False
        marker = self._events.get(id(future))
        if marker is not None:
            return [_place(marker)], False
        exchange = self._exchanges.get(id(future))
        if exchange is not None:
            return [_op(exchange)], False
        tasks, any_of = self._awaited.get(id(future), ([], False))
        found = list(tasks)
        for child in getattr(future, "_children", ()) if depth else ():
            if not child.done():
                found += self._needs(child, depth - 1)[0]
        return list(dict.fromkeys(found)), any_of

    def _awaits(self) -> dict[int, tuple[list[Node], bool]]:
        """Future -> the tasks whose end completes it: those of `shield`, `gather`, `wait` and of a TaskGroup."""
        found: dict[int, tuple[list[Node], bool]] = {}
        for task, node in self._node_of.items():
            for callback, *_ in getattr(task, "_callbacks", None) or ():
                for future, any_of in _completes(callback):
                    tasks, _ = found.setdefault(id(future), ([], any_of))
                    tasks.append(node)
        return found

    def _leads(self, task: asyncio.Task[Any], to: asyncio.Task[Any]) -> bool:
        """Whether `task` waits for nothing but the end of `to`."""
        waiter = getattr(task, "_fut_waiter", None)
        if waiter is None:
            return False
        return waiter is to or self._awaited.get(id(waiter), ([], False))[0] == [self._node_of[to]]

    def _launch(self, rank: int, launches: Launches) -> None:
        """The host stands still until the oldest launch in the queue that is full has left it."""
        node = ("launch", rank, 0)
        self._graph.add_node(node, mode="and", rank=rank, launches=launches)
        waiting = launches._waiting[0][1]
        inside = launches._inside.get(id(getattr(waiting, "queue", None)))
        if inside and inside[0].last is not None and not inside[0].left:
            self._edge(node, _place(inside[0].last), "launch")

    # -- devices ------------------------------------------------------------------------------------------------

    def _kernel(self, kernel: Kernel) -> None:
        node, chip = _place(kernel), kernel.queue.chip
        self._graph.add_node(node, mode="and", rank=chip.rank, kernel=kernel)
        if kernel.resident:
            if kernel.meeting is not None:
                self._op(kernel.meeting)  # type: ignore[arg-type]
                self._edge(node, _op(kernel.meeting))
            return
        items = kernel.queue.items
        if kernel is not items[0]:
            before = next(each for each in reversed(items) if each.number < kernel.number)
            self._edge(node, _place(before), "queue")
        for blocker in kernel.blockers:
            if not blocker.finished:
                self._edge(node, _place(blocker), "event")
        if kernel is items[0] and kernel.arrived and kernel.weight:
            self._room(node, kernel)

    def _room(self, node: Node, kernel: Kernel) -> None:
        """It waits for enough room: OR over the smallest sets of holders that would make it."""
        chip = kernel.queue.chip
        lacking, holders = chip._used + kernel.weight - chip.capacity, chip._holders
        enough: list[tuple[Kernel, ...]] = []
        for size in range(1, len(holders) + 1):
            for some in combinations(holders, size):
                if sum(each.weight for each in some) >= lacking and not any(set(few) <= set(some) for few in enough):
                    enough.append(some)
        if len(enough) == 1:
            for holder in enough[0]:
                self._edge(node, _place(holder), "room")
            return
        choice = ("room", chip.rank, node[2])
        self._graph.add_node(choice, mode="or", rank=chip.rank, kernel=kernel)
        self._edge(node, choice, "room")
        for number, some in enumerate(enough):
            together = ("room", chip.rank, (*node[2], number))
            self._graph.add_node(together, mode="and", rank=chip.rank, kernel=kernel)
            self._edge(choice, together, "room")
            for holder in some:
                self._edge(together, _place(holder), "room")

    def _op(self, instance: Instance) -> None:
        node = _op(instance)
        if node in self._graph and "instance" in self._graph.nodes[node]:
            return
        self._graph.add_node(node, mode="and", instance=instance)
        for member in instance.communicator.members:
            kernel = instance.kernels.get(member)
            if kernel is None:
                self._edge(node, ("host", member, 0), "host")
            elif kernel.number < 0:
                self._edge(node, ("launch", member, 0), "launch")
            elif not kernel.resident:
                self._edge(node, _place(kernel))


def _op(meeting: Any) -> Node:
    return ("op", str(meeting), 0)


def _place(kernel: Kernel) -> Node:
    return ("kernel", kernel.queue.chip.rank, (str(kernel.queue.phase), kernel.number))


def _completes(callback: Any) -> Iterator[tuple[Any, bool]]:
    """The futures that a done-callback of a task may complete, and whether one task alone does."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.TaskGroup):
        ended = getattr(owner, "_on_completed_fut", None)
        if ended is not None:
            yield ended, False
        return
    cells = {}
    code, closure = getattr(callback, "__code__", None), getattr(callback, "__closure__", None)
    for name, cell in zip(code.co_freevars, closure, strict=True) if code is not None and closure else ():
        try:
            cells[name] = cell.cell_contents
        except ValueError:
            continue
    any_of = "return_when" in cells and cells["return_when"] not in _ALL_OF
    for value in cells.values():
        if isinstance(value, asyncio.Future) and not isinstance(value, asyncio.Task) and not value.done():
            yield value, any_of
