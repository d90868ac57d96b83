"""What is wrong though the wait-for graph of the record alone does not show it: one rule each, in the order of blame.

A rule takes a case and gives it back with another verdict, or None where it does not apply.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import networkx as nx

from verify import words
from verify.arguments import misfit
from verify.blame import Certainty, Class, Verdict, absent, awaited, judge, mismatch, needing, shortest_cycle
from verify.events import Confidence
from verify.hang.alone import odd_one_out, who_may_wait_for_a_call
from verify.hang.case import closed, core_of
from verify.hang.creation import groups_that_differ
from verify.hang.idling import By, idles
from verify.hang.inside import data_that_was_refused, left_in_a_call_that_differs, left_in_the_middle
from verify.hang.onward import whoever_keeps_its_call
from verify.hang.retries import calls_that_lacked_a_member
from verify.hang.stack_rings import ring_of_stacks
from verify.matching import Standing
from verify.readers.found import AFTER
from verify.waitgraph import across_threads, wait_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.hang.case import Case


def sizes_that_cannot_fit(case: Case) -> Case | None:
    """A mismatch that no comparison of members shows; but an exception or a rank that has left comes first."""
    verdict = case.verdict
    gone = {host.rank for host in case.situation.hosts if host.standing is Standing.EXITED}
    if verdict.cls in (Class.EXCEPTION, Class.MISMATCH) or gone & set(verdict.ranks):
        return None
    worse = misfit(case.situation)
    return None if worse is None else replace(case, verdict=worse)


def what_stacks_show(case: Case) -> Case | None:
    """Where the record tells of no wait for another rank, the stacks may: a ring, or a rank apart from all others."""
    verdict = case.verdict
    if verdict.cls not in (Class.NONE, Class.OUTSIDE) and verdict.certainty is not Certainty.UNDECIDED:
        return None
    if (ring := ring_of_stacks(case)) is not None:
        return ring
    odd = odd_one_out(case.found, case.everybody)
    return None if odd is None else replace(case, verdict=odd)


def it_lost_another_one(case: Case) -> Case | None:
    """A rank that stays away since a call with one that is gone has failed on it: the one that is gone comes first."""
    verdict = case.verdict
    if verdict.cls not in (Class.MISSING, Class.OUTSIDE) or not verdict.ranks:
        return None
    left = {host.rank: host for host in case.situation.hosts if host.standing is Standing.RAISED and not host.thread}
    for meeting in case.situation.meetings.values():
        failed = meeting.failures()
        away = [rank for rank in verdict.ranks if rank in failed]
        gone = [left[seat[0]] for seat in meeting.seats if seat[0] in left and seat[0] not in failed]
        if not away or not gone:
            continue
        ranks = tuple(sorted({host.rank for host in gone}))
        first = f"{words.operation(meeting)} failed on {words.ranks(away)}{words.at(failed[away[0]])}"
        say = f"{first}, with {words.standings(gone)}. {verdict.say}"
        found = Verdict(
            Class.EXCEPTION, Certainty.CONDITIONAL, ranks=ranks, chain=(f"{first}: {failed[away[0]].failed[:120]}",
            *verdict.chain), say=say[0].upper() + say[1:], fix=words.fix("exception", gone),
            condition=f"that is why {words.ranks(away)} {'stays' if len(away) == 1 else 'stay'} away",
        )  # fmt: skip
        return replace(case, verdict=found)
    return None


def tags_that_differ(case: Case) -> Case | None:
    """A send and a recv of one pair that wait for each other under two tags: they were to meet."""
    verdict, graph = case.verdict, case.graph
    if verdict.cls is not Class.CYCLE or verdict.certainty is Certainty.UNDECIDED or not case.core:
        return None
    ops = [graph.nodes[node]["meeting"] for node in shortest_cycle(graph.subgraph(case.core)) if node[0] == "op"]
    channels = [meeting.key[0] for meeting in ops]
    if len(ops) != 2 or channels[0] == channels[1] or {channel.kind for channel in channels} != {"pair"}:
        return None
    if channels[0].members != channels[1].members or len({each.name.partition(" tag ")[0] for each in channels}) > 1:
        return None
    seats = [next(iter(meeting.arrived.items())) for meeting in ops]
    lines = tuple(
        f"rank {seat[0]} {'sends' if seat[1] == 'send' else 'receives'} with tag"
        f" {meeting.key[0].name.partition(' tag ')[2] or '0'}{words.at(call)}"
        for meeting, (seat, (_, call)) in zip(ops, seats, strict=True)
    )
    sender, receiver = channels[0].members
    say = f"A send of rank {sender} and a recv of rank {receiver} never meet, as their tags differ: {'; '.join(lines)}."
    return replace(case, verdict=replace(verdict, cls=Class.MISMATCH, ranks=(), chain=lines, say=say, fix=words.TAGS))


def threads_that_wait_for_each_other(case: Case) -> Case | None:
    """A rank that seems to be elsewhere while threads of it wait in calls: either another one of its threads goes on by
    itself, or all of them wait for those. Where that closes a ring and their processes show the latter, it is a cycle;
    where they do not, it is not decided, and nobody is said to be missing.
    """
    verdict = case.verdict
    if verdict.cls not in (Class.MISSING, Class.OUTSIDE) or not verdict.ranks:
        return None
    tied = frozenset(host.rank for host in case.hosts(Standing.BLOCKED) if not host.presumed)
    if not tied.intersection(verdict.ranks) or any(_kept(case, rank) for rank in verdict.ranks):
        return None
    shut = closed(case.look, tied, case.situation)
    graph = wait_graph(case.situation, closed=tied)
    core = core_of(graph)
    found = judge(case.situation, graph, set(core))
    if found.cls is not Class.CYCLE:
        # Perhaps a rank that one of its threads waits for is the one that is missing.
        graph = wait_graph(case.situation, closed=shut)
        core = core_of(graph)
        found = judge(case.situation, graph, set(core))
        return replace(case, graph=graph, core=core, verdict=found) if shut.intersection(verdict.ranks) else None
    found = across_threads(case.situation, found, shut)
    if found.certainty is not Certainty.UNDECIDED:
        line = f"every other thread of {words.ranks(tied)} waits for one of its own process, without a time limit"
        found = replace(found, chain=(*found.chain, line))
    return replace(case, graph=graph, core=core, verdict=found)


def _kept(case: Case, rank: int) -> bool:
    """Whether something outside of its process keeps the main thread of a rank, as its stack or its record shows. An
    event loop waits for its own threads as well.
    """
    outside = [host for host in case.hosts(Standing.OUTSIDE) if host.rank == rank]
    return bool(outside) and not (rank in case.where and idles(case.where[rank].what) in (By.OWN, By.LOOP))


def it_may_wait_for_a_call(case: Case) -> Case | None:
    """A rank that is outside of calls beside others, for a call that it has made perhaps."""
    left = who_may_wait_for_a_call(case)
    return None if left is None else replace(case, verdict=left)


def orders_on_one_device(case: Case) -> Case | None:
    """The ring of calls that all members made in different orders, if the device runs one kernel at a time."""
    open_ = [launch for mine in case.situation.launches.values() for launch in mine if not launch.done]
    if case.verdict.cls is not Class.BELOW or not awaited(case.graph):
        return None
    if any(launch.event.confidence is Confidence.INFERRED for launch in open_):
        return None
    tight = case.in_(replace(case.situation, exclusive=True))
    verdict = judge(tight.situation, tight.graph, set(tight.core))
    if verdict.cls is not Class.CYCLE:
        return None
    return replace(tight, verdict=verdict.only_if("the device holds one communication kernel at a time"))


def the_launcher_ended(case: Case) -> Case | None:
    """All ranks gave up where they were, as their launcher was gone: no wait that it cut short is a fault."""
    if not case.found.orphaned or case.verdict.cls in (Class.EXCEPTION, Class.MISMATCH, Class.CYCLE):
        return None
    who = words.ranks(case.found.present)
    say = f"The launcher of this run ended without a word, as one that is killed does, and {who} gave up"
    found = Verdict(Class.EXCEPTION, chain=(say,), say=f"{say}: nothing is wrong between them.", fix=words.LAUNCHER)
    return replace(case, verdict=found)


def equal_calls_from_other_lines(case: Case) -> Case | None:
    """A hint, where all are in one call that agrees: some came there from a line that else meets itself.

    Rank-dependent code makes equal calls from different lines on purpose, so that this is never certain, and what has
    completed is no fault.
    """
    if case.verdict.cls is not Class.BELOW or case.found.lively:
        return None
    differing = words.other_sites(case.situation.meetings.values())
    if not differing:
        return None
    return replace(case, verdict=mismatch(differing, words.sites).only_if("these lines are not meant to meet"))


def any_sender_will_do(case: Case) -> Case | None:
    """No single rank is to blame for what a recv takes from anybody, as long as another one may send."""
    verdict, graph = case.verdict, case.graph
    if verdict.cls not in (Class.EXCEPTION, Class.MISSING, Class.OUTSIDE) or not verdict.ranks:
        return None
    blamed = [node for node in graph if node[0] == "host" and node[1] in verdict.ranks and graph.in_degree(node)]
    loose = [node for node in blamed if all(graph.nodes[op]["meeting"].from_anybody for op in needing(graph, node))]
    if not loose:
        return None
    if firm := [graph.nodes[node]["host"] for node in blamed if node not in loose]:
        return replace(case, verdict=absent(verdict.cls, firm, graph))
    ops = [op for node in loose for op in needing(graph, node)]
    waiter = next(host for op in ops for host in graph.predecessors(op) if graph.nodes[host]["mode"] == "or")
    left = (Standing.RAISED, Standing.EXITED)
    roots = [node for node in nx.descendants(graph, waiter) if node[0] == "host" and not graph.out_degree(node)]
    able = sorted({node[1] for node in roots if graph.nodes[node]["host"].standing not in left})
    if not able:
        return None
    meeting = next(graph.nodes[op]["meeting"] for op in graph.successors(waiter))
    host = graph.nodes[waiter]["host"]
    who = f"Rank {host.rank} waits in {words.operation(meeting)}{words.at(host.event)}"
    say = f"{who}, and {words.nobody_of(words.senders(graph, waiter))} has sent"
    condition = f"{words.ranks(able)} {'does' if len(able) == 1 else 'do'} not send, or have others send, after all"
    found = Verdict(
        Class.MISSING, Certainty.CONDITIONAL, chain=(say,), say=f"{say}.", fix=words.SENDER, condition=condition
    )
    return replace(case, verdict=found)


def others_failed_after_it(case: Case) -> Case | None:
    """Logs without a call: ranks raised what comes of another one's end, and one raised something of its own."""
    raised = sorted(
        (host for host in case.situation.hosts if host.standing is Standing.RAISED), key=lambda host: host.rank
    )
    after = {rank: text.removeprefix(AFTER) for rank, text in case.found.remarks if text.startswith(AFTER)}
    ranks = tuple(sorted({host.rank for host in raised}))
    followers = sorted(after.keys() - set(ranks))
    if case.verdict.cls is not Class.NONE or not raised or not followers:
        return None
    if any(event.calls for event in case.found.events):
        return None
    chain = [
        f"rank {host.rank} left by {words.brief(host.event.operation)}{words.at(host.event)}"
        for host in raised if host.event
    ]  # fmt: skip
    killed = all(host.event is not None and KILLED.match(host.event.operation) for host in raised)
    then = f"{words.ranks(followers)} failed after that: {after[followers[0]]}"
    say = f"{'; '.join(chain[:3])}, and {then}."
    found = Verdict(
        Class.EXCEPTION, Certainty.CONDITIONAL, ranks=ranks, chain=(*chain, then), say=say[0].upper() + say[1:],
        fix=words.GONE if killed else words.FIXES["exception"],
        condition=f"it is {words.ranks(ranks)} that {words.ranks(followers)} lost",
    )  # fmt: skip
    return replace(case, verdict=found)


KILLED: Final = re.compile(r"SIG[A-Z]+\b|being killed\b")
"""How a rank left that has raised nothing: there is no exception of it to be read."""

FINDINGS: Final[tuple[Callable[[Case], Case | None], ...]] = (
    groups_that_differ,
    left_in_a_call_that_differs,
    data_that_was_refused,
    left_in_the_middle,
    sizes_that_cannot_fit,
    others_failed_after_it,
    the_launcher_ended,
    calls_that_lacked_a_member,
    any_sender_will_do,
    it_lost_another_one,
    threads_that_wait_for_each_other,
    whoever_keeps_its_call,
    tags_that_differ,
    what_stacks_show,
    it_may_wait_for_a_call,
    orders_on_one_device,
    equal_calls_from_other_lines,
)
"""Each is asked, in this order, about what the ones before it left."""
