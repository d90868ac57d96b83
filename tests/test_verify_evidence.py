"""The verdict on evidence of a job: what is open, what is over, what is not known."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests import programs
from verify.events import Event, Site, State
from verify.evidence import situation_of
from verify.notation import parse_program
from verify.waitgraph import Certainty, Class, diagnose_events, wait_graph


def evidence(text: str, state: State = State.SCHEDULED) -> list[Event]:
    return [replace(event, state=state) for lane in parse_program(text).lanes for event in lane.events]


def test_a_rank_without_events_is_unknown_not_missing() -> None:
    events = evidence("r0: !AR{0,1}; r1:")
    verdict = diagnose_events(events)
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.MISSING, Certainty.UNDECIDED, ())
    assert "rank 1" in verdict.condition
    seen = evidence("r1: BAR{1}", State.COMPLETED)
    verdict = diagnose_events([*events, *seen])
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.MISSING, Certainty.CERTAIN, (1,))
    assert diagnose_events([*events, *seen], quiet=False).certainty is Certainty.UNDECIDED


def test_a_ring_in_a_running_job_is_certain_only_where_the_hosts_are_seen_to_wait() -> None:
    crossed = "r0: !a.AR{0,1}; r1: !b.AR{0,1}"
    assert diagnose_events(evidence(crossed), quiet=False).cls is Class.CYCLE
    assert diagnose_events(evidence(crossed), quiet=False).condition == ""
    waited = "r0: a.AR{0,1} wait(a); r1: b.AR{0,1} wait(*)"
    assert diagnose_events(evidence(waited), quiet=False).cls is Class.CYCLE
    enqueued = crossed.replace("!", "")
    assert diagnose_events(evidence(enqueued), quiet=False).certainty is Certainty.UNDECIDED
    assert "wait for what they have open" in diagnose_events(evidence(enqueued)).condition


def test_calls_that_completed_may_differ_all_the_same() -> None:
    events = evidence("r0: AR[1]{0,1,2}; r1: AR[1]{0,1,2}; r2: AR[9]{0,1,2}", State.COMPLETED)
    verdict = diagnose_events(events)
    assert (verdict.cls, verdict.ranks) == (Class.MISMATCH, (2,))


def test_what_one_side_does_not_know_is_not_compared() -> None:
    events = evidence("r0: AR{0,1}; r1: AR{0,1}", State.COMPLETED)
    events[0] = replace(events[0], dtype="float", sizes=((4,),), root=0)
    assert diagnose_events(events).cls is Class.NONE


def test_a_later_call_shows_that_the_earlier_ones_are_over() -> None:
    """Rank 1's ring holds its fifth call only; rank 0 is still in its fourth."""
    one, other = evidence("r0: a.AR{0,1}; r1: a.AR{0,1}")
    verdict = diagnose_events([replace(one, sequence=3), replace(other, sequence=4)])
    assert (verdict.cls, verdict.ranks) == (Class.DEVICE_STALL, (0,))


def test_equal_calls_that_ended_are_no_fault_whatever_their_lines() -> None:
    """While such a call is open its lines are a hint (`verify.hang.findings`)."""
    coord, finish = Site("dp.py", 88, "coordinate"), Site("dp.py", 120, "finish")
    events = evidence("r0: AR{0,1,2} AR{0,1,2}; r1: AR{0,1,2} AR{0,1,2}; r2: AR{0,1,2} AR{0,1,2}", State.COMPLETED)
    same = [replace(event, site=coord) for event in events]
    assert diagnose_events(same).cls is Class.NONE
    assert diagnose_events([*same[:5], replace(same[5], site=finish)]).cls is Class.NONE
    always = [replace(event, site=finish if event.rank == 2 else coord) for event in events]
    assert diagnose_events(always).cls is Class.NONE


def test_sites_are_in_the_chain() -> None:
    events = evidence("r0: !a.AR{0,1}; r1: !b.AR{0,1}")
    events = [replace(event, site=Site("model.py", 7 + event.rank)) for event in events]
    verdict = diagnose_events(events)
    assert "model.py:7" in verdict.chain[0]
    assert "model.py:8" in verdict.chain[1]


@given(programs.steps(3, most=4), st.integers(0, 2), st.booleans())
def test_a_planted_stall_is_found_in_evidence(before: list[programs.Step], rank: int, everybody: bool) -> None:
    """All that came before is over; one call is open on one rank, or on all."""
    done = [replace(event, state=State.COMPLETED) for lane in programs.project(3, before) for event in lane]
    step = programs.collective((0, 1, 2), "w")
    open_ = (0, 1, 2) if everybody else (rank,)
    last = [replace(step[r], state=State.SCHEDULED if r in open_ else State.COMPLETED) for r in (0, 1, 2)]
    assert diagnose_events(done).cls is Class.NONE
    verdict = diagnose_events([*done, *last])
    expected = (Class.BELOW, ()) if everybody else (Class.DEVICE_STALL, (rank,))
    assert (verdict.cls, verdict.ranks) == expected
    assert diagnose_events([*done, *last], quiet=False).cls is Class.NONE


def test_what_a_rank_did_in_a_finished_group_ties_nobody() -> None:
    """Rank 1's group is over for it, so that rank 0 cannot be waiting for rank 2, of which there is no evidence."""
    events = evidence("r0: send>1; r1: G(recv<0 recv<2); r2:")
    events[1] = replace(events[1], state=State.COMPLETED)
    verdict = diagnose_events(events)
    assert (verdict.cls, verdict.ranks, verdict.certainty) == (Class.DEVICE_STALL, (0,), Certainty.CERTAIN)
    assert len([node for node in wait_graph(situation_of(events)) if node[0] == "op"]) == 1
