"""The order certificate of programs and of text, against definitions and against runs; shortest rings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.program import Program
from kernel.request import Phase
from kernel.topology import EXCHANGES, World
from tests import programs
from tests.orders import is_valid
from verify.notation import format_program
from verify.order import Orders, certify, from_notation, from_program, summary, turnstile_steps
from verify.order.cycle import shortest_ring
from verify.order.queues import sort
from verify.waitgraph import Certainty, Class, diagnose_program

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from verify.events import Program as Text

CORPUS = json.loads((Path(__file__).parent / "data" / "hangs" / "programs.json").read_text())
FIGURE_2 = World(4, 2, 4, "cross", "none")
worlds = st.builds(
    World,
    st.just(8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["flat", "cross"]),
    st.sampled_from(["paper", "all", "none"]),
)


# ---- programs of the kernel ----


def test_the_skeleton_is_the_papers() -> None:
    assert turnstile_steps(5, span=2) == [None, (0, 2), None, (2, 4), None, (4, 5), None]
    assert turnstile_steps(2, iterations=1) == [None, (0, 1), (1, 2)]
    assert turnstile_steps(1, iterations=3) == [None, (0, 1), None, None]
    assert turnstile_steps(1, epochs=2) == [None, (0, 1), None, (0, 1), None]
    with pytest.raises(UsageError, match="span 0"):
        turnstile_steps(3, span=0)


@given(worlds, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.sampled_from(EXCHANGES))
def test_the_queues_are_those_of_the_collective_program(
    world: World, layers: int, iterations: int, span: int, exchange: str
) -> None:
    """Against the plain definition: call by call, with the rank's own group and the communicator's count."""
    world = replace(world, exchange=exchange)
    steps = turnstile_steps(world.boundaries(layers), span, iterations)
    orders = from_program(world, layers, steps=steps)
    queues = {(queue.rank, queue.name): queue.calls for queue in orders.queues}
    for rank in range(world.size):
        counts: dict[str, int] = {}
        expected: dict[str, list[str]] = {"D": [], "P": [], "": []}
        for step in steps:
            phase = Phase.D if step is None else Phase.P
            program = Program(world, phase, layers)
            for call in program.calls if step is None else program.segment(*step):
                counts[f"{phase}.{call.role}"] = counts.get(f"{phase}.{call.role}", 0) + 1
                members = world.members(call.role, rank)
                text = f"{call.op} {phase}.{call.role} {counts[f'{phase}.{call.role}']} {members}"
                expected[""].append(text)
                expected["D" if call.routed else phase].append(text)
                if call.routed:
                    expected["P"].append(text)
        own = any(" P." in text and text not in expected["D"] for text in expected["P"])
        expected["P"] = expected["P"] if own else []

        def named(calls: array[int]) -> list[str]:
            return [f"{orders.name(each)} {orders.communicators[orders.comm[each]].members}" for each in calls]

        assert named(queues[rank, "D"]) == expected["D"]
        assert named(queues[rank, "P"]) == expected["P"]
        assert named(orders.issued[rank]) == expected[""]
    assert certify(orders).proved


def test_forty_segments_and_forty_one_iterations() -> None:
    orders = from_program(World(8, 2, 8, "cross", "all"), 40)
    result = certify(orders, 1)
    assert result.proved
    assert result.certificate is not None
    assert "41 D iterations and 40 P segments" in result.scope
    assert result.scope in summary(result)
    assert result.residency is not None
    assert result.residency.rule == "one chain"
    increasing(orders, result.certificate.index)


def increasing(orders: Orders, index: Sequence[int]) -> None:
    """The definition of a certificate."""
    for queue in orders.queues:
        at = [index[each] for each in queue.calls]
        assert at == sorted(set(at))
    assert all(index[edge.before] < index[edge.after] for edge in orders.edges)
    assert len(set(index)) == len(index) == len(orders.comm)


def test_the_host_has_seen_an_earlier_iteration_before_prefill_goes_on() -> None:
    """D iteration n - 1 ends before iteration n + 1 enters, and so before the P segment behind that."""
    orders = from_program(World(2, route="none"), 3)
    found = {(edge.rank, edge.reason, orders.name(edge.before), orders.name(edge.after)) for edge in orders.edges}
    assert found == {(rank, "host wait for D iteration 0", "AG D.TP 8", "AR P.TP 6") for rank in range(2)}


def test_where_the_route_must_be_taken() -> None:
    """The paper's Figure 2, {0,2} and {1,3} against all ranks: too little room is a ring of two ranks."""
    unrouted = from_program(FIGURE_2, 3)
    assert certify(unrouted).proved
    assert certify(unrouted, 2).proved
    tight = certify(unrouted, 1)
    assert (tight.verdict.cls, tight.verdict.certainty) == (Class.CYCLE, Certainty.CONDITIONAL)
    assert len(tight.verdict.chain) == 2
    assert certify(from_program(replace(FIGURE_2, route="all"), 3), 1).proved


