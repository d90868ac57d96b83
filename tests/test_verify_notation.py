"""The text form of programs: parsing, printing, and what it says about text that is no program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests import programs
from verify.events import Communicator, Event, Kind, Lane, Program
from verify.notation import NotationError, format_program, parse_program

CORPUS = json.loads((Path(__file__).parent / "data" / "hangs" / "programs.json").read_text())

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,4}", fullmatch=True)
TAGS = st.text("abcXYZ019 .:,+-*/'", max_size=6)
RANKS = st.integers(0, 13)


@st.composite
def calls(draw: st.DrawFn, rank: int, kinds: tuple[Kind, ...] = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)) -> Event:
    kind = draw(st.sampled_from(kinds))
    name = draw(st.just("") | NAMES)
    stream = draw(st.just("") | NAMES | st.just("{0,1}"))
    if kind is Kind.COLLECTIVE:
        members = tuple(sorted({rank, *draw(st.sets(RANKS, max_size=3))}))
        op = draw(st.from_regex(r"[A-Z][A-Z0-9]{0,4}", fullmatch=True))
        event = Event(rank, kind, op, communicator=Communicator(members, name), tag=draw(TAGS))
    else:
        peer = draw(RANKS)
        comm = Communicator(tuple(sorted({rank, peer})), name) if name else None
        event = Event(rank, kind, kind.value, communicator=comm, peer=peer, tag=draw(TAGS))
    return replace(event, stream="" if stream == event.default_stream else stream)


@st.composite
def events(draw: st.DrawFn, rank: int, thread: str) -> Event:
    kind = draw(st.sampled_from(list(Kind)))
    match kind:
        case Kind.WAIT:
            any_of = draw(st.booleans())
            streams = draw(st.lists(NAMES | st.just("{3,12}"), min_size=1, max_size=3 if any_of else 1))
            event = Event(rank, kind, streams=tuple(streams), any_of=any_of)
        case Kind.EXTERNAL | Kind.EXIT:
            event = Event(rank, kind, draw(st.sampled_from(["zmq", "file read", "TypeError"])))
        case Kind.GROUP:
            parts = draw(st.lists(calls(rank, (Kind.SEND, Kind.RECV)), min_size=1, max_size=3))
            parts = [replace(part, thread=thread) for part in parts]
            event = Event(rank, kind, "G", parts=tuple(parts), blocking=draw(st.booleans()))
        case _:
            event = replace(draw(calls(rank)), blocking=draw(st.booleans()))
    return replace(event, thread=thread)


@st.composite
def whole(draw: st.DrawFn) -> Program:
    lanes = []
    for rank, thread in draw(st.lists(st.tuples(RANKS, st.just("") | NAMES), min_size=1, max_size=4, unique=True)):
        lanes.append(Lane(rank, thread, tuple(draw(st.lists(events(rank, thread), max_size=5)))))
    have = {lane.rank for lane in lanes}
    named = {
        other
        for lane in lanes
        for event in lane.events
        for call in event.calls
        for other in (*(call.communicator.members if call.communicator else ()), call.peer)
        if other is not None
    }
    return Program((*lanes, *(Lane(rank) for rank in sorted(named - have))))


@given(whole())
def test_printing_and_parsing_give_the_same_program(program: Program) -> None:
    assert parse_program(format_program(program)) == program


@given(programs.arbitrary())
def test_the_programs_of_the_other_tests_have_a_text_form(program: Program) -> None:
    assert parse_program(format_program(program)) == program


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: str(case["id"]))
def test_the_corpus_is_printed_as_it_was_written(case: dict[str, str]) -> None:
    assert format_program(parse_program(case["program"])) == case["program"]


def test_what_each_part_means() -> None:
    text = "r0: !s1:dp.AR[8 B]{0, 1} pp.send>1[x]; r1/main: s2:G(recv<0 s3:send>0) wait({0,1})\n any(s2,s3) ; "
    text += "r1/b: exit(OSError);"
    first, main, other = parse_program(text).lanes
    reduce, send = first.events
    assert (reduce.blocking, reduce.stream, reduce.operation, reduce.tag) == (True, "s1", "AR", "8 B")
    assert reduce.communicator == Communicator((0, 1), "dp")
    assert (send.kind, send.peer, send.tag, send.queues) == (Kind.SEND, 1, "x", ("pp01",))
    group, wait, any_of = main.events
    assert group.queues == ("s2", "s3")
    assert {each.thread for each in (group, wait, any_of, *group.parts)} == {"main"}
    assert (wait.streams, any_of.streams, any_of.any_of) == (("{0,1}",), ("s2", "s3"), True)
    assert (other.rank, other.thread, other.events[0].operation) == (1, "b", "OSError")


def test_default_streams() -> None:
    assert parse_program("r0: dp:dp.AR{0,1}; r1: pp01:send>0") == parse_program("r0: dp.AR{0,1}; r1: send>0")
    (lane, *_) = parse_program("r3: AR{3,12} tp.AR{3,12} send>12; r12:").lanes
    assert [event.queues for event in lane.events] == [("{3,12}",), ("tp",), ("pp3_12",)]


@pytest.mark.parametrize(
    ("text", "rank", "column", "says"),
    [
        ("", None, 1, "no rank at all"),
        ("AR{0,1}", None, 1, "expected a rank"),
        ("r0: ar{0}", 0, 5, "cannot read `ar{0}`"),
        ("r0: AR{0,1} !AR{0", 0, 13, "cannot read"),
        ("r0: AR{0}; r1: wait(a,b)", 1, 16, "any(..)"),
        ("r0:; r1: AR{0}", 1, 12, "include rank 1"),
        ("r0: AR{0,0}", 0, 7, "each once"),
        ("r0: AR{}", 0, 7, "must be ranks"),
        ("r0: AR{0}; r0: AR{0}", 0, 12, "has a part already"),
        ("r0: AR{0}; r1: send>2", 1, 16, "rank 2 has no part"),
        ("r0: G()", 0, 5, "an empty group"),
        ("r0: G(send>1; r1: recv<0", 0, 5, "without its `)`"),
        ("r0: G(send>0", 0, 5, "without its `)`"),
        ("r0: G(AR{0})", 0, 7, "a group holds sends and recvs"),
        ("r0: ext( )", 0, 5, "ext needs a name"),
        ("r0: send>1recv<1; r1:", 0, 5, "cannot read"),
        ("r0: AR[a{0}", 0, 5, "cannot read"),
    ],
)
def test_errors_name_rank_and_column_in_one_line(text: str, rank: int | None, column: int, says: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_program(text)
    message = str(caught.value)
    assert (caught.value.rank, caught.value.column) == (rank, column), message
    assert f"column {column}: " in message
    assert says in message
    assert "\n" not in message
    assert rank is None or f"rank {rank}, " in message


@given(st.text("r0123:;!.{},[]<>()AGRSsendwaitrecv* \n", max_size=60))
def test_any_text_is_a_program_or_a_usage_error(text: str) -> None:
    message, program = "", None
    try:
        program = parse_program(text)
    except UsageError as error:
        message = str(error)
    assert "\n" not in message
    assert program is None or parse_program(format_program(program)) == program
