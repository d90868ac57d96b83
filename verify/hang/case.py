"""What is known about one stuck job, and what has been made of it so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kernel.record.foreign import HOST_MEDIA
from verify.blame import Class, judge
from verify.evidence import situation_of
from verify.hang.damage import lost_of
from verify.hang.restarts import kept_apart
from verify.hang.stacks import places_of, recorded, standings
from verify.live.threads import See, nothing_seen
from verify.matching import Standing
from verify.waitgraph import across_threads, stuck, wait_graph

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import networkx as nx

    from verify.blame import Verdict
    from verify.events import Event
    from verify.hang.stacks import Place
    from verify.matching import Host, Launch, Situation
    from verify.readers.found import Found


@dataclass(frozen=True)
class Case:
    """found: the evidence. quiet: the job has not moved for longer than any operation takes.

    everybody: all ranks, sorted. where: the places of main threads. known: ranks whose own record says what they wait
    in, whatever their stack shows. situation, graph, core: where everybody stands, who waits for whom, and the nodes
    that wait for each other. verdict: the one finding. look: sees what the processes of ranks do now, if they are here.
    """

    found: Found
    quiet: bool
    everybody: tuple[int, ...]
    where: dict[int, Place]
    known: frozenset[int]
    situation: Situation
    graph: nx.DiGraph[Any]
    core: frozenset[Any]
    verdict: Verdict
    look: See = nothing_seen

    @classmethod
    def of(cls, found: Found, quiet: bool, look: See = nothing_seen) -> Case:
        """As the wait-for graph alone judges."""
        found = replace(found, events=kept_apart(found.events))
        found = replace(found, unsure=found.unsure | lost_of(found))
        where = places_of(found)
        everybody = tuple(sorted({*found.expected, *found.present, *where}))
        known, where = recorded(found, where)
        told = standings(found.events, {rank: place for rank, place in where.items() if rank not in known})
        situation = situation_of([*found.events, *told], everybody, quiet, found.present, found.unsure)
        graph = wait_graph(situation)
        core = core_of(graph)
        verdict = judge(situation, graph, set(core))
        if verdict.cls is Class.CYCLE:
            tied = {host.rank for host in situation.hosts if host.standing is Standing.BLOCKED}
            verdict = across_threads(situation, verdict, closed(look, tied, situation))
        return cls(found, quiet, everybody, where, known, situation, graph, core, verdict, look)

    def with_(self, events: Iterable[Event]) -> Case:
        """The same with these events after those of the evidence; the verdict is the old one."""
        found = self.found
        return self.in_(situation_of([*found.events, *events], self.everybody, self.quiet, found.present, found.unsure))

    def in_(self, situation: Situation) -> Case:
        """The same in another situation; the verdict is the old one."""
        graph = wait_graph(situation)
        return replace(self, situation=situation, graph=graph, core=core_of(graph))

    def hosts(self, standing: Standing) -> list[Host]:
        """The host threads that stand so."""
        return [host for host in self.situation.hosts if host.standing is standing]

    @property
    def absent(self) -> list[int]:
        """Ranks of which there is neither a record nor a stack."""
        return sorted(set(self.everybody) - self.found.present - set(self.where))

    @property
    def open_ranks(self) -> list[int]:
        """Ranks with calls that are not over."""
        return sorted({launch.rank for mine in self.situation.launches.values() for launch in mine if not launch.done})


def closed(look: See, ranks: Collection[int], situation: Situation) -> frozenset[int]:
    """Those of `ranks` in whose processes nothing happens before one of the calls ends that their threads wait in."""
    return frozenset(rank for rank, now in look(ranks).items() if now.closed and not unattended(situation, rank))


def unattended(situation: Situation, rank: int) -> list[Launch]:
    """Calls of a rank on its host that are not over and that no thread of it waits for: what was chained to one runs
    when it ends, on a thread of torch, and may let any thread go on.
    """
    hosts = [host for host in situation.hosts if host.rank == rank and not host.presumed]
    waited = {id(launch) for host in hosts for launch in host.waits}
    return [
        launch
        for launch in situation.launches.get(rank, ())
        if not launch.done and id(launch) not in waited and launch.event.medium in HOST_MEDIA - {"host"}
    ]


def core_of(graph: nx.DiGraph[Any]) -> frozenset[Any]:
    """The nodes that stay stuck even if every root were free."""
    return frozenset(stuck(graph, free=[node for node in graph if not graph.out_degree(node)]))
