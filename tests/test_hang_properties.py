"""Random jobs of several groups, as the dumps of their ranks tell them: right ones are silent, one fault is found.

Each job is run by a small oracle of its own: hosts wait for each call, and a call finishes when all members are in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from tests.fr_dumps import Recorder, save
from tests.stuck_jobs import CROSSED, GROUPS, NAMES, RANKS
from verify.blame import Certainty, Class
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import as_text
from verify.readers.gather import gather

if TYPE_CHECKING:
    import pytest

    from verify.blame import Verdict

Call = tuple[str, int]
"""A group and a size."""
Job = list[Call]
jobs = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 3)), max_size=8)


def members(call: Call) -> tuple[int, ...]:
    return GROUPS[call[0]][1]


def programs(job: Job) -> list[Job]:
    return [[call for call in job if rank in members(call)] for rank in range(RANKS)]


def run(mine: list[Job], stuck: frozenset[tuple[int, int]] = frozenset()) -> list[Recorder]:
    """The records when nothing moves any more. stuck: (rank, place in its program) that never finishes there."""
    ranks = [Recorder(rank, GROUPS) for rank in range(RANKS)]
    at = [-1] * RANKS
    going = [True] * RANKS

    def enter(rank: int) -> None:
        at[rank] += 1
        going[rank] = at[rank] < len(mine[rank])
        if going[rank]:
            ranks[rank].call(mine[rank][at[rank]][0], size=mine[rank][at[rank]][1], state="scheduled")

    for rank in range(RANKS):
        enter(rank)
    moved = True
    while moved:
        moved = False
        for name, (_, group) in GROUPS.items():
            inside = [rank for rank in group if going[rank] and mine[rank][at[rank]][0] == name]
            sizes = {mine[rank][at[rank]][1] for rank in inside}
            numbers = {ranks[rank].counts[name, False] for rank in inside}
            if len(inside) == len(group) and len(sizes) == len(numbers) == 1:
                held = [rank for rank in inside if (rank, at[rank]) in stuck]
                for rank in inside:
                    if rank in held:
                        going[rank] = False
                    else:
                        ranks[rank].entries[-1]["state"] = "completed"
                        enter(rank)
                moved = True
    return ranks


def judged(factory: pytest.TempPathFactory, ranks: list[Recorder], data: st.DataObject) -> Verdict | None:
    """The verdict on dumps of whole rings, or of the newest calls only; None where it is undecided."""
    if wrapped := data.draw(st.booleans(), label="wrapped"):
        keep = data.draw(st.integers(1, 4))
        for rank in ranks:
            rank.entries = rank.entries[-keep:]
    found = diagnose_found(gather([save(factory.mktemp("dumps"), ranks, as_json=data.draw(st.booleans()))]))
    assert len(as_text(found).splitlines()) <= 25
    # Whole rings decide; those that wrapped, or hold nothing, may not, and then blame nobody.
    undecided = found.verdict.certainty is Certainty.UNDECIDED
    partial = wrapped or not all(rank.entries for rank in ranks)
    assert not undecided or (partial and found.verdict.ranks == ())
    return None if undecided else found.verdict


@given(jobs, st.data())
def test_correct_jobs_are_silent(tmp_path_factory: pytest.TempPathFactory, job: Job, data: st.DataObject) -> None:
    ranks = run(programs(job))
    assert all(entry["state"] == "completed" for rank in ranks for entry in rank.entries)
    verdict = judged(tmp_path_factory, ranks, data)
    if verdict is None:
        assert not all(rank.entries for rank in ranks)
    else:
        assert (verdict.cls, verdict.ranks) == (Class.NONE, ())


@given(jobs, jobs, st.sampled_from(NAMES), st.data())
def test_a_member_that_never_comes_is_named(
    tmp_path_factory: pytest.TempPathFactory, before: Job, after: Job, group: str, data: st.DataObject
) -> None:
    call = (group, 1)
    rank = data.draw(st.sampled_from(members(call)))
    mine = programs([*before, call, *after])
    mine[rank] = mine[rank][: len(programs(before)[rank])]
    verdict = judged(tmp_path_factory, run(mine), data)
    assert verdict is None or (verdict.cls, verdict.ranks) == (Class.MISSING, (rank,))


@given(jobs, jobs, st.sampled_from(NAMES), st.data())
def test_a_call_that_differs_is_found_and_its_minority_named(
    tmp_path_factory: pytest.TempPathFactory, before: Job, after: Job, group: str, data: st.DataObject
) -> None:
    call = (group, 1)
    rank = data.draw(st.sampled_from(members(call)))
    mine = programs([*before, call, *after])
    mine[rank][len(programs(before)[rank])] = (group, 7)
    verdict = judged(tmp_path_factory, run(mine), data)
    assert verdict is not None
    assert (verdict.cls, verdict.certainty) == (Class.MISMATCH, Certainty.CERTAIN)
    assert verdict.ranks == ((rank,) if len(members(call)) > 2 else ())


@given(jobs, jobs, st.sampled_from(NAMES), st.data())
def test_a_device_that_does_not_finish_is_named(
    tmp_path_factory: pytest.TempPathFactory, before: Job, after: Job, group: str, data: st.DataObject
) -> None:
    call = (group, 1)
    rank = data.draw(st.sampled_from(members(call)))
    place = frozenset({(rank, len(programs(before)[rank]))})
    verdict = judged(tmp_path_factory, run(programs([*before, call, *after]), place), data)
    assert verdict is None or (verdict.cls, verdict.ranks) == (Class.DEVICE_STALL, (rank,))


@given(jobs, jobs, st.sampled_from(CROSSED), st.data())
def test_two_calls_in_opposite_order_are_a_cycle(
    tmp_path_factory: pytest.TempPathFactory, before: Job, after: Job, names: tuple[str, str], data: st.DataObject
) -> None:
    first, second = ((name, 1) for name in names)
    shared = sorted(set(members(first)) & set(members(second)))
    rank = data.draw(st.sampled_from(shared))
    mine = programs([*before, first, second, *after])
    place = len(programs(before)[rank])
    mine[rank][place : place + 2] = [second, first]
    verdict = judged(tmp_path_factory, run(mine), data)
    if verdict is None:
        return
    assert (verdict.cls, verdict.certainty) == (Class.CYCLE, Certainty.CONDITIONAL)
    assert rank in verdict.ranks
    assert len(shared) < 3 or verdict.ranks == (rank,)
