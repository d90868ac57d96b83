"""Rings of waits of which only stacks tell: for whom a recv waits is not in a stack, and is not guessed."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from verify.blame import Certainty, Class
from verify.events import Communicator, Event, Kind, Site, State
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.readers.found import Found, Stack, nothing_open

TORCH = "/lib/torch/distributed/distributed_c10d.py"
STORE = Site("/lib/torch/_C.py", 0, "c10d::TCPStore::wait")


def _stack(rank: int, *inner: Site) -> Stack:
    return Stack(rank, "MainThread", (*inner, Site("train.py", 7, "step"), Site("train.py", 30, "<module>")))


def _inside(rank: int, call: str) -> Stack:
    return _stack(rank, Site(TORCH, 99, call))


def _judged(size: int, barred: set[int], stacks: list[Stack]) -> Diagnosis:
    """Dumps show the ranks that wait in a barrier of all, and nothing of the others, of which there are stacks."""
    world = Communicator(tuple(range(size)), "default_pg")
    events = [
        Event(rank, Kind.COLLECTIVE, "barrier", communicator=world, sequence=3, state=State.SCHEDULED)
        if rank in barred else nothing_open(rank, world, 2)
        for rank in range(size)
    ]  # fmt: skip
    events += [
        Event(rank, Kind.COLLECTIVE, "all_reduce", communicator=world, sequence=2, state=State.COMPLETED)
        for rank in range(size)
    ]
    events.sort(key=lambda event: event.sequence or 0)
    everybody = frozenset(range(size))
    stacks = [*stacks, *(_inside(rank, "barrier") for rank in barred)]
    return diagnose_found(Found("dumps", tuple(events), everybody, everybody, tuple(stacks)))


@given(st.data())
def test_only_ranks_that_are_in_the_ring_in_any_case_are_named(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    sources = {
        rank: data.draw(st.sampled_from([each for each in range(size) if each != rank]))
        for rank in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    }
    barred = set(range(size)) - set(sources)
    found = _judged(size, barred, [_inside(rank, "recv") for rank in sources])
    truth = nx.DiGraph([*sources.items(), *((rank, other) for rank in barred for other in sources)])
    in_ring = {rank for part in nx.strongly_connected_components(truth) if len(part) > 1 for rank in part}
    assert found.verdict.cls is Class.CYCLE
    assert found.verdict.certainty is Certainty.CONDITIONAL
    assert set(found.verdict.ranks) <= in_ring
    for rank, source in sources.items():
        # With one other rank there is nothing to guess.
        assert size == 2 or f"rank {rank} waits in recv at train.py:7 in step, which needs rank {source}" not in str(
            found.verdict.chain
        )


def test_a_ring_that_only_one_rank_closes_names_it() -> None:
    found = _judged(4, {1, 2, 3}, [_stack(0, STORE)])
    assert (found.verdict.cls, found.verdict.ranks) == (Class.CYCLE, (0,))
    assert "for a key of the store, for whom is not in the evidence" not in found.verdict.say
    assert "which one of ranks 1, 2 and 3 is to set" in found.verdict.say


def test_calls_that_may_meet_each_other_are_no_ring() -> None:
    for calls in (("all_reduce", "all_reduce"), ("send", "recv"), ("all_gather", "broadcast")):
        found = _judged(3, {2}, [_inside(rank, call) for rank, call in enumerate(calls)])
        assert found.verdict.cls is not Class.CYCLE, calls
