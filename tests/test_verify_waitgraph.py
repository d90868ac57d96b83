"""Who waits for whom: the corpus of real hangs, correct programs, planted faults, the order of blame, AND and OR."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import programs
from verify.events import Event, Kind, Program
from verify.execution import Execution
from verify.notation import parse_program
from verify.waitgraph import Certainty, Class, Verdict, diagnose_program, stuck, wait_graph

if TYPE_CHECKING:
    from collections.abc import Sequence

CORPUS = json.loads((Path(__file__).parent / "data" / "hangs" / "programs.json").read_text())

BLAMED = {
    "H01": [1], "H02": [0], "H05": [3], "H07": [0, 1], "H08": [0, 1], "H11": [0], "H12": [1], "H14": [0, 1],
    "H16": [0, 1], "H18": [0, 1], "H19": [1, 4, 5], "H22": [0, 1, 2, 3], "H23": [0, 1], "H24": [0, 1], "H25": [0, 1],
    "H26": [0, 1], "H27": [0, 1, 2, 3], "H29": [2], "H32": [1],
}  # fmt: skip
"""Whom the threads blame; in the other programs two sides differ and none of them is the odd one."""


def verdict_word(verdict: Verdict) -> str:
    if verdict.cls is Class.NONE:
        return "completes"
    return "conditional" if verdict.certainty is Certainty.CONDITIONAL else verdict.cls.value


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: str(case["id"]))
def test_the_corpus(case: dict[str, str]) -> None:
    verdict = diagnose_program(case["program"], exclusive_device=bool(case["exclusive_device"]))
    assert verdict_word(verdict) == case["verdict"]
    assert verdict.cls is Class.CYCLE or case["verdict"] != "conditional"
    assert list(verdict.ranks) == BLAMED.get(case["id"], [])
    assert "\n" not in verdict.say
    assert verdict.say.endswith(".")
    assert bool(verdict.chain) == bool(verdict.fix) == (verdict.cls is not Class.NONE)
    for rank in verdict.ranks:
        assert str(rank) in verdict.say


def test_the_corpus_is_whole() -> None:
    assert [case["id"] for case in CORPUS] == [f"H{n:02d}" for n in range(1, 34)]


def test_a_cycle_is_told_in_order() -> None:
    verdict = diagnose_program(next(case["program"] for case in CORPUS if case["id"] == "H22"))
    assert verdict.chain == (
        "rank 0 waits in transfer 1 from rank 0 to rank 1 on pp for rank 1, which has not called it yet",
        "rank 1 waits in all_gather (call 1 on tp2) for rank 3, which has not called it yet",
        "rank 3 waits in transfer 1 from rank 2 to rank 3 on pp for rank 2, which has not called it yet",
        "rank 2 waits in all_gather (call 1 on tp) for rank 0, which has not called it yet",
    )


def test_a_rank_that_waits_through_its_own_queue_is_one_line() -> None:
    """r0's third launch is behind the second, that behind the first, and this is the one that lacks rank 1."""
    verdict = diagnose_program("r0: s:a.AR{0,1} s:b.AR{0,1} !s:c.AR{0,1}; r1: b.AR{0,1} !c.AR{0,1} a.AR{0,1}")
    assert verdict.chain == (
        "on rank 0 all_reduce (call 1 on c) is queued behind all_reduce (call 1 on a) on stream s, which needs rank 1, "
        "which has not called it yet",
        "rank 1 waits in all_reduce (call 1 on c) for rank 0, whose own call waits in a queue",
    )


def test_the_first_difference_is_told() -> None:
    verdict = diagnose_program("r0: AR{0,1} BC{0,1} AG{0,1}; r1: AR{0,1} AG{0,1} BC{0,1}")
    assert verdict.say.startswith("Call 2 on {0,1} pairs calls that differ: broadcast on rank 0, all_gather on rank 1.")


def test_the_missing_rank_is_told_with_the_call_that_lacks_it() -> None:
    verdict = diagnose_program(next(case["program"] for case in CORPUS if case["id"] == "H29"))
    assert verdict.say == "Rank 1 waits in transfer 1 from rank 2 to rank 1 for rank 2, which has left."


# ---- correct programs are silent, planted faults are named ----


