"""Installed records in which a rank shows no wait: it may compute, be on its way, or never come."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernel.record import read
from tests.installed_rings import Rank, pair, told
from verify.blame import Certainty, Class
from verify.events import Site
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import as_text
from verify.readers.found import Stack
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from pathlib import Path


def test_no_call_open_is_no_all_clear_while_ranks_live(tmp_path: Path) -> None:
    """They may be in a collective that torch makes below the record, or in a lock of their own."""
    ranks = pair(tmp_path)  # held: a ring that nobody maps is of a process that is gone
    for rank, group in ranks:
        rank.over(rank.call(group))
    found = told(tmp_path)
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (3, Class.NONE, ())
    assert "no call is open, and what ranks 0 and 1 do is not in the record" in found.verdict.say


def test_ranks_that_ended_in_order_are_an_all_clear(tmp_path: Path) -> None:
    for rank, group in pair(tmp_path):
        rank.over(rank.call(group))
        rank.recorder.close()
    found = told(tmp_path)
    assert (found.code, found.verdict.certainty) == (0, Certainty.CERTAIN)


@pytest.mark.parametrize(("ago_s", "code"), [(600.0, 1), (20.0, 3)])
def test_a_rank_that_has_recorded_nothing_may_be_on_its_way(tmp_path: Path, ago_s: float, code: int) -> None:
    """Rank 1 loads its data before it joins the default group."""
    one = Rank(tmp_path, 0)
    group = one.group("world", 0, 1)
    one.wait(one.call(group))
    empty = Rank(tmp_path, 1, ago_s=ago_s)
    assert not read(empty.recorder.path).events
    found = told(tmp_path)
    assert found.code == code
    expected = (Certainty.UNDECIDED, ()) if code == 3 else (Certainty.CONDITIONAL, (1,))
    assert (found.verdict.certainty, found.verdict.ranks) == expected


@pytest.mark.parametrize("open_", [False, True])
def test_a_rank_that_may_be_running_is_missing_only_if_it_never_comes(tmp_path: Path, open_: bool) -> None:
    """The main process does the work first, and the others wait; it may have an asynchronous call open."""
    ranks = pair(tmp_path, size=3)
    for rank, group in ranks:
        other = rank.group("other", 0, 1, 2)
        if rank.rank == 0:
            rank.over(rank.call(group))
            if open_:
                rank.call(other, asynchronous=True)
        else:
            rank.over(rank.call(group))
            rank.wait(rank.call(group))
    found = told(tmp_path)
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (1, Class.MISSING, (0,))
    assert found.verdict.certainty is Certainty.CONDITIONAL
    assert found.condition == "rank 0 does not come after all"
    assert "blocked" not in found.verdict.say
    assert "returning early" not in found.verdict.fix
    assert any("its main thread runs" in line for line in found.verdict.chain)


def test_a_rank_that_is_blocked_outside_is_named_though_its_wait_may_end(tmp_path: Path) -> None:
    (one, group), (other, same) = pair(tmp_path)
    one.over(one.call(group))
    one.wait(one.call(group))
    other.over(other.call(same))
    sleeps = Stack(1, "MainThread", (Site("[kernel]", 0, "pipe_read"), Site("train.py", 9, "step")))
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=(sleeps,)))
    assert (found.verdict.cls, found.verdict.ranks) == (Class.OUTSIDE, (1,))
    assert "rank 1 does not come out of a read of a pipe" in found.verdict.condition


def test_a_collective_that_torch_makes_below_the_record_is_named(tmp_path: Path) -> None:
    """Rank 0 builds DDP, rank 1 never does, and sleeps."""
    ranks = pair(tmp_path)
    for rank, group in ranks:
        rank.over(rank.call(group))
    builds = Site("/x/site-packages/torch/distributed/utils.py", 9, "_verify_param_shape_across_processes")
    sleeps = Site("[kernel]", 0, "hrtimer_nanosleep")
    stacks = [Stack(n, "MainThread", (inner, Site("train.py", 7, "step"))) for n, inner in enumerate((builds, sleeps))]
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=tuple(stacks)))
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "rank 0 is in _verify_param_shape_across_processes at train.py:7" in found.verdict.say
    assert "nobody waits" not in found.verdict.say


def test_what_is_undecided_blames_nobody(tmp_path: Path) -> None:
    """Rank 1 has finished what rank 0 waits in, a moment ago."""
    ranks = pair(tmp_path, ago_s=0.0)
    for rank, group in ranks:
        number = rank.call(group)
        rank.wait(number)
        if rank.rank == 1:
            rank.done(number)
            rank.wait(rank.call(rank.group("other", 1)))
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.certainty) == (Class.DEVICE_STALL, Certainty.UNDECIDED)
    assert found.verdict.ranks == ()
    assert found.to_dict()["ranks"] == []
    assert ">" not in as_text(found)


@pytest.mark.parametrize(
    ("inner", "certain"),
    [
        ((), True),
        ((("/x/site-packages/torch/_ops.py", "__call__"),), True),
        ((("<frozen importlib._bootstrap_external>", "_path_stat"), ("/x/torch/_dynamo/a.py", "go")), False),
    ],
)
def test_a_call_that_a_stack_is_below_is_waited_for_only_by_torch(
    tmp_path: Path, inner: tuple[tuple[str, str], ...], certain: bool
) -> None:
    """A functional all_reduce is made, not waited for, and then imports what traces it."""
    ranks = pair(tmp_path)
    for rank, group in ranks:
        rank.call(group, asynchronous=True)
    inside = [*inner, ("/x/site-packages/torch/distributed/_functional_collectives.py", "all_reduce")]
    frames = (*(Site(file, 9, name) for file, name in inside), Site("train.py", 7, "step"))
    stacks = tuple(Stack(rank, "MainThread", frames) for rank in (0, 1))
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=stacks)).verdict
    assert (found.cls is Class.BELOW and found.certainty is Certainty.CONDITIONAL) is certain
