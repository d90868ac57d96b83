"""Rings through what a rank holds: real ranks on gloo, told from their pids, and from their rings alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.test_hang_real import HOUSE, SPY, Job, pytestmark  # noqa: F401  (marks of this module, too)

if TYPE_CHECKING:
    from pathlib import Path


def waits_outside(job: Job, *ranks: int) -> None:
    """Until these ranks wait in the kernel for a lock or a pipe, and all others in a call; all for longer than is taken
    for a rank on its way.
    """
    for rank in range(job.size):
        if rank in ranks:
            job.until(lambda rank=rank: job.stands(rank, "lock", "setlk", "pipe"))  # type: ignore[misc]
        else:
            job.until(lambda rank=rank: job.waits(rank))  # type: ignore[misc]
    job.still(*range(job.size))


@SPY
@pytest.mark.parametrize(
    ("scene", "size", "what"),
    [
        ("keeps_a_lock", 2, "does not release the lock on "),
        ("keeps_a_range", 2, "does not release the lock on "),
        ("keeps_a_pipe", 2, "does not write to "),
    ],
)
def test_who_holds_what_a_rank_waits_for_waits_for_that_rank(scene: str, size: int, what: str, tmp_path: Path) -> None:
    with Job(tmp_path, scene, size) as job:
        waits_outside(job, 1)
        for pids in (True, False):
            answer = job.hang(pids=pids)
            assert answer.verdict == (1, "cycle", "certain", [0, 1])
            assert not pids or f"which rank 1 waits, at {HOUSE / 'tests' / 'stuck_program.py'}:" in answer.say.replace(
                "which rank 1 reads", "which rank 1 waits"
            )
            assert f"rank 0 (pid {job.pids[0]} (" in answer.say
            assert what in answer.say
            assert "for all_reduce (call " in answer.say
            assert "which needs rank 1, which has not called it yet" in answer.say
            assert "before the call" in answer.told["fix"]


@SPY
def test_ranks_that_hold_locks_of_each_other(tmp_path: Path) -> None:
    with Job(tmp_path, "locks_of_each_other", 3) as job:
        waits_outside(job, 0, 1)
        for answer in (job.hang(), job.hang(pids=False)):
            assert answer.verdict == (1, "cycle", "certain", [0, 1])
            assert answer.say.count("does not release the lock on ") == 2


@SPY
@pytest.mark.parametrize("scene", ["lock_of_a_sleeper", "lock_of_a_helper"])
def test_a_lock_that_may_be_released_closes_no_ring(scene: str, tmp_path: Path) -> None:
    with Job(tmp_path, scene, 3) as job:
        job.until(lambda: job.stands(1, "lock"))
        job.until(lambda: job.waits(2))
        job.still(0, 1, 2)
        for answer in (job.hang(), job.hang(pids=False)):
            assert answer.told["class"] != "cycle"
            assert answer.told["certainty"] != "certain"
