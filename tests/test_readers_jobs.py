"""Rings of several jobs: what is stale is left out and said, and two jobs are never one diagnosis."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from kernel.record import Recording, read
from tests.installed_rings import Rank, told
from verify.blame import Class
from verify.readers.gather import gather
from verify.readers.jobs import APART_S, difference, of_one_job

if TYPE_CHECKING:
    from pathlib import Path


def stuck(out: Path, size: int) -> list[Rank]:
    """A job whose rank 0 waits for all others, which have not come."""
    ranks = [Rank(out, rank, size) for rank in range(size)]
    for rank in ranks:
        group = rank.group("default_pg", *range(size))
        rank.over(rank.call(group))
        if rank.rank == 0:
            rank.wait(rank.call(group))
    return ranks


def test_rings_of_an_earlier_job_are_said_to_be_stale(tmp_path: Path) -> None:
    """It had four ranks, and the one of now has two."""
    old = stuck(tmp_path, 4)
    for rank in old:
        rank.recorder.close()
    now = stuck(tmp_path, 2)
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (1,))
    assert len(now) == len([host for host in found.situation.hosts if not host.thread])
    lines = [line for line in found.unknown if "stale" in line]
    assert lines == [
        f"{tmp_path.name}: rank {rank}: its ring is stale, of another job: rank {rank} is one of 4, rank 1 one of 2:"
        " not used"
        for rank in (2, 3)
    ]


def test_two_directories_of_two_jobs_are_refused(tmp_path: Path) -> None:
    ranks = [stuck(tmp_path / "one", 2), stuck(tmp_path / "other", 3)]
    (tmp_path / "other" / "record" / "rank0.ring").unlink()
    (tmp_path / "other" / "record" / "rank1.ring").unlink()
    with pytest.raises(UsageError, match=r"one and .*other are of two jobs: rank 2 is one of 3, rank 0 one of 2"):
        gather([tmp_path / "one", tmp_path / "other"])
    assert len(ranks) == 2


def test_two_jobs_that_run_in_one_directory_are_refused(tmp_path: Path) -> None:
    held = stuck(tmp_path, 3), stuck(tmp_path, 2)
    with pytest.raises(UsageError, match="of two jobs that run"):
        gather([tmp_path])
    assert len(held) == 2


def recordings(out: Path) -> tuple[Recording, Recording]:
    for rank in stuck(out, 2):
        rank.recorder.close()
    first, second = (read(out / "record" / f"rank{rank}.ring") for rank in (0, 1))
    return first, second


@pytest.mark.parametrize(("apart_s", "other"), [(APART_S - 1, False), (APART_S + 1, True)])
def test_what_ended_long_before_the_other_began_is_of_another_job(tmp_path: Path, apart_s: float, other: bool) -> None:
    """A rank that failed at once may wait in vain for one whose node is slow to start."""
    early, late = recordings(tmp_path)
    assert early.closed_ns is not None
    late = replace(late, wall_ns=early.wall(early.closed_ns) + int(apart_s * 1e9))
    assert bool(difference(early, late)) is bool(difference(late, early)) is other
    kept, lines = of_one_job({0: early, 1: late}, lambda _: False)
    assert (sorted(kept), len(lines)) == (([1], 1) if other else ([0, 1], 0))
    # What is not known to have ended may be stuck, however long ago it moved.
    assert not difference(replace(early, closed_ns=None), late)


def test_a_job_that_runs_comes_before_a_newer_one_that_ended(tmp_path: Path) -> None:
    early, late = recordings(tmp_path)
    early = replace(early, closed_ns=None, meta={**early.meta, "size": 3})
    late = replace(late, wall_ns=late.wall_ns + int(1e12))
    kept, lines = of_one_job({0: early, 1: late}, lambda each: each.closed_ns is None)
    assert sorted(kept) == [0]
    assert lines == ["rank 1: its ring is stale, of another job: rank 1 is one of 2, rank 0 one of 3: not used"]
