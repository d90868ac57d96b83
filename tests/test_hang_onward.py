"""A rank that only the end of a call of its own lets go on: whoever keeps that call is to blame, not the rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.installed_rings import pair
from tests.standing import main_of, stands
from tests.test_hang_real import SPY, Job
from verify.blame import Certainty, Class, Verdict
from verify.events import Site
from verify.hang.diagnosis import diagnose_found
from verify.live.threads import Moves
from verify.readers.found import Stack
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from collections.abc import Mapping

THREADS = "/usr/lib/python3.11/threading.py"


def job(out: Path, two: str = "late") -> None:
    """Rank 0 waits for rank 1, which has a call with rank 2 open and waits for nothing in its record."""
    for rank, world in pair(out, size=3):
        rank.over(rank.call(world))
        one, other = rank.group("one", 1, 2), rank.group("other", 0, 1)
        if two == "half":
            rank.call(world, asynchronous=True)
        if rank.rank == 0:
            rank.wait(rank.call(other))
        if rank.rank == 1:
            rank.call(one, asynchronous=True)
            if two == "both lack":
                rank.call(world, asynchronous=True)
        if rank.rank == 2 and two == "came":
            rank.call(one, asynchronous=True)
        if rank.rank == 2 and two == "waits":
            rank.wait(rank.call(rank.group("back", 1, 2)))


def judged(out: Path, seen: Mapping[int, Moves], function: str = "") -> Verdict:
    found = RecordReader().read(out)
    if function:
        frames = (Site(THREADS, 9, function), Site("train.py", 9, "step"))
        found = replace(found, stacks=(Stack(1, "MainThread", frames),))
    return diagnose_found(found, look=lambda ranks: {rank: seen[rank] for rank in ranks if rank in seen}).verdict


@pytest.mark.parametrize("two", ["late", "both lack"])
@pytest.mark.parametrize(("seen", "function"), [({1: Moves()}, ""), ({1: Moves()}, "Event.wait"), ({}, "Event.wait")])
def test_whoever_keeps_the_call_that_a_rank_waits_for_is_missing(
    seen: Mapping[int, Moves], function: str, two: str, tmp_path: Path
) -> None:
    job(tmp_path, two)
    found = judged(tmp_path, seen, function)
    assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CONDITIONAL, (2,))
    assert "rank 1 waits for the end of all_reduce (call 1 on one), which it has open" in found.condition
    assert any("for rank 1" in line for line in found.chain)


@pytest.mark.parametrize(
    ("seen", "function", "two"),
    [
        ({1: Moves("the clock, in 3 s")}, "", "late"),
        ({1: Moves("", True, ("a thread that runs",))}, "Event.wait", "late"),
        ({1: Moves(locked=False)}, "", "late"),
        ({}, "", "late"),
        ({}, "sleep", "late"),
        ({1: Moves()}, "Event.wait", "came"),
        ({1: Moves()}, "Event.wait", "waits"),
        ({1: Moves()}, "Event.wait", "half"),
    ],
)
def test_a_rank_that_may_go_on_without_that_call_is_missing_itself(
    seen: Mapping[int, Moves], function: str, two: str, tmp_path: Path
) -> None:
    """Or may soon, as all have come to it; or it keeps the one that is late in turn."""
    job(tmp_path, two)
    found = judged(tmp_path, seen, function)
    assert 2 not in found.ranks
    assert found.cls in (Class.MISSING, Class.OUTSIDE)


@pytest.mark.slow
@SPY
@pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="Linux is needed, for /proc")
def test_a_real_rank_that_waits_for_a_callback(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with Job(tmp_path, "waits_for_a_callback", 3) as job_:
        job_.until(lambda: job_.waits(0))
        job_.until(lambda: job_.stands(1, "futex") and stands(main_of(job_.pids[1])))
        job_.still(0, 1)
        for answer in (job_.hang(), job_.hang(pids=False)):
            assert answer.verdict == (1, "missing", "conditional", [2])
            assert "rank 1 waits for the end of all_reduce" in answer.say