def swapped(orders: Orders, rank: int, name: str, one: int, other: int) -> Orders:
    """The same, where a rank enqueues two calls of a queue the other way round."""
    queues = [replace(queue, calls=queue.calls[:]) for queue in orders.queues]
    calls = next(queue.calls for queue in queues if (queue.rank, queue.name) == (rank, name))
    first, second = calls[one], calls[other]
    calls[one], calls[other] = second, first
    issued = {each: line[:] for each, line in orders.issued.items()}
    mine = issued[rank]
    a, b = mine.index(first), mine.index(second)
    mine[a], mine[b] = second, first
    return replace(orders, queues=queues, issued=issued)


@given(st.integers(0, 3), st.data())
def test_a_planted_swap_is_found_and_told_in_two_hops(rank: int, data: st.DataObject) -> None:
    orders = from_program(World(4, 2, 4, "cross", "all"), 3)
    calls = next(queue.calls for queue in orders.queues if (queue.rank, queue.name) == (rank, "D"))
    both = st.tuples(*[st.integers(0, len(calls) - 1)] * 2)
    shared = both.filter(lambda n: len(set(orders.ranks_of(calls[n[0]])) & set(orders.ranks_of(calls[n[1]]))) > 1)
    one, other = data.draw(shared.filter(lambda n: n[0] < n[1]))
    result = certify(swapped(orders, rank, "D", one, other))
    verdict = result.verdict
    assert (verdict.cls, verdict.certainty) == (Class.CYCLE, Certainty.CERTAIN)
    assert result.certificate is None
    assert result.residency is None
    assert len(verdict.chain) == 2
    assert any(line.startswith(f"rank {rank} has ") for line in verdict.chain)
    assert "stream D" in verdict.say


def test_the_odd_rank_is_blamed() -> None:
    orders = from_program(World(4, 1, 1, route="all"), 2)
    verdict = certify(swapped(orders, 2, "D", 0, 3)).verdict
    assert verdict.ranks == (2,)
    assert "Rank 2 differs from the majority, which has AR D.TP 1 before" in verdict.say
    assert verdict.chain[1] == "rank 2 has AR D.TP 2 before AR D.TP 1 (stream D)"


def test_a_route_on_one_rank_only_is_a_finding() -> None:
    """Its order is the same everywhere here; the streams are not."""
    orders = from_program(World(4, 2, 4, "cross", "paper"), 2)
    places = {(queue.rank, queue.name): number for number, queue in enumerate(orders.queues)}
    routed = next(each for each in orders.queues[places[3, "P"]].calls if orders.name(each).startswith("AR P.TP"))
    orders.queues[places[3, "D"]].calls.remove(routed)
    orders.place()
    result = certify(orders)
    assert (result.verdict.cls, result.verdict.ranks) == (Class.RULE, (3,))
    assert "in the queue of P on rank 3" in result.verdict.say
    assert not result.proved
    assert not is_valid(result, "streams")


def test_a_call_of_another_kind_is_a_mismatch() -> None:
    text = "r0: s:AR[8]{0,1,2} s:AG{0,1,2}; r1: s:AR[4]{0,1,2} s:AG{0,1,2}; r2: s:AR[8]{0,1,2} s:BC{0,1,2}"
    verdict = certify(from_notation(text)).verdict
    assert (verdict.cls, verdict.ranks) == (Class.MISMATCH, (1,))
    assert "[8] on ranks 0 and 2, " in verdict.say
    assert "Call 0 on {0,1,2}" in verdict.say


# ---- text, against the run of a program ----


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: str(case["id"]))
def test_the_corpus_is_judged_as_by_running_it(case: dict[str, str]) -> None:
    exclusive = bool(case["exclusive_device"])
    expected = diagnose_program(case["program"], exclusive_device=exclusive)
    found = certify(from_notation(case["program"]), issue_order=exclusive).verdict
    assert (found.cls, found.certainty, found.ranks) == (expected.cls, expected.certainty, expected.ranks)
    assert bool(found.chain) == bool(found.fix) == (found.cls is not Class.NONE)


@given(programs.arbitrary(), st.booleans())
def test_text_is_judged_as_by_running_it(program: Text, exclusive: bool) -> None:
    """A run stops at its first fault; the certificate sees all of them."""
    expected = diagnose_program(program, exclusive_device=exclusive)
    result = certify(from_notation(program), issue_order=exclusive)
    if result.verdict.certainty is Certainty.UNDECIDED:
        assert "any(" in format_program(program)
        return
    assert (result.verdict.cls is Class.NONE) == (expected.cls is Class.NONE)
    assert expected.cls is Class.NONE or expected.cls in {found.cls for found in result.findings}


@given(st.integers(2, 3).flatmap(programs.correct))
def test_an_order_that_all_follow_is_certified(program: Text) -> None:
    result = certify(from_notation(program), issue_order=True)
    assert result.proved
    assert is_valid(result)


