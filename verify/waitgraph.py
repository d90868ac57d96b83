"""Who waits for whom: from a program, or from evidence, to the wait-for graph and the verdict.

The graph is bipartite, actor -> operation -> actor, so that a collective of n members has n edges and not n^2.

    ("host", rank, thread)   a host thread: waits for the operations of its call or wait; OR for an 'any of' wait
    ("any", rank, "", key)   any one of the threads of a rank that may make a call: OR
    ("queue", rank, order)   a launch that is not first in its queues: waits for the operations right before it
    ("op", key)              a meeting: waits for the actors that still keep a member from it

A node is stuck unless the release fixpoint frees it: an AND node is free when all of its successors are, an OR node
when some is (for AND alone: exactly the nodes that reach a cycle or a root; for OR alone: a knot). Linear time, as in
the AND-OR model of Hilbrich et al. (ICS 2009) for MPI.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import networkx as nx

from verify import words
from verify.blame import Certainty, Class, Verdict, cycle, judge, severity
from verify.evidence import situation_of
from verify.execution import executions
from verify.matching import NOBODY_KNOWS, ROOTS, Host, Standing, reach
from verify.notation import parse_program

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from verify.events import Event, Program
    from verify.matching import Meeting, Seat, Situation

__all__ = [
    "Certainty", "Class", "Verdict", "across_threads", "diagnose", "diagnose_events", "diagnose_program", "stuck",
    "wait_graph",
]  # fmt: skip


def diagnose_program(program: Program | str, exclusive_device: bool = False, budget: int = 2000) -> Verdict:
    """What happens when every rank runs `program` (or its text), and who is to blame if it hangs.

    exclusive_device: the device runs one communication kernel at a time, in issue order. A fault that needs this is
    `conditional`; one that happens with room for all kernels is `certain`. budget: runs to try where threads of a rank
    race for their issue order. Raises NotationError for text that is not a program.
    """
    if isinstance(program, str):
        program = parse_program(program)
    roomy = _over_orders(program, exclusive=False, budget=budget)
    if not exclusive_device or roomy.cls is not Class.NONE or roomy.certainty is Certainty.UNDECIDED:
        return roomy
    tight = _over_orders(program, exclusive=True, budget=budget)
    return tight if tight.cls is Class.NONE else tight.only_if("the device holds one communication kernel at a time")


def diagnose_events(
    events: Iterable[Event], ranks: Iterable[int] = (), quiet: bool = True, present: Iterable[int] = ()
) -> Verdict:
    """Who is to blame, from evidence of a job at one moment. Arguments: see `verify.evidence.situation_of`."""
    return diagnose(situation_of(events, ranks, quiet, present))


def diagnose(situation: Situation) -> Verdict:
    """The verdict on where everybody stands."""
    graph = wait_graph(situation)
    core = stuck(graph, free=[node for node in graph if not graph.out_degree(node)])
    return across_threads(situation, judge(situation, graph, core))


def _over_orders(program: Program, exclusive: bool, budget: int) -> Verdict:
    verdicts: list[Verdict] = []
    whole = True
    for run in executions(program, exclusive, budget):
        if run is None:
            whole = False
        else:
            verdicts.append(diagnose(run.situation()))
    worst = min(verdicts, key=severity, default=Verdict(Class.NONE))
    if worst.cls is Class.NONE:
        return worst if whole else worst.undecided(f"more than {budget} orders of the threads")
    if whole and all(verdict.cls is not Class.NONE for verdict in verdicts):
        return worst
    return worst.only_if("the threads of a rank issue their calls in one of several possible orders")


def wait_graph(
    situation: Situation, strict: bool = False, closed: Collection[int] = frozenset()
) -> nx.DiGraph[Any]:
    """The wait-for graph of a situation, over all media, streams and devices at once.

    strict: of evidence, a call that is missing waits for any thread of its rank that may still make one, whatever each
    has called so far: collectives of different threads have no order between them. What is stuck in this graph is
    stuck whichever thread was to make the call. closed: ranks of whose processes it is known that no thread goes on
    before one of those that wait in calls does; so one of these has to, whoever is to make the call then.

    Node attributes: rank (actors), mode ("and" | "or"), host, launch, meeting (what it stands for), active (of an
    operation: somebody waits in it and for nothing before it). Linear in the calls and their members.
    """
    graph: nx.DiGraph[Any] = nx.DiGraph()
    hosts: dict[int, list[Host]] = {}
    for host in situation.hosts:
        hosts.setdefault(host.rank, []).append(host)
        graph.add_node(("host", host.rank, host.thread), rank=host.rank, mode="or" if host.any_of else "and", host=host)
    seen: set[int] = set()
    behind = {id(launch): (launch, before) for launch, before in situation.predecessors()}
    for launch, before in behind.values():
        actor = ("queue", launch.rank, launch.order)
        if before:
            graph.add_node(actor, rank=launch.rank, mode="and", launch=launch)
            graph.add_edges_from((actor, ("op", meeting.key)) for each in before for meeting in each.meetings)
        for meeting in launch.meetings:
            graph.add_node(("op", meeting.key), mode="and", meeting=meeting)
            if not before:
                graph.nodes["op", meeting.key]["active"] = True
    for launch, _ in behind.values():
        if id(launch.meetings[0]) in seen:
            continue
        together, empty = reach(launch)
        joined = {id(meeting): meeting for each in together.values() if not each.done for meeting in each.meetings}
        blocked = [("queue", one.rank, one.order) for key, one in together.items() if key in behind and behind[key][1]]
        absent: list[Any] = [*blocked]
        for meeting, seat in empty:
            if (seat[0], meeting.key[0].name) in situation.unsure:
                lost = Host(seat[0], NOBODY_KNOWS, Standing.UNKNOWN)
                graph.add_node(("host", seat[0], NOBODY_KNOWS), rank=seat[0], mode="and", host=lost)
                absent.append(("host", seat[0], NOBODY_KNOWS))
                continue
            mine = hosts.get(seat[0], [])
            if seat[0] in closed:
                mine = [host for host in mine if host.standing is Standing.BLOCKED] or mine
            able = _may_call(mine, seat) if strict or seat[0] in closed else _callers(mine, meeting, seat)
            if len(able) > 1 and mine[0].ahead is None:
                anyone = ("any", seat[0], "", meeting.key)
                graph.add_node(anyone, rank=seat[0], mode="or")
                graph.add_edges_from((anyone, who) for who in able)
                able = [anyone]
            absent += able
        seen |= joined.keys()
        for meeting in joined.values():
            graph.add_node(("op", meeting.key), mode="and", meeting=meeting)
            graph.add_edges_from((("op", meeting.key), actor) for actor in absent)
    for host in situation.hosts:
        if host.standing is Standing.BLOCKED:
            keys = dict.fromkeys(meeting.key for launch in host.waits for meeting in launch.meetings)
            graph.add_edges_from((("host", host.rank, host.thread), ("op", key)) for key in keys)
    return graph


def _callers(hosts: list[Host], meeting: Meeting, seat: Seat) -> list[Any]:
    """The threads that a meeting waits for.

    Of a program, those that would still call it, else those of the rank that wait. Of evidence, whoever made the
    earlier calls of that group; where nobody did, any thread of the rank, but for those that ended while others may
    still come. A thread that ended by an exception is the one if its namesakes made the call on all other ranks; one
    that ended well has left its calls to the others.
    """
    channel = meeting.key[0]
    hosts = [host for host in hosts if not host.thread or host.standing is not Standing.EXITED] or hosts
    ended = [host for host in hosts if host.thread and host.standing is Standing.RAISED]
    names = {call.thread for _, call in meeting.arrived.values()} if ended else set()
    dead = [host for host in ended if {host.thread} == names]
    if all(host.ahead is not None for host in hosts):
        able = [host for host in hosts if host.ahead is None or host.ahead[channel]]
        able = able or [host for host in hosts if host.standing not in ROOTS] or hosts
    elif able := [host for host in hosts if channel in host.made]:
        able += [host for host in dead if host not in able]
    else:
        coming = [host for host in hosts if host.standing not in (Standing.RAISED, Standing.BLOCKED)]
        able = dead or ([host for host in hosts if host not in ended] if coming else hosts)
    return _nodes(able, seat)


def _may_call(hosts: list[Host], seat: Seat) -> list[Any]:
    """The threads of a rank that are still there, of evidence: any of them may make a call that is missing."""
    return _nodes([host for host in hosts if host.standing not in (Standing.RAISED, Standing.EXITED)] or hosts, seat)


def _nodes(hosts: list[Host], seat: Seat) -> list[Any]:
    return [("host", host.rank, host.thread) for host in hosts] or [("host", seat[0], "")]


def across_threads(situation: Situation, verdict: Verdict, closed: Collection[int] = frozenset()) -> Verdict:
    """A verdict on evidence, and what is left of it if it is a cycle that a thread outside of it may open.

    Calls of different threads have no order between them: what one thread of a rank lacks, another one may be about to
    call, though it never did so before. closed: see `wait_graph`.
    """
    if verdict.cls is not Class.CYCLE or all(host.ahead is not None for host in situation.hosts):
        return verdict
    graph = wait_graph(situation, strict=True, closed=closed)
    core = stuck(graph, free=[node for node in graph if not graph.out_degree(node)])
    if core:
        return cycle(situation, graph, core)
    involved = {rank for rank, _ in _lacking(situation)}
    free = [
        host
        for host in situation.hosts
        if host.rank in involved and host.standing not in (Standing.BLOCKED, Standing.RAISED, Standing.EXITED)
    ]
    who = " and ".join(dict.fromkeys(words.thread(host) for host in free[:3])) or "another thread"
    return verdict.undecided(f"{who} may still make the call that is missing; else {words.ring(verdict.say)}")


def _lacking(situation: Situation) -> list[Seat]:
    """The seats that are empty of calls that somebody waits in."""
    open_ = [m for m in situation.meetings.values() if any(not launch.done for launch, _ in m.arrived.values())]
    return [seat for meeting in open_ for seat in meeting.seats if seat not in meeting.arrived]


def stuck(graph: nx.DiGraph[Any], free: Collection[Any] = ()) -> set[Any]:
    """The nodes that the release fixpoint does not free. free: nodes without successors that are free to begin with.

    Each edge is looked at once.
    """
    left = {node: graph.out_degree(node) if data.get("mode") != "or" else 1 for node, data in graph.nodes(data=True)}
    freed, todo = set(free), deque(free)
    while todo:
        for waiter in graph.predecessors(todo.popleft()):
            left[waiter] -= 1
            if left[waiter] == 0 and waiter not in freed:
                freed.add(waiter)
                todo.append(waiter)
    return set(graph) - freed
