"""What is certainly wrong with a run that goes on: two looks at its rings, and the graph that `turnstile hang` judges.

A look reads one ring after the other, so that what it shows of two ranks was never true at one moment. Why a ring of
waits that it shows is certain all the same:

1. *One moment.* Of each rank in the ring nothing was recorded between the last look and this one (but remarks, which
   a loop makes that only waits). So each stood the whole time, from its reading in the last look to that in this one,
   where this look shows it; and at the moment when the last look had ended and this one had not begun, all of them
   stood so together. Only events that both looks read whole count for this (`Facts.clear`).
2. *The record is behind by the right half.* A rank records that it enqueues, launches or arrives before it does, and
   that it left or finished afterwards. So a call that is not in the record was not made, while a wait that is open in
   the record may be over. But the first member of the ring to be through would have needed a call that the next one
   makes after its own wait, and that is not in the record: none was first. (The same argument bears readings at
   different moments, so that 1 is there for what 3 assumes, and against a mistake in either.)
3. *Nothing else helps.* A stream takes its work in order, so a launch behind the ring's is stuck as it is. A host may
   have more tasks than the one that waits: a turn of several tasks could make the lacking call while another of them
   waits. They wait for what the device does, for the exchange or for P to stand at a boundary; so a host counts as
   stuck only if everything that its device has open is stuck too, and no code of a submission is running
   (`Facts.busy`). A turn that sleeps for a while, alone among ranks, could still be wronged; such a policy is refused
   by `turnstile check`.
4. *Nobody comes from outside.* No member of the ring has ended, was given up, or is unknown; an AND of waits needs all
   of them, so further waits of a member change nothing. The graph's release fixpoint says which waits these are.

A ring so closed stays: that is what deadlock means, and why two looks suffice, however far apart. Whether a process is
stopped by a signal plays no part, nor does silence: a slow or stopped rank makes no call, and closes no ring by that.

Besides rings: a rank that raised, or ended, while others wait in what it has not called; and calls that meet and
differ. These are facts that no later event takes back. Where a rank gave up because of another one's end it is a
consequence, and never blamed.

A job of another program (`turnstile.record.install`) makes no promise to come back, so there is one case more: a rank
that others wait for and that lives, is idle and will not go on by itself, while all ranks of the job stand
(`verify.live.installed`). A slow rank, one that computes, reads or waits for input is none of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify.arguments import misfit
from verify.blame import Certainty, Class, shortest_cycle
from verify.hang.diagnosis import diagnose_found
from verify.matching import Standing
from verify.waitgraph import stuck

if TYPE_CHECKING:
    from collections.abc import Collection

    from verify.hang.diagnosis import Diagnosis
    from verify.live.rings import Facts, Look


class Check:
    """Takes one look after the other; `diagnosis` is the first certain fault, or None as long as there is none.

    It stays the first: what follows from a fault is no news. newest: what the newest look shows, certain or not; None
    where nothing stood still. ring: a ring of waits that is certain in it. Looks must not overlap: each begins after
    the one before it has ended.
    """

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None
        self.newest: Diagnosis | None = None
        self.ring: list[Any] = []
        self._before: dict[int, Facts] = {}

    def take(self, look: Look, *, always: bool = False) -> Diagnosis | None:
        """The fault that has become certain with this look, once; None otherwise. always: make `newest` anyway."""
        before, self._before = self._before, look.facts
        self.newest, self.ring = None, []
        still = {rank for rank, facts in look.facts.items() if rank in before and _stands(before[rank], facts)}
        # What is certain needs a rank that stands, or one that has ended: a run that moves costs no graph.
        if not always and (self.diagnosis is not None or not still):
            return None
        quiet = look.idle is not None and look.idle <= still
        self.newest = diagnosis = diagnose_found(look.found, quiet, look.see)
        self.ring = ring_of(diagnosis, look, still) if diagnosis.verdict.certainty is Certainty.CERTAIN else []
        if self.diagnosis is not None or not (self._fact(diagnosis, look, still) or self.ring):
            return None
        self.diagnosis = diagnosis
        return diagnosis

    @staticmethod
    def _fact(diagnosis: Diagnosis, look: Look, still: Collection[int]) -> bool:
        """Whether a diagnosis without presumptions tells of something that no later event takes back."""
        verdict = diagnosis.verdict
        if verdict.certainty is not Certainty.CERTAIN or verdict.condition:
            return False
        if verdict.cls in (Class.EXCEPTION, Class.MISSING, Class.OUTSIDE):
            hosts = diagnosis.situation.hosts
            gone = {host.rank for host in hosts if host.standing in (Standing.RAISED, Standing.EXITED)} & set(still)
            gone |= (look.idle or frozenset()) & set(still)
            blamed = set(verdict.ranks)
            return bool(blamed) and blamed <= gone and not any(look.facts[rank].gave_up for rank in blamed)
        # By other lines alone they may be the same call: that is a hint, and no alarm.
        if verdict.cls is not Class.MISMATCH:
            return False
        situation = diagnosis.situation
        return any(not each.agrees() for each in situation.meetings.values()) or misfit(situation) is not None


def _stands(before: Facts, now: Facts) -> bool:
    return before.number == now.number and before.clear and now.clear


def ring_of(diagnosis: Diagnosis, look: Look, still: Collection[int]) -> list[Any]:
    """A certain ring of waits in the graph of a diagnosis, actor and operation in turn; [] where there is none."""
    graph, situation = diagnosis.graph, diagnosis.situation
    if graph is None or not diagnosis.core:
        return []
    stuck_ops = {node for node in diagnosis.core if node[0] == "op"}

    def held(rank: int) -> bool:
        """Whether a host of this rank cannot go on by what its own device does."""
        mine = (launch for launch in situation.launches.get(rank, ()) if not launch.done)
        return not look.facts[rank].busy and all(
            ("op", meeting.key) in stuck_ops for launch in mine for meeting in launch.meetings
        )

    # Hosts that may move after all are let go, with everybody who waits for them alone.
    ranks = {graph.nodes[node]["rank"] for node in graph if node[0] != "op"}
    firm = {rank for rank in ranks if rank in still and rank in look.facts and not look.facts[rank].ended}
    loose = {
        node
        for node in graph
        if (node[0] == "host" and not (graph.nodes[node]["rank"] in firm and held(graph.nodes[node]["rank"])))
        or (node[0] == "queue" and graph.nodes[node]["rank"] not in firm)
    }
    left = graph.copy()
    left.remove_edges_from([edge for node in loose for edge in graph.out_edges(node)])
    core = stuck(left, free=[node for node in left if not left.out_degree(node)])
    return shortest_cycle(left.subgraph(core)) if core else []

