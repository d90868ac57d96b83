"""Stacks alone: who waits for a thread of its own may wait for the end of a call, as a callback of its future."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.blame import Certainty, Class
from verify.events import Communicator, Event, Kind, Site, State
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.live.threads import Moves
from verify.readers.found import Found, Stack, nothing_open

CALL = (Site("/lib/torch/distributed/distributed_c10d.py", 9, "all_reduce"),)
SOFT = ("Condition.wait", "Queue.get", "Thread.join", "lock.acquire", "Future.result", "EpollSelector.select")
"""A callback of a call may end these."""
FIRM = ("sleep", "FileIO.read", "Popen.wait")


def _stack(rank: int, inner: tuple[Site, ...], line: int) -> Stack:
    return Stack(rank, "MainThread", (*inner, Site("train.py", line, "step"), Site("train.py", 90, "<module>")))


def _elsewhere(rank: int, what: str, line: int) -> Stack:
    return _stack(rank, (Site("/lib/python3.11/x.py", 1, what),), line)


def _judged(*stacks: Stack, events: tuple[Event, ...] = ()) -> Diagnosis:
    ranks = frozenset(stack.rank for stack in stacks if stack.rank is not None)
    present = frozenset(event.rank for event in events)
    found = Found("pid 1", events, present=present, expected=ranks, stacks=stacks)
    return diagnose_found(found, look=lambda asked: {rank: Moves() for rank in asked})


@given(st.lists(st.sampled_from((*SOFT, *FIRM)), min_size=1, max_size=4), st.booleans())
def test_who_may_have_made_the_call_is_not_blamed_beside_who_has_not(waits: list[str], calls: bool) -> None:
    stacks = [_elsewhere(rank, what, 10 + rank) for rank, what in enumerate(waits)]
    firm = {rank for rank, what in enumerate(waits) if what in FIRM}
    found = _judged(*stacks, _stack(len(waits), CALL, 50)).verdict
    soft = set(range(len(waits))) - firm
    if not firm and len(soft) > 1:
        # Each stands at a line of its own, and any of them may be the one.
        assert (found.certainty, found.ranks) == (Certainty.UNDECIDED, ())
        return
    assert found.certainty is Certainty.CONDITIONAL
    assert set(found.ranks) == (firm or soft)
    assert ("does not wait there for a call that it made" in found.condition) is (not firm)
    for rank in soft if firm else ():
        assert any(f"rank {rank} waits in {waits[rank]}" in line and "perhaps" in line for line in found.chain)


@pytest.mark.parametrize(("what", "ranks"), [("Condition.wait", (1,)), ("FileIO.read", (0, 1))])
def test_a_rank_that_left_no_dump_is_not_blamed_beside_one_whose_dump_lacks_the_call(
    what: str, ranks: tuple[int, ...]
) -> None:
    world = Communicator((0, 1, 2), "default_pg")
    call = Event(2, Kind.COLLECTIVE, "all_reduce", communicator=world, sequence=1, state=State.SCHEDULED)
    stacks = (_elsewhere(0, what, 10), _elsewhere(1, "sleep", 11), _stack(2, CALL, 50))
    found = _judged(*stacks, events=(nothing_open(1, world, 0), call)).verdict
    assert found.ranks == ranks
    assert found.cls in (Class.MISSING, Class.OUTSIDE)
    assert found.certainty is Certainty.CONDITIONAL
