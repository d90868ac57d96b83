"""Calls that all members are in, and that may be slow and nothing worse: certain only once one lasted too long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.installed_rings import Rank, pair
from tests.test_hang_real import SPY, Job, both
from verify import words
from verify.blame import Certainty, Class, Verdict
from verify.events import Site
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.hang.text import as_text
from verify.readers.found import Found, Stack
from verify.readers.gather import gather
from verify.readers.record import RecordReader

PYTHON = Site("/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, "new_group")
STALL = Path(__file__).resolve().parent / "data" / "fr" / "h200" / "crossed_same_stream_graph"


def inside(out: Path, how: str, ago_s: float = 60.0, medium: str = "gloo") -> Found:
    """Two ranks in one call, or in the creation of a group."""
    for rank, world in pair(out, ago_s):
        if how == "creation":
            made = rank.group("new groups", 0, 1)
            rank.wait(rank.call(made, "INIT", medium="host", tag="0,1"))
        else:
            rank.wait(rank.call(world, how, medium=medium))
    return RecordReader().read(out)


def judged(found: Found) -> Verdict:
    return diagnose_found(found).verdict


@pytest.mark.parametrize("medium", ["gloo", "nccl"])
@pytest.mark.parametrize("how", ["all_reduce", "broadcast", "creation"])
@pytest.mark.parametrize("ago_s", [9.6, 3000.0])
def test_all_in_one_call_may_only_be_slow(ago_s: float, how: str, medium: str, tmp_path: Path) -> None:
    found = inside(tmp_path, how, ago_s, medium)
    told = judged(found)
    assert (told.cls, told.certainty, told.ranks) == (Class.BELOW, Certainty.CONDITIONAL, ())
    assert "it is not just slow" in told.condition
    assert f"has been in it for {words.seconds(ago_s, 1)}" in told.condition
    assert told.fix == words.SLOW
    assert f"only if   {told.condition[:20]}" in as_text(Diagnosis(told))


def test_the_last_one_that_came_tells_how_long_it_lasts(tmp_path: Path) -> None:
    for rank, ago_s in ((0, 900.0), (1, 20.0)):
        mine = Rank(tmp_path, rank, 2, ago_s)
        mine.wait(mine.call(mine.group("world", 0, 1)))
    assert "has been in it for 20.0 s" in judged(RecordReader().read(tmp_path)).condition


def test_a_call_that_has_outlasted_its_timeout_is_not_just_slow(tmp_path: Path) -> None:
    found = replace(inside(tmp_path, "all_reduce"), overdue=frozenset({0}))
    told = judged(found)
    assert (told.cls, told.certainty, told.fix) == (Class.BELOW, Certainty.CERTAIN, words.FIXES["below"])


def test_the_timeout_is_told_where_it_is_known(tmp_path: Path) -> None:
    found = replace(gather([STALL]), whole=frozenset({0, 1}), timeout_s=600.0)
    told = judged(found)
    assert (told.cls, told.certainty) == (Class.BELOW, Certainty.CONDITIONAL)
    assert "outlasted its timeout (600 s)" in told.condition


@pytest.mark.parametrize("awake", [False, True])
def test_a_stack_that_does_something_else_inside_of_it_is_named(awake: bool, tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text("import time\ntime.sleep(25)\n")
    frames = (Site(str(source), 2, "slow"), PYTHON, Site("train.py", 7, "step"))
    waits = (PYTHON, Site("train.py", 7, "step"))
    stacks = (Stack(0, "MainThread", waits), Stack(1, "MainThread", frames, awake=awake))
    found = replace(inside(tmp_path / "run", "creation"), stacks=stacks)
    told = judged(found)
    assert (told.cls, told.certainty, told.ranks) == (Class.BELOW, Certainty.CONDITIONAL, ())
    assert f"rank 1 {'runs' if awake else 'stands'} in time.sleep at {source}:2 in slow" in told.condition
    assert "rank 0 " not in told.condition


@pytest.mark.slow
@SPY
@pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="Linux is needed, for /proc")
def test_a_real_sleep_inside_the_creation_of_a_group_is_named(tmp_path: Path) -> None:
    with Job(tmp_path, "sleeps_in_a_creation") as job:
        both(job)
        job.until(lambda: job.stands(1, "nanosleep"))
        job.still(0, 1)
        answer = job.hang()
        assert answer.verdict == (1, "below", "conditional", [])
        assert "rank 1 stands in a sleep at" in answer.say
        assert "slow, inside of it" in answer.say
        assert job.hang(pids=False).verdict == (1, "below", "conditional", [])
