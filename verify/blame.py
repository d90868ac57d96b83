"""From a wait-for graph to one verdict: the class, who is to blame, and why, in words.

The order of blame: an exception or an exit that others wait for > calls that meet and differ > a cycle > a member that
never arrived, or is blocked outside > a device that stalls on what all peers finished > all arrived and equal (below).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import networkx as nx

from verify import words
from verify.events import Confidence
from verify.matching import NOBODY_KNOWS, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from verify.matching import Host, Meeting, Situation


INFERRED = Confidence.INFERRED
CREATION = "INIT"
RELAYED = frozenset({"BC", "broadcast", "reduce", "gather", "scatter"})
"""Operations that some members finish while others still wait for one another."""


class Class(StrEnum):
    """What is wrong. The classes that only the explorer and the engine report are part of the interface too."""

    EXCEPTION = "exception"
    MISMATCH = "mismatch"
    CYCLE = "cycle"
    MISSING = "missing"
    OUTSIDE = "outside"
    DEVICE_STALL = "device_stall"
    BELOW = "below"
    STARVATION = "starvation"
    INVARIANT = "invariant"
    RULE = "rule"
    TIMEOUT = "timeout"
    NONE = "none"


class Certainty(StrEnum):
    """How sure a verdict is."""

    CERTAIN = "certain"
    CONDITIONAL = "conditional"
    """Only if the kernels cannot be co-resident (or only in some orders of racing threads); `Verdict.condition`."""
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """One finding, or none. ranks: those blamed, sorted; empty where no majority tells who is the odd one.

    chain: who waits for whom, a line each. say: the diagnosis in one or two sentences. fix: what to change.
    condition: what the verdict depends on, if it is not unconditional.
    """

    cls: Class
    certainty: Certainty = Certainty.CERTAIN
    ranks: tuple[int, ...] = ()
    chain: tuple[str, ...] = ()
    say: str = "No alarm: every call meets its counterparts and completes."
    fix: str = ""
    condition: str = ""

    def only_if(self, condition: str) -> Verdict:
        """The same finding, conditional, on whatever it depended before as well."""
        both = f"{condition}, and {self.condition}" if self.condition else condition
        return replace(self, certainty=Certainty.CONDITIONAL, condition=both, say=f"Only if {both}: {self.plain}")

    @property
    def plain(self) -> str:
        """What it says, without the condition before it."""
        return self.say.removeprefix(f"Only if {self.condition}: ")

    def undecided(self, why: str) -> Verdict:
        """The same finding, not decided: nobody is blamed."""
        return replace(self, certainty=Certainty.UNDECIDED, ranks=(), condition=why, say=f"Undecided: {why}.")


def severity(verdict: Verdict) -> int:
    """Smaller is worse: the order of blame."""
    return list(Class).index(verdict.cls)


def judge(situation: Situation, graph: nx.DiGraph[Any], core: set[Any]) -> Verdict:
    """The verdict on a situation. graph: its wait-for graph. core: nodes stuck even if every root were free."""
    roots = _first(_roots(graph), situation, graph)
    for standing, cls in ((Standing.RAISED, Class.EXCEPTION), (Standing.EXITED, Class.MISSING)):
        if gone := [host for host, active in roots if active and host.standing is standing]:
            # A launcher kills the others when one has raised.
            gone = [host for host in gone if host.event is None or host.event.confidence is not INFERRED] or gone
            return absent(cls, gone, graph)
    if differing := [meeting for meeting in situation.meetings.values() if not meeting.agrees()]:
        return mismatch(differing, sides_of_all)
    if core:
        return cycle(situation, graph, core)
    hosts = [host for host, active in roots if active] or [host for host, _ in roots]
    known = [host for host in hosts if host.standing is not Standing.UNKNOWN]
    if late := [host for host in known if host.standing is not Standing.OUTSIDE]:
        return absent(Class.MISSING, late, graph)
    if outside := known or [host for host in situation.hosts if host.standing is Standing.OUTSIDE]:
        return absent(Class.OUTSIDE, outside, graph)
    # What a rank did not finish though its peers did is seen; what one does that left no evidence is not.
    settled = _settled(graph, situation) if situation.quiet else Verdict(Class.NONE)
    lost = any(host.thread == NOBODY_KNOWS for host in hosts)
    if hosts and (lost or settled.cls is not Class.DEVICE_STALL or not settled.ranks):
        names = words.ranks([host.rank for host in hosts])
        found = absent(Class.MISSING, hosts, graph)
        return replace(found, ranks=(), certainty=Certainty.UNDECIDED, condition=f"no evidence of {names}")
    return settled


def awaited(graph: nx.DiGraph[Any]) -> set[Any]:
    """The nodes that some host waits for, itself or through others: not calls that are open and that nobody needs."""
    todo = [node for node in graph if node[0] == "host" and graph.out_degree(node)]
    found: set[Any] = set()
    while todo:
        fresh = [node for node in graph.successors(todo.pop()) if node not in found]
        found.update(fresh)
        todo += fresh
    return found


def _first(roots: list[tuple[Host, bool]], situation: Situation, graph: nx.DiGraph[Any]) -> list[tuple[Host, bool]]:
    """Of evidence, the roots that somebody waits for, if there are any, and those that raised."""
    if any(host.ahead is not None for host in situation.hosts):
        return roots
    needed = awaited(graph)
    some = {id(host) for host, _ in roots if ("host", host.rank, host.thread) in needed}
    return [each for each in roots if id(each[0]) in some or each[0].standing is Standing.RAISED] if some else roots


def _roots(graph: nx.DiGraph[Any]) -> list[tuple[Host, bool]]:
    """Hosts that wait for nobody and are waited for, and whether by an operation that waits for nothing before it."""
    found = []
    for node, data in graph.nodes(data=True):
        if node[0] == "host" and not graph.out_degree(node) and graph.in_degree(node):
            found.append((data["host"], any(graph.nodes[op].get("active") for op in needing(graph, node))))
    return sorted(found, key=lambda each: (each[0].rank, each[0].thread))


def needing(graph: nx.DiGraph[Any], node: Any) -> list[Any]:
    """The operations that an actor keeps waiting, alone or as one of several threads."""
    before = list(graph.predecessors(node))
    return [op for one in before for op in (graph.predecessors(one) if one[0] == "any" else (one,))]


def place(meeting: Meeting) -> tuple[float, tuple[Any, ...]]:
    """Early meetings first: by where they stand in the order of their members, on average."""
    orders = [launch.order for launch, _ in meeting.arrived.values()]
    return (sum(orders) / len(orders), meeting.key)


class _Operations:
    """What is asked of operations for each of the hosts that keep them waiting, who may be thousands in one."""

    def __init__(self, graph: nx.DiGraph[Any]) -> None:
        self._graph = graph
        self._known: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self._waiters: dict[int, str] = {}

    def nearest(self, rank: int, op: Any) -> tuple[bool, bool, Any]:
        """Sorts first the operations in which somebody waits in front, and those that lack `rank` itself."""
        meeting: Meeting = self._graph.nodes[op]["meeting"]
        if (known := self._known.get(id(meeting))) is None:
            arrived = frozenset(seat[0] for seat in meeting.arrived)
            known = self._known[id(meeting)] = arrived, frozenset(meeting.key[0].members)
        arrived, members = known
        return (not self._graph.nodes[op].get("active"), rank in arrived or rank not in members, op)

    def waiters(self, op: Any) -> str:
        """See `verify.words.waiters`."""
        meeting: Meeting = self._graph.nodes[op]["meeting"]
        if id(meeting) not in self._waiters:
            self._waiters[id(meeting)] = words.waiters(meeting)
        return self._waiters[id(meeting)]


def absent(cls: Class, hosts: Sequence[Host], graph: nx.DiGraph[Any]) -> Verdict:
    """The verdict on hosts that left, are blocked outside or never came, for whom others wait."""
    ranks = tuple(sorted({host.rank for host in hosts}))
    alike: dict[tuple[str, str], list[Host]] = {}
    known = _Operations(graph)
    for host in hosts:
        # Others may wait for it in a call that its evidence may have lost.
        nodes = [("host", host.rank, host.thread), ("host", host.rank, NOBODY_KNOWS)]
        ops = [op for node in nodes if node in graph for op in needing(graph, node)]
        ops.sort(key=partial(known.nearest, host.rank))
        waiting = f"{known.waiters(ops[0])} for " if ops else ""
        alike.setdefault((waiting, words.standing(host).partition(", ")[2]), []).append(host)
    lines = [
        # Of whom nobody is seen to wait, it is the sentence itself.
        f"{waiting}{words.standings(same)}" if waiting else words.standings(same).replace(", which ", " ", 1)
        for (waiting, _), same in alike.items()
    ]
    say = f"{lines[0][0].upper()}{lines[0][1:]}." if lines else ""
    if len(lines) > 1:
        say = f"{words.ranks(ranks).capitalize()} never arrived: {lines[0]}."
    return Verdict(cls, ranks=ranks, chain=tuple(lines), say=say, fix=words.fix(cls.value, hosts))


def sides_of_all(meeting: Meeting) -> dict[str, list[int]]:
    return {" ".join(filter(None, side)): ranks for side, ranks in meeting.sides().items()}


def mismatch(meetings: Iterable[Meeting], told: Callable[[Meeting], dict[str, list[int]]]) -> Verdict:
    """The verdict on the first of some meetings of calls that differ. told: what was called -> the ranks that did."""
    meeting = min(meetings, key=place)
    sides = told(meeting)
    parts = [f"{side or 'no tag'} on {words.ranks(ranks)}" for side, ranks in sides.items()]
    odd = minority(sides.values(), of=len({seat[0] for seat in meeting.seats}))
    say = f"{words.number(meeting)} pairs calls that differ: {', '.join(parts)}."
    say += f" The odd one is {words.ranks(odd)}." if odd else " No majority tells which side is wrong."
    arrived = sorted(meeting.arrived.items(), key=itemgetter(0))
    seen = [seat for seat, (_, call) in arrived if call.confidence is not Confidence.INFERRED]
    lines = tuple(words.called(meeting, seat) for seat in seen)
    fix = words.CREATE if {call.operation for _, (_, call) in arrived} == {CREATION} else words.FIXES["mismatch"]
    return Verdict(Class.MISMATCH, ranks=odd, chain=lines, say=say, fix=fix)


def minority(sides: Iterable[Iterable[int]], of: int = 0) -> tuple[int, ...]:
    """The ranks outside the side that more than half are on; nobody where there is no such side.

    of: how many there are, if more than the sides show.
    """
    parties = sorted((sorted(set(side)) for side in sides), key=len, reverse=True)
    everybody = max(of, sum(map(len, parties)))
    if not parties or 2 * len(parties[0]) <= everybody:
        return ()
    return tuple(sorted(rank for party in parties[1:] for rank in party))


def cycle(situation: Situation, graph: nx.DiGraph[Any], core: set[Any]) -> Verdict:
    """The verdict on nodes that are stuck even if every root were free: a shortest ring of waits among them.

    Where some wait is concluded from what a rank has open, the ring is conditional.
    """
    nodes = shortest_cycle(graph.subgraph(core))
    chain = words.chain(situation, graph, nodes)
    tied = {node for node in nodes if node[0] != "op"}
    if any(graph.nodes[node]["meeting"].from_anybody for node in nodes if node[0] == "op"):
        # Any of its senders would open the ring: all of them are in it.
        tied |= {node for node in nx.descendants(graph, nodes[0]) & core if node[0] == "host"}
    members = tuple(sorted({graph.nodes[node]["rank"] for node in tied}))
    ops = [graph.nodes[node]["meeting"] for node in nodes if node[0] == "op"]
    odd, order = _out_of_order(ops)
    say = f"{words.ranks(members).capitalize()} wait in a ring: {'; '.join(chain)}."
    if len(members) == 1:
        say = f"{words.ranks(members).capitalize()} waits for itself: {'; '.join(chain)}."
    if odd:
        verb = "differs" if len(odd) == 1 else "differ"
        say += f" {words.ranks(odd).capitalize()} {verb} from the majority, which calls {order}."
    found = Verdict(Class.CYCLE, ranks=odd or members, chain=tuple(chain), say=say, fix=_turned(ops))
    presumed = {graph.nodes[node]["rank"] for node in nodes if node[0] == "host" and graph.nodes[node]["host"].presumed}
    if not presumed:
        return found
    return found.only_if(
        f"{words.ranks(presumed)} {'waits for what it has' if len(presumed) == 1 else 'wait for what they have'} open"
    )


def _turned(ops: Sequence[Meeting]) -> str:
    """What to do about a ring of calls: of ranks that all send first, or all receive, the order is one already."""
    ends = {seat[1] for meeting in ops for seat in meeting.arrived}
    if ops and len(ends) == 1 and all(meeting.key[0].kind == "pair" and meeting.arrived for meeting in ops):
        sends = ends == {"send"}
        first, second = ("sends", "receives") if sends else ("receives", "sends")
        return words.ALL_ALIKE.format(first=first, second=second)
    return words.FIXES["cycle"]


def _out_of_order(ops: Sequence[Meeting]) -> tuple[tuple[int, ...], str]:
    """The ranks that call two operations of the cycle in another order than most, and the order of most."""
    for first, second in [*pairwise(ops), (ops[-1], ops[0])]:
        sides: dict[bool, list[int]] = {}
        both = set(first.seats) & set(second.seats)
        for seat in both:
            made = [each.arrived.get(seat) for each in (first, second)]
            if any(each is not None and each[1].confidence is not Confidence.OBSERVED for each in made):
                continue  # a call that was concluded from elsewhere shows no order
            one, two = (None if each is None else each[0].order for each in made)
            if one != two:
                sides.setdefault(two is None or (one is not None and one < two), []).append(seat[0])
        if odd := minority(sides.values(), len(both)):
            early, late = (first, second) if len(sides.get(True, ())) > len(sides.get(False, ())) else (second, first)
            return odd, f"{words.operation(early)} before {words.operation(late)}"
    return (), ""


def shortest_cycle(graph: nx.DiGraph[Any], tried: int = 64) -> list[Any]:
    """A shortest cycle through one of the first `tried` actors of each strongly connected component."""
    best: list[Any] = []
    for component in nx.strongly_connected_components(graph):
        if len(component) < 2:
            continue
        part = graph.subgraph(component)
        actors = [node for node in component if node[0] not in ("op", "any")]
        for start in sorted(actors, key=lambda n: (n[1], n[0], n[2]))[:tried]:
            length, paths = nx.single_source_dijkstra(part, start, weight=None)
            backs = [node for node in part.predecessors(start) if node in length]
            end = min(backs, key=lambda node: (length[node], node))
            if not best or (len(paths[end]), paths[end][0][0] != "host") < (len(best), best[0][0] != "host"):
                best = paths[end]
    return [node for node in best if node[0] != "any"]


def _failed(meetings: Sequence[Meeting]) -> Verdict:
    """Others still wait in what raised an exception on some ranks, which went on without it."""
    ranks = tuple(sorted({rank for meeting in meetings for rank in meeting.failures()}))
    lines = [f"{words.waiters(meeting)}; {words.failure(meeting)}" for meeting in meetings]
    say = f"{lines[0][0].upper()}{lines[0][1:]}."
    return Verdict(Class.EXCEPTION, ranks=ranks, chain=tuple(lines), say=say, fix=words.FIXES["exception"])


def _parts(meeting: Meeting) -> bool:
    """Whether some members made a group, and others still wait to make theirs: no device has to do with that."""
    calls = {call.operation for _, call in meeting.arrived.values()}
    return calls == {CREATION} and any(launch.done for launch, _ in meeting.arrived.values())


def _different_groups(meeting: Meeting) -> Verdict:
    """Groups are made by all ranks in one order. One that is made on some and not on others is not the same one."""
    done = {seat[0]: call for seat, (launch, call) in sorted(meeting.arrived.items()) if launch.done}
    open_ = {seat[0]: call for seat, (launch, call) in sorted(meeting.arrived.items()) if not launch.done}
    sides = [f"{words.ranks(side)} {verb}{words.at(next(iter(side.values())))}" for side, verb in (
        (done, "made it"), (open_, "waits in it" if len(open_) == 1 else "wait in it"),
    )]  # fmt: skip
    lines = tuple(words.called(meeting, seat) for seat, (_, call) in sorted(meeting.arrived.items()) if call.site)
    say = f"{words.number(meeting)}, the creation of a group, parts its callers: {', '.join(sides)}."
    found = Verdict(Class.MISMATCH, chain=lines, say=say, fix=words.CREATE)
    return found.only_if("they do not create the same group: with other members, or in another order")


def left_inside(open_ops: Iterable[Meeting], situation: Situation) -> Verdict | None:
    """A rank that raised while a call of its own was open: whatever carried it ended with the process."""
    raised = {host.rank: host for host in situation.hosts if host.standing is Standing.RAISED and not host.thread}
    for meeting in open_ops:
        open_ = {seat[0] for seat, (launch, _) in meeting.arrived.items() if not launch.done}
        inside = sorted(open_ & raised.keys())
        if inside and open_ - raised.keys():
            others = words.ranks(open_ - raised.keys())
            wait = "waits" if len(open_ - raised.keys()) == 1 else "wait"
            at = {seat[0]: words.at(call) for seat, (_, call) in meeting.arrived.items()}
            lines = [
                f"{words.standing(raised[rank])}, was in {words.operation(meeting)}{at[rank]}, where {others} {wait}"
                for rank in inside
            ]
            say = f"{lines[0][0].upper()}{lines[0][1:]}."
            fix = words.fix(Class.EXCEPTION.value, [raised[rank] for rank in inside])
            return Verdict(Class.EXCEPTION, ranks=tuple(inside), chain=tuple(lines), say=say, fix=fix)
    return None


def _settled(graph: nx.DiGraph[Any], situation: Situation) -> Verdict:
    """All came and agree: a member that left in the middle, that did not finish what its peers did, or nobody did."""
    leaves = [data for node, data in graph.nodes(data=True) if node[0] == "op" and not graph.out_degree(node)]
    open_ops = sorted((data["meeting"] for data in leaves), key=place)
    if broken := [meeting for meeting in open_ops if meeting.failures()]:
        return _failed(broken)
    if parted := [meeting for meeting in open_ops if _parts(meeting)]:
        return _different_groups(parted[0])
    if left := left_inside(open_ops, situation):
        return left
    stalled: dict[int, Meeting] = {}
    relayed: list[Meeting] = []
    for meeting in open_ops:
        late = [seat[0] for seat, (launch, _) in meeting.arrived.items() if not launch.done]
        calls = {call.operation for _, call in meeting.arrived.values()}
        if 1 < len(late) < len(meeting.seats) and calls & RELAYED:
            relayed.append(meeting)
        elif len(late) < len(meeting.seats):
            stalled |= {rank: meeting for rank in late if rank not in stalled}
    if stalled:
        ranks = tuple(sorted(stalled))
        where = {rank: words.operation(stalled[rank]) for rank in ranks}
        lines = tuple(f"rank {rank} has not finished {where[rank]}, its peers have" for rank in ranks)
        say = f"The device of {words.ranks(ranks)} stalls: {'; '.join(lines[:2])}."
        return Verdict(Class.DEVICE_STALL, ranks=ranks, chain=lines, say=say, fix=words.FIXES["device_stall"])
    if relayed:
        say = f"{words.waiters(relayed[0])}, others have finished it: which of them keeps the rest is not known"
        return Verdict(Class.DEVICE_STALL, chain=(words.waiters(relayed[0]),)).undecided(say)
    if open_ops:
        first = open_ops[0]
        say = f"All members are in {words.operation(first)} with equal arguments: not a fault of order."
        return Verdict(Class.BELOW, chain=(words.waiters(first),), say=say, fix=words.FIXES["below"])
    return Verdict(Class.NONE)