@given(st.integers(2, 3).flatmap(programs.correct), st.booleans())
def test_a_program_with_one_order_never_alarms(program: Program, exclusive: bool) -> None:
    verdict = diagnose_program(program, exclusive)
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.NONE, Certainty.CERTAIN, ())


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_any_order_on_separate_streams_completes_with_room(one: list[int], other: list[int]) -> None:
    """Opposite orders alone are no fault: only a host wait, a shared stream or a small device makes them one."""
    lanes = [
        [programs.collective((0, 1), f"c{n}", stream=f"s{n}")[rank] for n in order]
        + [Event(rank, Kind.WAIT, streams=("*",))]
        for rank, order in enumerate((one, other))
    ]
    assert diagnose_program(programs.program(lanes)).cls is Class.NONE
    tight = diagnose_program(programs.program(lanes), exclusive_device=True)
    assert (tight.cls, tight.certainty) == (
        (Class.NONE, Certainty.CERTAIN) if one == other else (Class.CYCLE, Certainty.CONDITIONAL)
    )


@st.composite
def planted(draw: st.DrawFn) -> tuple[list[list[Event]], list[list[Event]], int, int]:
    """A job of three ranks, what comes after the place of the fault, where that is, and on which rank."""
    before = programs.project(3, draw(programs.steps(3, most=4)))
    after = programs.project(3, draw(programs.steps(3, most=4)))
    return before, after, draw(st.integers(0, 2)), draw(st.integers(0, 9))


Fault = tuple[list[list[Event]], list[list[Event]], int, int]
EVERYBODY = (0, 1, 2)


def job(fault: Fault, middle: Sequence[Sequence[Event]], cut: int | None = None) -> Program:
    before, after, _, _ = fault
    parts = [[*before[rank], *middle[rank], *([] if rank == cut else after[rank])] for rank in EVERYBODY]
    return programs.program(parts)


@given(planted(), st.booleans())
def test_a_planted_missing_call_is_found(fault: Fault, exclusive: bool) -> None:
    rank = fault[2]
    step = programs.collective(EVERYBODY, "w", blocking=True)
    middle = [[step[r]] if r != rank else [] for r in EVERYBODY]
    for end, cls in ((None, Class.MISSING), ("", Class.MISSING), ("OSError", Class.EXCEPTION)):
        middle[rank] = [] if end is None else [Event(rank, Kind.EXIT, end)]
        verdict = diagnose_program(job(fault, middle, cut=rank), exclusive)
        assert (verdict.cls, verdict.certainty, verdict.ranks) == (cls, Certainty.CERTAIN, (rank,))


@given(planted(), st.booleans())
def test_a_planted_block_outside_is_found(fault: Fault, exclusive: bool) -> None:
    rank = fault[2]
    step = programs.collective(EVERYBODY, "w")
    middle = [[step[r]] if r != rank else [Event(r, Kind.EXTERNAL, "disk"), step[r]] for r in EVERYBODY]
    verdict = diagnose_program(job(fault, middle), exclusive)
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.OUTSIDE, Certainty.CERTAIN, (rank,))
    assert "disk" in verdict.say


@given(planted(), st.booleans(), st.sampled_from(["tag", "operation", "dtype", "sizes", "root"]))
def test_a_planted_mismatch_is_found(fault: Fault, exclusive: bool, field: str) -> None:
    rank = fault[2]
    step = programs.collective(EVERYBODY, "w")
    odd = {"tag": "4B", "operation": "RS", "dtype": "half", "sizes": ((8,),), "root": 0}[field]
    usual = {"tag": "", "operation": "AR", "dtype": "float", "sizes": ((4,),), "root": 1}[field]
    middle = [[replace(step[r], **{field: odd if r == rank else usual})] for r in EVERYBODY]
    verdict = diagnose_program(job(fault, middle), exclusive)
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.MISMATCH, Certainty.CERTAIN, (rank,))


@given(planted(), st.booleans())
def test_a_planted_crossing_is_found(fault: Fault, blocking: bool) -> None:
    """Certain where the hosts wait; else conditional, and silent with room."""
    rank = fault[2]
    one, two = (programs.collective(EVERYBODY, name, blocking=blocking) for name in ("x", "y"))
    middle = [[two[r], one[r]] if r == rank else [one[r], two[r]] for r in EVERYBODY]
    program = job(fault, middle)
    with_room, without = diagnose_program(program), diagnose_program(program, exclusive_device=True)
    if blocking:
        assert (with_room.cls, with_room.certainty, with_room.ranks) == (Class.CYCLE, Certainty.CERTAIN, (rank,))
        assert without == with_room
    else:
        assert with_room.cls is Class.NONE
        assert (without.cls, without.certainty, without.ranks) == (Class.CYCLE, Certainty.CONDITIONAL, (rank,))


