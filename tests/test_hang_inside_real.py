"""Real processes on gloo that end inside a call: by a kill while another rank is slow, by splits that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_hang_real import Job
from tests.test_top_installed_real import told
from verify.attach import runs

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="Linux is needed, for /proc"),
]


def test_a_kill_inside_a_call_is_the_fault_though_another_rank_is_slow(tmp_path: Path) -> None:
    with Job(tmp_path, "killed_beside_a_slow_one", 3) as job:
        for rank in (0, 1):
            job.until(lambda rank=rank: job.waits(rank))  # type: ignore[misc]
        job.kill(1)
        for answer in (job.hang(), job.hang(pids=False)):
            assert answer.verdict == (1, "exception", "certain", [1])
            assert "all_reduce (call 4 on default_pg)" in answer.say
        code, report = told(job)
        assert (code, report["class"], report["certainty"], report["ranks"]) == (1, "exception", "certain", [1])


@pytest.mark.parametrize("scene", ["splits_differ", "roots_send_more"])
def test_gloo_ends_a_rank_in_a_call_that_differs(scene: str, tmp_path: Path) -> None:
    with Job(tmp_path, scene) as job:
        job.until(lambda: not any(runs(pid) for pid in job.pids))
        answer = job.hang(pids=False)
        assert answer.verdict == (1, "mismatch", "certain", [])
        assert "rank 0" in answer.say
        assert "rank 1" in answer.say
        code, report = told(job)
        assert (code, report["class"]) == (1, "mismatch")