@pytest.mark.parametrize(
    "text",
    [
        "r0: !AR{0,1,2}; r1: !BC{0,1,2}; r2: exit(OSError)",
        "r0: !AR{0,1,2}; r1: !BC{0,1,2}; r2: exit",
        "r0: !AR{0,1,2}; r1: !BC{0,1,2}; r2: ext(disk)",
        "r0: !AR{0,1,2}; r1: !BC{0,1,2}; r2:",
        "r0: s:a.AR{0,1} s:a.AR{0,1} wait(s); r1: s:a.BC{0,1} exit",
        "r0: !a.AR{0,1} !b.AR{0,1}; r1: !b.AR{0,1} !a.AR{0,1}; r2: !c.AR{2,3}; r3:",
        "r0: !a.AR{0,1} !b.AR{0,1}; r1: !b.AR{0,1} !a.AR{0,1}; r2: !c.AR{2,3}; r3: exit",
        "r0: ext(disk)",
    ],
)
def test_the_worst_fault_comes_first(text: str) -> None:
    """In the order of blame of the wait-for graph."""
    expected, found = diagnose_program(text), certify(from_notation(text)).verdict
    assert (found.cls, found.certainty, found.ranks) == (expected.cls, expected.certainty, expected.ranks)


def test_threads_that_race_are_not_certified() -> None:
    text = "r0/x: s:a.AR{0,1}; r0/y: s:b.AR{0,1}; r1: s:a.AR{0,1} s:b.AR{0,1}"
    result = certify(from_notation(text))
    assert (result.verdict.certainty, result.certificate) == (Certainty.UNDECIDED, None)
    assert not result.proved
    calm = text.replace("r0/y: s:", "r0/y: t:")
    assert certify(from_notation(calm)).proved


def test_what_some_wait_needs_is_undecided() -> None:
    """Whether `any` may go on with t alone is not a question of order."""
    text = "r0: s:a.AR{0,1} t:b.AR{0,1} any(s,t) !c.AR{0,1}; r1: t:b.AR{0,1} !c.AR{0,1} s:a.AR{0,1}"
    assert certify(from_notation(text)).verdict.certainty is Certainty.UNDECIDED
    assert certify(from_notation(text.replace("any(s,t)", "wait(t)"))).proved
    all_of = certify(from_notation(text.replace("any(s,t)", "wait(*)"))).verdict
    assert (all_of.cls, all_of.certainty) == (Class.CYCLE, Certainty.CERTAIN)
    assert "host wait for s" in all_of.say


# ---- shortest rings ----


def shortest_by_definition(orders: Orders) -> int:
    """Hops of a shortest ring, of all pairs that some queue or edge orders; 0 for none."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    for queue in orders.queues:
        graph.add_edges_from((x, y) for n, x in enumerate(queue.calls) for y in queue.calls[n + 1 :])
    graph.add_edges_from((edge.before, edge.after) for edge in orders.edges)
    rings = [1] if any(graph.has_edge(node, node) for node in graph) else []
    for node in graph:
        lengths = nx.single_source_shortest_path_length(graph, node)
        rings += [lengths[before] + 1 for before in graph.predecessors(node) if before in lengths]
    return min(rings, default=0)


@given(st.data())
def test_a_ring_is_shortest(data: st.DataObject) -> None:
    size, total = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 8))
    comms = [sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=2))) for _ in range(total)]
    lanes = []
    for rank in range(size):
        mine = data.draw(st.permutations([n for n, members in enumerate(comms) if rank in members]))
        calls = [f"s{data.draw(st.integers(0, 1))}:c{n}.AR{{{','.join(map(str, comms[n]))}}}" for n in mine]
        waits = [data.draw(st.sampled_from(["", "", "wait(s0)"])) for _ in calls]
        lanes.append(f"r{rank}: " + " ".join(f"{call} {wait}" for call, wait in zip(calls, waits, strict=True)))
    orders = from_notation("; ".join(lanes))
    order, left = sort(orders)
    expected = shortest_by_definition(orders)
    assert (len(order) < len(orders.comm)) == (expected > 0)
    if expected:
        hops, whole = shortest_ring(orders, left)
        assert whole
        assert len(hops) == expected
        assert all(one.after == other.before for one, other in zip(hops, (*hops[1:], hops[0]), strict=True))
        for hop in hops:
            lines = [queue.calls for queue in orders.queues if queue.rank == hop.rank]
            ordered = [line for line in lines if hop.before in line and hop.after in line]
            edges = [edge for edge in orders.edges if edge[:3] == (hop.before, hop.after, hop.rank)]
            assert edges or any(line.index(hop.before) < line.index(hop.after) for line in ordered)


def test_a_long_ring_is_told_hop_by_hop() -> None:
    """Four ranks, each of two groups: no two of them are enough."""
    ring = [(0, 1), (1, 3), (3, 2), (2, 0)]
    lanes = {rank: [f"g{n}.AR{{{min(g)},{max(g)}}}" for n, g in enumerate(ring) if rank in g] for rank in range(4)}
    lanes[0].reverse()
    orders = from_notation("; ".join(f"r{rank}: s:{calls[0]} s:{calls[1]}" for rank, calls in lanes.items()))
    verdict = certify(orders).verdict
    assert (verdict.cls, verdict.ranks, len(verdict.chain)) == (Class.CYCLE, (0, 1, 2, 3), 4)
