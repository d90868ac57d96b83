"""Evidence of a stuck job -> one diagnosis: what is wrong, how sure that is, and what could not be known.

The wait-for graph judges (`verify.waitgraph`, `verify.blame`). Added here is what only evidence brings: what the graph
cannot see, as sizes that no operation allows and stacks of ranks that recorded nothing (`verify.hang.findings`); and
what makes a verdict less certain, as evidence that is absent or has lost calls, media that it does not show, and ranks
that may yet come (`verify.hang.doubts`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from kernel.program import Op
from verify import words
from verify.blame import Certainty, Class, Verdict
from verify.hang.callers import callers
from verify.hang.case import Case
from verify.hang.doubts import weighed
from verify.hang.findings import FINDINGS
from verify.hang.stacks import At
from verify.live.children import EXITED
from verify.live.threads import See, nothing_seen
from verify.matching import NOBODY_KNOWS, Situation
from verify.readers.found import ENDED, LOOK_AGAIN

if TYPE_CHECKING:
    import networkx as nx

    from verify.hang.stacks import Place
    from verify.readers.found import Found

DISPATCH: Final = str(Op.DISPATCH)
"""The operation whose splits are what each member sends the rank, as `kernel.journal` writes them."""


@dataclass(frozen=True)
class Diagnosis:
    """The one report. unknown: what could not be told, a line each.

    situation, graph, core, places: what it rests on, for the lanes and the page: where everybody stands, the wait-for
    graph, its nodes that wait for each other, and where the stacks say that hosts stand. dark: ranks that left no
    record of calls.
    """

    verdict: Verdict
    source: str = ""
    unknown: tuple[str, ...] = ()
    places: dict[int, Place] = field(default_factory=dict)
    situation: Situation = field(default_factory=lambda: Situation([], {}, {}))
    graph: nx.DiGraph[Any] | None = None
    core: frozenset[Any] = frozenset()
    dark: frozenset[int] = frozenset()

    @property
    def code(self) -> int:
        """The exit code: 0 nothing wrong, 1 a fault (certain, or on a condition), 3 undecided."""
        if self.verdict.certainty is Certainty.UNDECIDED:
            return 3
        return 0 if self.verdict.cls is Class.NONE else 1

    @property
    def condition(self) -> str:
        """What a conditional verdict depends on, where its sentence does not say it; else nothing."""
        found = self.verdict
        return found.condition if found.certainty is Certainty.CONDITIONAL and found.condition not in found.say else ""

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        found = self.verdict
        say = f"{found.say} Only if {found.condition}." if self.condition else found.say
        return {
            "class": str(found.cls), "certainty": str(found.certainty), "ranks": list(found.ranks),
            "chain": list(found.chain), "say": say, "fix": found.fix, "unknown": list(self.unknown),
        }  # fmt: skip


def diagnose_found(found: Found, quiet: bool = True, look: See = nothing_seen) -> Diagnosis:
    """The diagnosis of what was found. quiet: the job has not moved for longer than any operation takes.

    look: sees what the processes of some ranks do now (`verify.live.threads`); asked only where that matters.
    """
    case = Case.of(found, quiet, look)
    for finding in FINDINGS:
        case = finding(case) or case
    verdict = _counted(_placed(_with_children(_called(weighed(case), case), case), case), case)
    dark = frozenset(case.everybody) - found.present
    unknown = _unknown(case, verdict)
    return Diagnosis(verdict, found.source, unknown, case.where, case.situation, case.graph, case.core, dark)


def _unknown(case: Case, verdict: Verdict) -> tuple[str, ...]:
    """What could not be told, a line each."""
    unknown = [*case.found.unknown]
    if verdict.certainty is Certainty.CERTAIN and verdict.cls is not Class.NONE:
        # What is certain stays so, however lately somebody moved.
        unknown = [line for line in unknown if not line.endswith(LOOK_AGAIN)]
    if case.absent:
        unknown.insert(0, f"no dump, log or stack from {words.ranks(case.absent)}")
    unclear = [place for place in case.where.values() if place.at is At.UNCLEAR and place.rank not in case.known]
    unknown += [f"what rank {place.rank} waits for at {place.spot}: its stack ends there" for place in unclear[:2]]
    if lost := sum(stack.rank is None for stack in case.found.stacks):
        unknown.append(f"the rank of {lost} stack{'s' if lost > 1 else ''}: not used")
    return tuple(unknown)


def _counted(verdict: Verdict, case: Case) -> Verdict:
    """With the rows that each rank knows to come in a dispatch that it has not finished."""
    if verdict.cls is Class.NONE:
        return verdict
    lines = [
        f"rank {launch.rank} is to get {words.rows(call)} in {words.operation(meeting)}"
        for mine in case.situation.launches.values()
        for launch in mine
        if not launch.done
        for meeting in launch.meetings
        for one, call in meeting.arrived.values()
        if one is launch and call.operation == DISPATCH and call.splits
    ]
    return replace(verdict, chain=(*verdict.chain, *lines[:8]))


def _in(say: str, remark: str) -> bool:
    """Whether the exception that a remark is about is in the sentence already."""
    return remark.startswith(ENDED) and remark.partition(" ended by ")[2].partition(" at ")[0] in say


def _called(verdict: Verdict, case: Case) -> Verdict:
    """With the lines from which ranks came to one line that all of them stand at."""
    lines = () if verdict.cls is Class.NONE else callers(verdict, case)
    return replace(verdict, chain=(*verdict.chain, *lines))


def _with_children(verdict: Verdict, case: Case) -> Verdict:
    """With the child processes of ranks that keep others waiting: what they were to do may be what is lacking."""
    if verdict.cls not in (Class.MISSING, Class.OUTSIDE) or not verdict.ranks:
        return verdict
    seen = case.look(verdict.ranks)
    lines = [f"rank {rank}: {line}" for rank in verdict.ranks if rank in seen for line in seen[rank].children]
    if verdict.cls is Class.OUTSIDE and any(EXITED in line for line in lines):
        verdict = replace(verdict, fix=words.CHILD)
    return replace(verdict, chain=(*verdict.chain, *lines[:4]))


def _placed(verdict: Verdict, case: Case) -> Verdict:
    """With the line at which each blamed rank stands, unless it is in the sentence already, and what was said of it."""
    where, remarks = case.where, case.found.remarks
    threaded = {host.rank for host in case.situation.hosts if host.thread.strip(NOBODY_KNOWS)}
    if verdict.cls is not Class.NONE:
        mine = [(rank, text) for rank, text in remarks if rank in verdict.ranks or text.startswith(ENDED)]
        mine.sort(key=lambda each: not each[1].startswith(ENDED))
        said = tuple(dict.fromkeys(f"rank {rank}: {text}" for rank, text in mine if not _in(verdict.say, text)))
        verdict = replace(verdict, chain=(*verdict.chain, *said[:6]))
    lines = [
        f"{f'the main thread of rank {rank}' if rank in threaded else where[rank].who} stands at {where[rank].spot}"
        for rank in verdict.ranks
        if rank in where and where[rank].line is not None and where[rank].spot not in verdict.say
    ]
    if not lines or verdict.cls is Class.NONE:
        return verdict
    told = "; ".join(lines[:3])
    return replace(verdict, say=f"{verdict.say} {told[0].upper()}{told[1:]}.", chain=(*verdict.chain, *lines))
