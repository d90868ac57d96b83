"""Evidence of a stuck job -> one diagnosis: what is wrong, how sure that is, and what could not be known.

The wait-for graph judges (`verify.waitgraph`, `verify.blame`). Added here is what only evidence brings: stacks of ranks
that recorded nothing, sizes that no operation allows, ranks whose evidence is absent or may have lost calls, and media
that it does not show. Each of these can only make a verdict less certain, or find what the graph cannot see.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verify import words
from verify.arguments import misfit
from verify.blame import Certainty, Class, Verdict, awaited, judge, shortest_cycle
from verify.events import Confidence
from verify.evidence import situation_of
from verify.hang.alone import for_a_key, odd_one_out
from verify.hang.stacks import At, for_anybody, places, recorded, standings
from verify.matching import NOBODY_KNOWS, Situation, Standing
from verify.readers.found import ENDED
from verify.waitgraph import stuck, wait_graph

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import networkx as nx

    from verify.events import Event
    from verify.hang.stacks import Place
    from verify.readers.found import Found


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


def diagnose_found(found: Found, quiet: bool = True) -> Diagnosis:
    """The diagnosis of what was found. quiet: the job has not moved for longer than any operation takes."""
    where = places(found.stacks, found.lively)
    told = frozenset(where)
    everybody = sorted(found.expected | found.present | told)
    present = found.present | told
    known, where = recorded(found, where)
    standing = {rank: place for rank, place in where.items() if rank not in known}
    events = [*found.events, *standings(found.events, standing)]
    situation = situation_of(events, everybody, quiet, found.present, found.unsure)
    graph = wait_graph(situation)
    core = _core(graph)
    verdict = judge(situation, graph, core)
    if verdict.cls not in (Class.EXCEPTION, Class.MISMATCH) and not _left(verdict, situation):
        verdict = misfit(situation) or verdict
    absent = sorted(set(everybody) - present)
    if verdict.cls in (Class.NONE, Class.OUTSIDE) or verdict.certainty is Certainty.UNDECIDED:
        ring = _ring(found, everybody, where, quiet, known)
        if ring is not None:
            verdict, situation, graph, core = ring
        elif (odd := odd_one_out(found, everybody)) is not None:
            verdict = odd
    if verdict.cls is Class.BELOW and (crossed := _crossed(situation)) is not None:
        verdict, situation, graph, core = crossed
    verdict = _weighed(verdict, found, situation, graph, absent, where)
    if verdict.cls is Class.OUTSIDE and verdict.certainty is Certainty.CERTAIN and not _waited_for(graph):
        verdict = _nobody_waits(verdict, situation, {r: p for r, p in where.items() if r not in known})
    verdict = _late(_if_needed(verdict, found, situation, graph), found, situation)
    unknown = [*found.unknown]
    dark = frozenset(everybody) - found.present
    if absent:
        unknown.insert(0, f"no dump, log or stack from {words.ranks(absent)}")
    unclear = [place for place in where.values() if place.at is At.UNCLEAR and place.rank not in known]
    unknown += [f"what rank {place.rank} waits for in {place.site}: its stack ends there" for place in unclear[:2]]
    if lost := sum(stack.rank is None for stack in found.stacks):
        unknown.append(f"the rank of {lost} stack{'s' if lost > 1 else ''}: not used")
    if verdict.certainty is Certainty.UNDECIDED:
        verdict = replace(verdict, ranks=())
    threaded = {host.rank for host in situation.hosts if host.thread.strip(NOBODY_KNOWS)}
    verdict = _placed(verdict, where, found.remarks, threaded)
    return Diagnosis(verdict, found.source, tuple(unknown), where, situation, graph, frozenset(core), dark)


def _core(graph: nx.DiGraph[Any]) -> set[Any]:
    return stuck(graph, free=[node for node in graph if not graph.out_degree(node)])


def _left(verdict: Verdict, situation: Situation) -> bool:
    """Whether the ranks blamed have left the job, which comes before everything."""
    return any(host.standing is Standing.EXITED and host.rank in verdict.ranks for host in situation.hosts)


Ring = tuple[Verdict, Situation, "nx.DiGraph[Any]", set[Any]]


def _ring(
    found: Found, everybody: Sequence[int], where: dict[int, Place], quiet: bool, known: frozenset[int]
) -> Ring | None:
    """A ring through hosts of which only the stack tells that they wait for another rank, whichever that is.

    A key of the store is set by one of the ranks; a device without a known operation waits for one of those that share
    a group with it. If every one of these waits for the host in turn, it does not matter which it is.
    """
    open_ = {event.rank for event in found.events if event.calls and event.state != "completed"}
    loose: dict[int, list[Event]] = {}
    for rank, place in where.items():
        if place.at is At.STORE:
            loose[rank] = for_anybody(place, everybody)
        elif rank in known:
            continue
        elif place.at in (At.DEVICE, At.COLLECTIVE) and rank not in open_ | found.whole:
            loose[rank] = for_anybody(place, _companions(found.events, rank) or everybody)
    loose = {rank: mine for rank, mine in loose.items() if mine}
    if not loose:
        return None
    others = standings(found.events, {rank: place for rank, place in where.items() if rank not in {*loose, *known}})
    events = [*found.events, *others, *(event for mine in loose.values() for event in mine)]
    situation = situation_of(events, everybody, quiet, found.present, found.unsure)
    graph = wait_graph(situation)
    core = _core(graph)
    if not any(("host", rank, "") in core for rank in loose):
        keyed = for_a_key(situation, graph, {rank: where[rank] for rank in loose})
        return None if keyed is None else (keyed, situation, graph, core)
    nodes = shortest_cycle(graph.subgraph(core))
    actors = [node for node in nodes if node[0] != "op"]
    ranks = tuple(sorted({graph.nodes[node]["rank"] for node in actors}))
    tied = sorted(set(ranks) & set(loose))
    if not tied or (set(ranks) == set(tied) and all(where[rank].at is not At.STORE for rank in tied)):
        # Calls of which only stacks tell may be one and the same.
        return None
    first = min(range(len(actors)), key=lambda n: graph.nodes[actors[n]]["rank"])
    turned = actors[first:] + actors[:first]
    chain = tuple(
        _link(graph, actor, turned[(n + 1) % len(turned)], nodes[nodes.index(actor) + 1], where)
        for n, actor in enumerate(turned)
    )
    say = f"{words.ranks(ranks).capitalize()} wait in a ring: {'; '.join(chain)}."
    verb = "waits" if len(tied) == 1 else "wait"
    condition = f"what {words.ranks(tied)} {verb} for is up to another rank of the job"
    cycle = Verdict(Class.CYCLE, ranks=ranks, chain=chain, say=say, fix=words.FIXES["cycle"])
    return replace(cycle, certainty=Certainty.CONDITIONAL, condition=condition), situation, graph, core


def _crossed(situation: Situation) -> Ring | None:
    """The ring of calls that all members made in different orders, if the device runs one kernel at a time; or None."""
    open_ = [launch for mine in situation.launches.values() for launch in mine if not launch.done]
    if any(launch.event.confidence is Confidence.INFERRED for launch in open_):
        return None
    tight = replace(situation, exclusive=True)
    graph = wait_graph(tight)
    core = _core(graph)
    verdict = judge(tight, graph, core)
    if verdict.cls is not Class.CYCLE:
        return None
    return verdict.only_if("the device holds one communication kernel at a time"), tight, graph, core


def _companions(events: Sequence[Event], rank: int) -> set[int]:
    """Who shares a group with `rank`."""
    members = {call.communicator.members for event in events for call in event.calls if call.communicator is not None}
    return {other for each in members if rank in each for other in each} - {rank}


def _link(graph: nx.DiGraph[Any], actor: Any, needs: Any, op: Any, where: dict[int, Place]) -> str:
    rank, other = graph.nodes[actor]["rank"], graph.nodes[needs]["rank"]
    meeting = graph.nodes[op]["meeting"]
    place = where.get(rank)
    if meeting.key[0].name == f"? {At.STORE}" and place is not None:
        return f"rank {rank} waits at {place.site} for a key of the store, which rank {other} has not set"
    if meeting.key[0].name.startswith("?") and place is not None:
        what = "for its device" if place.at is At.DEVICE else f"in {place.what}"
        return f"rank {rank} waits at {place.site} {what}, which needs rank {other}"
    return f"rank {rank} waits in {words.operation(meeting)}, which needs rank {other}"


def _weighed(
    verdict: Verdict,
    found: Found,
    situation: Situation,
    graph: nx.DiGraph[Any],
    absent: Sequence[int],
    where: dict[int, Place],
) -> Verdict:
    """The verdict with the certainty that the evidence allows."""
    if verdict.cls is Class.MISSING and verdict.certainty is Certainty.UNDECIDED:
        lost = sorted(node[1] for node in graph if node[0] == "host" and node[2] == NOBODY_KNOWS)
        if lost:
            why = f"the dump of {words.ranks(lost)} holds no call of that group, and may have lost it"
            return _undecided(verdict, why)
        if absent:
            return _undecided(verdict, f"no dump from {words.ranks(absent)}")
        silent = {host.rank for host in situation.hosts if host.standing is Standing.UNKNOWN}
        if early := silent & found.lively:
            return _undecided(verdict, f"{words.ranks(early)} moved a moment ago and may yet come")
    if verdict.cls in (Class.BELOW, Class.DEVICE_STALL) and found.lively:
        return _undecided(verdict, f"{words.ranks(found.lively)} moved a moment ago, so that nothing may be stuck")
    if verdict.cls is Class.BELOW and not _all_seen(found, situation):
        blind = "".join(f": {line}" for line in found.unknown if "graph replays" in line)
        alike = verdict.say.partition(": not a fault")[0]
        say = f"Undecided: {alike[0].lower()}{alike[1:]}, so that what keeps them is not in this evidence{blind}."
        return replace(verdict, certainty=Certainty.UNDECIDED, condition="not every wait is recorded", say=say)
    if verdict.cls is Class.NONE and verdict.certainty is not Certainty.UNDECIDED:
        if absent:
            idle = words.ranks(found.present) if found.present else ""
            return verdict.undecided(f"no dump from {words.ranks(absent)}" + f", nothing open on {idle}" * bool(idle))
        if waiting := [host for host in situation.hosts if host.standing is Standing.UNKNOWN]:
            who = words.ranks(host.rank for host in waiting)
            return verdict.undecided(f"what {who} waits for is not in the evidence{words.at(waiting[0].event)}")
        if lost := [host for host in situation.hosts if host.standing is Standing.RAISED]:
            return verdict.undecided(f"no call is open that waits for {words.standing(lost[0])}")
        if stackless := sorted(set(where) - found.present):
            return verdict.undecided(f"of {words.ranks(stackless)} there is a stack only, which does not show a wait")
        if why := found.doubt or _ahead(found, situation):
            return verdict.undecided(why)
        broken = [meeting for meeting in situation.meetings.values() if meeting.failures()]
        failed = f"of {words.operation(broken[-1])}, {words.failure(broken[-1])}" if broken else ""
        if found.idle:
            does = "does" if len(found.idle) == 1 else "do"
            why = f"no call is open, and what {words.ranks(found.idle)} {does} is not in the record"
            return verdict.undecided(f"{why}; {failed}" if failed else why)
        if not any(event.calls for event in found.events):
            what = "no call, and stacks alone do not show that calls meet" if found.stacks else "no call and no stack"
            return verdict.undecided(f"the evidence holds {what}")
        if failed:
            return replace(verdict, say=f"No alarm: nobody waits for another rank. Not all calls completed: {failed}.")
    return verdict


NEEDED = (Class.MISSING, Class.OUTSIDE, Class.BELOW, Class.DEVICE_STALL)
"""What is wrong only if somebody needs the call that is open."""


def _if_needed(verdict: Verdict, found: Found, situation: Situation, graph: nx.DiGraph[Any]) -> Verdict:
    """On a condition where no thread waits for the calls that are open, as their records show.

    Such a call is on threads or queues of its own, and keeps nobody before its host asks for it.
    """
    idle = sorted({launch.rank for mine in situation.launches.values() for launch in mine if not launch.done})
    if verdict.cls not in NEEDED or verdict.certainty is not Certainty.CERTAIN or not idle:
        return verdict
    needed = awaited(graph)
    missing = verdict.cls in (Class.MISSING, Class.OUTSIDE)
    blamed = [node for node in needed if not missing or (node[0] == "host" and node[1] in verdict.ranks)]
    if blamed or not found.whole.issuperset(idle):
        return verdict
    polls, has, its = ("polls", "it has", "its") if len(idle) == 1 else ("poll", "they have", "their")
    mine = f"no thread of {words.ranks(idle)} waits for what {has} open"
    if not missing:
        return Verdict(Class.NONE).undecided(f"no call that is open lacks a member, and {mine}")
    if moving := found.lively & {*idle, *verdict.ranks}:
        return _undecided(verdict, f"{words.ranks(moving)} moved a moment ago, and {mine}")
    return verdict.only_if(f"{words.ranks(idle)} {polls} for what {has} open, which none of {its} threads waits for")


def _late(verdict: Verdict, found: Found, situation: Situation) -> Verdict:
    """On a condition where a rank that is missing may be running: never and not yet look alike."""
    if verdict.cls is not Class.MISSING or verdict.certainty is Certainty.UNDECIDED:
        return verdict
    loose = {host.rank for host in situation.hosts if host.standing is Standing.ELSEWHERE} & found.idle
    late = loose & set(verdict.ranks)
    if not late:
        return verdict
    condition = f"{words.ranks(late)} {'does' if len(late) == 1 else 'do'} not come after all"
    if verdict.condition:
        condition = f"{verdict.condition}, and {condition}"
    return replace(verdict, certainty=Certainty.CONDITIONAL, condition=condition, fix=words.LATE)


def _waited_for(graph: nx.DiGraph[Any]) -> bool:
    """Whether anybody waits for a host."""
    return any(node[0] == "host" and graph.in_degree(node) for node in graph)


def _nobody_waits(verdict: Verdict, situation: Situation, where: dict[int, Place]) -> Verdict:
    """Blocked outside of calls, of which none is open: perhaps the job has nothing to do, or a rank is in a collective
    that torch makes below the record.
    """
    host = next(host for host in situation.hosts if host.standing is Standing.OUTSIDE)
    what = f"{host.event.operation}{words.at(host.event)}" if host.event is not None else "code of its own"
    verb = "is" if len(verdict.ranks) == 1 else "are"
    who = f"{words.ranks(verdict.ranks)} {verb} outside of calls, rank {host.rank}"
    if inside := [place for place in where.values() if place.at is At.COLLECTIVE]:
        place = inside[0]
        call = f"rank {place.rank} is in {place.what} at {place.site}, which the record does not show"
        return Verdict(Class.NONE).undecided(f"{call}, nor who else must come; {who} in {what}")
    open_ = any(not launch.done for mine in situation.launches.values() for launch in mine)
    none = "no call that is open lacks a member" if open_ else "no call is open"
    return Verdict(Class.NONE).undecided(f"{none}, so nobody waits for another; {who} in {what}")


def _ahead(found: Found, situation: Situation) -> str:
    """A call that some have finished and that a member has not made, as far as its own evidence goes."""
    for meeting in situation.meetings.values():
        done = [seat[0] for seat, (launch, _) in meeting.arrived.items() if launch.done]
        lacking = [seat[0] for seat in meeting.seats if seat not in meeting.arrived]
        late = [r for r in lacking if r in found.present and (r, meeting.key[0].name) not in found.unsure]
        if done and late and meeting.key[0].kind == "collective":
            what = f"{words.ranks(done)} finished {words.operation(meeting)}"
            if meeting.failures():
                what = f"of {words.operation(meeting)}, {words.failure(meeting)}"
                return f"{what}; {words.ranks(late)} did not call it or called it after the dump"
            return f"{what}, which {words.ranks(late)} did not call or called after the dump"
    return ""


def _undecided(verdict: Verdict, why: str) -> Verdict:
    known = f": {verdict.chain[0]}" if verdict.chain else ""
    return replace(
        verdict, certainty=Certainty.UNDECIDED, condition=why, say=f"Undecided, because {why}{known}.", fix=verdict.fix
    )


def _all_seen(found: Found, situation: Situation) -> bool:
    ranks = {launch.rank for mine in situation.launches.values() for launch in mine if not launch.done}
    return bool(ranks) and ranks <= found.whole


def _in(say: str, remark: str) -> bool:
    """Whether the exception that a remark is about is in the sentence already."""
    return remark.startswith(ENDED) and remark.partition(" ended by ")[2].partition(" at ")[0] in say


def _placed(
    verdict: Verdict, where: dict[int, Place], remarks: Sequence[tuple[int, str]], threaded: Collection[int]
) -> Verdict:
    """With the line at which each blamed rank stands, unless it is in the sentence already, and what was said of it."""
    if verdict.cls is not Class.NONE:
        mine = [(rank, text) for rank, text in remarks if rank in verdict.ranks or text.startswith(ENDED)]
        mine.sort(key=lambda each: not each[1].startswith(ENDED))
        said = tuple(f"rank {rank}: {text}" for rank, text in mine if not _in(verdict.say, text))
        verdict = replace(verdict, chain=(*verdict.chain, *said[:6]))
    lines = [
        f"{f'the main thread of rank {rank}' if rank in threaded else f'rank {rank}'} stands at {where[rank].site}"
        for rank in verdict.ranks
        if rank in where and str(where[rank].site) not in verdict.say
    ]
    if not lines or verdict.cls is Class.NONE:
        return verdict
    told = "; ".join(lines[:3])
    return replace(verdict, say=f"{verdict.say} {told[0].upper()}{told[1:]}.", chain=(*verdict.chain, *lines))