# ---- the order of blame ----


@pytest.mark.parametrize(
    ("text", "cls", "ranks"),
    [
        # a rank that raised, though others also meet in different calls
        ("r0: !a.AR{0,1}; r1: !a.BC{0,1}; r2: !b.AR{2,3}; r3: exit(OSError)", Class.EXCEPTION, (3,)),
        ("r0: !AR{0,1,2}; r1: !BC{0,1,2}; r2: exit(OSError)", Class.EXCEPTION, (2,)),
        # nobody waits for the rank that raised
        ("r0: !a.AR{0,1}; r1: !a.BC{0,1}; r2: exit(OSError)", Class.MISMATCH, ()),
        # the rank that left is missed only behind a call that differs
        ("r0: s:a.AR{0,1} s:a.AR{0,1} wait(s); r1: s:a.BC{0,1} exit", Class.MISMATCH, ()),
        # a ring, though another rank never arrives
        ("r0: !a.AR{0,1} !b.AR{0,1}; r1: !b.AR{0,1} !a.AR{0,1}; r2: !c.AR{2,3}; r3:", Class.CYCLE, (0, 1)),
        # calls that differ, though others form a ring
        ("r0: !a.AR{0,1} !b.AR{0,1}; r1: !b.AR{0,1} !a.AR{0,1}; r2: !AR{2,3}; r3: !BC{2,3}", Class.MISMATCH, ()),
        # the minority of three; of four, two against two, nobody
        ("r0: AR[1]{0,1,2}; r1: AR[2]{0,1,2}; r2: AR[1]{0,1,2}", Class.MISMATCH, (1,)),
        ("r0: AR[1]{0,1,2,3}; r1: AR[1]{0,1,2,3}; r2: AR[2]{0,1,2,3}; r3: AR[2]{0,1,2,3}", Class.MISMATCH, ()),
        ("r0: AR[1]{0,1,2}; r1: AR[2]{0,1,2}; r2: AR[3]{0,1,2}", Class.MISMATCH, ()),
        # whoever waits for the one who waits is not to blame
        ("r0: !a.AR{0,1}; r1: !b.AR{1,2} !a.AR{0,1}; r2:", Class.MISSING, (2,)),
        ("r0: !AR{0,1,2,3}; r1: !AR{0,1,2,3}; r2:; r3: exit", Class.MISSING, (3,)),
        ("r0: !AR{0,1,2,3}; r1: !AR{0,1,2,3}; r2:; r3:", Class.MISSING, (2, 3)),
        # nobody waits for it, and it is stuck all the same
        ("r0: ext(disk)", Class.OUTSIDE, (0,)),
        # a host that never waits leaves its launch behind unfinished
        ("r0: AR{0,1}; r1:", Class.MISSING, (1,)),
        # what is missed only behind another missing rank comes second
        ("r0: s:a.AR{0,1} s:b.AR{0,2} wait(s); r1:; r2:", Class.MISSING, (1,)),
        # what a rank lacks is waited for in the thread that would call it, or else in those that wait
        ("r0/x: !b.AR{0,2} a.AR{0,1}; r0/y: !c.AR{0,1}; r1: !a.AR{0,1} !c.AR{0,1}; r2:", Class.MISSING, (2,)),
        ("r0/x:; r0/y: !b.AR{0,2}; r1: !a.AR{0,1}; r2:", Class.MISSING, (2,)),
        # a ring on one stream, with something else between
        ("r0: s:a.AR{0,1} t:x.AR{0,1} s:b.AR{0,1}; r1: s:b.AR{0,1} s:a.AR{0,1} s:x.AR{0,1}", Class.CYCLE, (0, 1)),
        # a transfer to nobody, and to oneself
        ("r0: !send>1; r1:", Class.MISSING, (1,)),
        ("r0: !send>0 !recv<0", Class.CYCLE, (0,)),
        ("r0: !G(send>0 recv<0)", Class.NONE, ()),
    ],
)
def test_the_order_of_blame(text: str, cls: Class, ranks: tuple[int, ...]) -> None:
    verdict = diagnose_program(text)
    assert (verdict.cls, verdict.ranks, verdict.certainty) == (cls, ranks, Certainty.CERTAIN)


