"""The page of a diagnosis: it draws what the situation says, nothing from outside is markup, nothing is loaded."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import correct
from verify.events import Site
from verify.execution import executions
from verify.html import diagnosis_page, page
from verify.html import graph as drawing
from verify.html import timetable as timetables
from verify.notation import parse_program
from verify.readers.found import Stack
from verify.waitgraph import diagnose

if TYPE_CHECKING:
    from verify.events import Program
    from verify.matching import Situation

CROSSED = "r0: !dp.AR{0,1} !tp.AG[4B]{0,1}; r1: !tp.AG[4B]{0,1} !dp.AR{0,1}"
OPPOSITE = "r0: s:dp.AR{0,1} t:tp.AG{0,1}; r1: t:tp.AG{0,1} s:dp.AR{0,1}"
LEFT_OUT = "r0: !dp.AR{0,1,2}; r1: !dp.AR{0,1,2}; r2: exit(ValueError)"
HOSTILE = "<img src=x onerror=alert(1)>\"'&"


def situation(program: Program | str) -> Situation:
    run = next(executions(parse_program(program) if isinstance(program, str) else program, False, 10))
    assert run is not None
    return run.situation()


def told(found: Situation) -> dict[str, Any]:
    verdict = diagnose(found)
    return {
        "class": verdict.cls, "certainty": verdict.certainty, "ranks": list(verdict.ranks),
        "chain": list(verdict.chain), "say": verdict.say, "fix": verdict.fix, "unknown": [],
    }  # fmt: skip


def pictures(text: str) -> list[ElementTree.Element]:
    """The SVG elements of a page; parsing fails where one is not well-formed."""
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def texts(picture: ElementTree.Element, style: str) -> list[str]:
    return [
        "".join(group.itertext())
        for group in picture.iter()
        if style in group.get("class", "").split() and group.tag != "text"
    ]


def test_a_ring_is_drawn_as_one() -> None:
    found = situation(CROSSED)
    ring, table, lanes = pictures(diagnosis_page(told(found), found))
    assert ring.get("aria-label") == "ranks that wait in a ring"
    assert len(texts(ring, "node")) == 4
    assert len([line for line in ring.iter("line") if "bad" in line.get("class", "").split()]) == 4
    assert len(texts(table, "op")) == 2
    assert len(texts(lanes, "stop")) == len(texts(lanes, "lacks")) == 2


def test_a_rank_that_left_has_no_stop_where_others_wait() -> None:
    found = situation(LEFT_OUT)
    text = diagnosis_page(told(found), found)
    table, lanes = pictures(text)
    assert [label for label in texts(table, "bad") if "rank 2" in label]
    assert texts(lanes, "lacks") == ["rank 2 has not called Call 1 on dp"]
    assert any("left by ValueError" in label for label in texts(lanes, "outside"))
    assert "To do" in text
    assert "exception" in text


def columns(found: Situation) -> dict[tuple[int, int], float]:
    """(rank, order on the rank) -> column, from the inside."""
    last = dict(sorted(found.launches.items()))
    at = timetables._columns(last)
    return {(rank, launch.order): at[id(launch)] for rank, launches in last.items() for launch in launches}


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 4).flatmap(correct))
def test_calls_in_one_order_are_drawn_one_above_the_other(some: Program) -> None:
    """A correct program has straight lines only, and each rank's calls go from left to right."""
    found = situation(some)
    at = columns(found)
    for rank, launches in found.launches.items():
        places = [at[rank, launch.order] for launch in launches]
        assert places == sorted(set(places))
    for meeting in found.meetings.values():
        assert len({at[launch.rank, launch.order] for launch, _ in meeting.arrived.values()}) == 1
    for picture in pictures(diagnosis_page(told(found), found)):
        assert picture.tag == "svg"


def test_calls_in_opposite_order_are_lines_that_cross() -> None:
    found = situation(OPPOSITE)
    assert diagnose(found).cls == "none"
    timetable = timetables.of_situation(found)
    at = {(stop.rank, stop.train): stop.at for stop in timetable.stops if stop.train}
    (one, other) = sorted({train for _, train in at})
    assert (at[0, one] - at[0, other]) * (at[1, one] - at[1, other]) < 0


def test_nothing_from_outside_is_markup() -> None:
    found = situation(LEFT_OUT)
    diagnosis = {
        "class": HOSTILE, "certainty": HOSTILE, "ranks": [2], "chain": [HOSTILE], "say": "x", "fix": HOSTILE,
        "unknown": [HOSTILE],
    }  # fmt: skip
    stack = Stack(2, HOSTILE, (Site(HOSTILE, 3, HOSTILE),))
    text = diagnosis_page(diagnosis, found, title=HOSTILE, stacks=[stack])
    assert "<img" not in text
    assert text.count(escape(HOSTILE)) >= 8
    assert not re.search(r"https?://|<script|url\((?!#)|@import", text), "the page stands alone"
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text
    graph = nx.DiGraph()
    graph.add_node(("host", 0, ""), rank=0, label=HOSTILE)
    graph.add_node(("op", "x"), label=HOSTILE)
    graph.add_edges_from([(("host", 0, ""), ("op", "x")), (("op", "x"), ("host", 0, ""))])
    for picture in (drawing.ring(graph, [("host", 0, ""), ("op", "x")]), drawing.table(graph)):
        assert "<img" not in picture
        ElementTree.fromstring(picture)


def test_a_large_job_makes_a_small_page() -> None:
    ranks = 300
    everybody = "{" + ",".join(map(str, range(ranks))) + "}"
    lanes = [f"r{rank}: !dp.AR{everybody} !dp.AG{everybody}" for rank in range(ranks) if rank != 123]
    lanes.append("r123: !dp.AR" + everybody)
    found = situation("; ".join(lanes))
    text = diagnosis_page({"class": "missing", "ranks": [123]}, found)
    assert len(text) < 200_000
    assert ">rank 123<" in text, "who is blamed is drawn, whoever else is left out"
    assert "more ranks" in text
    assert ">rank 277<" in diagnosis_page({"class": "device_stall", "ranks": [277]}, found)
    assert ">rank 277<" not in text


def test_the_table_names_first_who_is_blamed_and_nobody_who_waits_too() -> None:
    """Rank 2 is missed at two places; of the call that is queued behind, ranks that wait themselves are left out."""
    found = situation("r0: s:a.AR{0,1,2} s:b.AR{0,1,2} wait(s); r1: s:a.AR{0,1,2} s:b.AR{0,1,2} wait(s); r2:")
    table = pictures(diagnosis_page(told(found), found))[0]
    rows = [text for text in texts(table, "node") if "rank 2" in text]
    assert len(rows) == 2
    assert not any("ranks" in row for row in rows)


def test_groups_share_a_column_only_where_their_ranks_are_apart() -> None:
    apart = columns(situation("r0: !a.AR{0,1}; r1: !a.AR{0,1}; r2: !b.AR{2,3}; r3: !b.AR{2,3}"))
    assert len(set(apart.values())) == 1
    between = columns(situation("r0: !a.AR{0,2}; r1: !b.AR{1,3}; r2: !a.AR{0,2}; r3: !b.AR{1,3}"))
    assert between[0, 0] == between[2, 0] != between[1, 0] == between[3, 0]


@pytest.mark.parametrize("refresh", [0.0, 2.5])
def test_only_a_live_page_has_a_script(refresh: float) -> None:
    text = page("x", "", refresh)
    assert ("<script>" in text) is (refresh > 0)
    assert ("every = 2500" in text) is (refresh > 0)