def test_host_operations_need_no_room_on_the_device() -> None:
    text = "r0: a.AR{0,1} !b.INIT{0,1}; r1: !b.INIT{0,1} a.AR{0,1}"
    assert diagnose_program(text, exclusive_device=True).cls is Class.NONE
    assert diagnose_program(text.replace("INIT", "AR"), exclusive_device=True).cls is Class.CYCLE


def test_threads_that_race_are_conditional() -> None:
    text = "r0/x: !a.AR[1]{0,1}; r0/y: !a.AR[2]{0,1}; r1: !a.AR[1]{0,1} !a.AR[2]{0,1}"
    verdict = diagnose_program(text)
    assert (verdict.cls, verdict.certainty) == (Class.MISMATCH, Certainty.CONDITIONAL)
    assert "order" in verdict.condition
    assert diagnose_program(text.replace("[2]", "[1]")).cls is Class.NONE
    assert diagnose_program(text.replace("[2]", "[1]"), budget=1).certainty is Certainty.UNDECIDED
    always = "r0/x: !a.AR[1]{0,1}; r0/y: !a.AR[2]{0,1}; r1: !a.AR[3]{0,1} !a.AR[4]{0,1}"
    assert diagnose_program(always).certainty is Certainty.CERTAIN
    assert diagnose_program(always, budget=3).certainty is Certainty.CONDITIONAL


# ---- AND and OR ----


def test_any_of_is_free_when_one_is() -> None:
    text = "r0: s:a.AR{0,1} t:b.AR{0,1} any(s,t) !c.AR{0,1}; r1: t:b.AR{0,1} !c.AR{0,1} s:a.AR{0,1}"
    assert diagnose_program(text).cls is Class.NONE
    assert diagnose_program(text.replace("any(s,t)", "wait(*)")).cls is Class.CYCLE
    drained = "r0: t:b.AR{0,1} any(s,t) !c.AR{0,1}; r1: !c.AR{0,1} b.AR{0,1}"
    assert diagnose_program(drained).cls is Class.NONE
    assert diagnose_program(drained.replace("any(s,t)", "any(t)")).cls is Class.CYCLE


def test_a_cycle_through_any_of_is_no_knot() -> None:
    """Either stream would do: one waits in a ring, the other for a rank that is gone. The ring is not the fault."""
    text = "r0: s:a.AR{0,1} t:b.AR{0,2} any(s,t) !c.AR{0,1}; r1: !c.AR{0,1} a.AR{0,1}; r2:"
    verdict = diagnose_program(text)
    assert (verdict.cls, verdict.ranks) == (Class.MISSING, (2,))
    knot = text.replace("r2:", "r2: !d.AR{0,2} b.AR{0,2}").replace("!c.AR{0,1};", "!c.AR{0,1} !d.AR{0,2};")
    assert diagnose_program(knot).cls is Class.CYCLE


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14), st.sets(st.integers(0, 6)))
def test_stuck_is_the_largest_set_that_nothing_frees(edges: list[tuple[int, int]], either: set[int]) -> None:
    """Against the definition, by iteration over all nodes."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(7))
    graph.add_edges_from(edges)
    nx.set_node_attributes(graph, {node: "or" if node in either else "and" for node in graph}, "mode")
    free = {node for node in graph if not graph.out_degree(node) and node % 2}
    expected = set(free)
    for _ in graph:
        for node in graph:
            after = set(graph.successors(node))
            if after and (after & expected if node in either else after <= expected):
                expected.add(node)
    assert stuck(graph, free) == set(graph) - expected


def test_the_graph_is_bipartite_and_linear() -> None:
    """200 ranks, of which half never come: 2 edges a rank and operation, not one for each pair."""
    ranks = range(200)
    members = ",".join(map(str, ranks))
    lanes = [f"r{r}: " + ("" if r % 2 else f"!a.AR{{{members}}}") for r in ranks]
    run = Execution(parse_program("; ".join(lanes)))
    run.run()
    graph = wait_graph(run.situation())
    assert graph.number_of_edges() == 200
    assert all((one[0] == "op") != (other[0] == "op") for one, other in graph.edges)
    assert diagnose_program("; ".join(lanes)).ranks == tuple(range(1, 200, 2))
