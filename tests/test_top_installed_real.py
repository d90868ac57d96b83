"""Real jobs on gloo that `turnstile.record.install` records, watched with `turnstile top --check` and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.test_hang_real import HOUSE, LONG_S, Job, both, first, futex
from verify.attach import runs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="Linux is needed, for /proc"),
]


def watched(job: Job) -> subprocess.Popen[str]:
    """`turnstile top --check` of a job, started."""
    command = [sys.executable, "-m", "turnstile", "top", "--check", "--json", str(job.run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HOUSE)


def told(job: Job) -> tuple[int, dict[str, Any]]:
    """Its exit code and report."""
    check = watched(job)
    try:
        out, err = check.communicate(timeout=LONG_S)
    finally:
        check.kill()
    assert check.returncode in (0, 1), err
    return check.returncode, json.loads(out)


def frame(job: Job, *how: str) -> str:
    command = [sys.executable, "-m", "turnstile", *how, str(job.run)]
    return subprocess.run(command, capture_output=True, text=True, cwd=HOUSE, timeout=LONG_S, check=True).stdout


def test_a_crossing_is_told_while_it_stands(tmp_path: Path) -> None:
    with Job(tmp_path, "crossing") as job:
        both(job)
        code, report = told(job)
        assert (code, report["class"], report["certainty"], report["ranks"]) == (1, "cycle", "certain", [0, 1])
        shown = json.loads(frame(job, "top", "--json"))
        assert shown["cycle"] is True
        assert [row["operation"][:10] for row in shown["ranks"]] == ["all_reduce", "all_reduce"]
        assert all("stuck_program.py:50" in row["site"] for row in shown["ranks"])
        assert frame(job, "trace", "-o", "-").count('"ph":"B"') >= 4


def test_calls_that_differ_are_told(tmp_path: Path) -> None:
    with Job(tmp_path, "other_operation") as job:
        both(job)
        code, report = told(job)
        assert (code, report["class"], report["ranks"]) == (1, "mismatch", [])


def test_a_rank_that_died_is_told(tmp_path: Path) -> None:
    with Job(tmp_path, "died_in_a_call") as job:
        job.until(lambda: job.waits(0))
        job.kill(1)
        code, report = told(job)
        assert (code, report["ranks"]) == (1, [1])
        assert report["class"] in ("missing", "exception")


@pytest.mark.parametrize("scene", ["serves", "serves_with_a_pool"])
def test_a_rank_that_left_the_loop_and_lives_is_told(tmp_path: Path, scene: str) -> None:
    with Job(tmp_path, scene) as job:
        first(job)
        futex(job, 1)
        code, report = told(job)
        assert (code, report["class"], report["certainty"], report["ranks"]) == (1, "missing", "certain", [1])
        assert "call 4 on default_pg" in report["say"]


@pytest.fixture(
    params=["missing", "returns_alive", "reads", "holds_gil", "waits_for_a_helper", "serves_tcp", "serves_named"]
)
def slow(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    """A job whose last rank computes, sleeps, reads a pipe, is in C code or waits for its own thread: it may come."""
    with Job(tmp_path, request.param) as job:
        first(job)
        yield job


def test_a_rank_that_may_yet_come_is_no_fault(slow: Job) -> None:
    check = watched(slow)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            check.communicate(timeout=12)
        row = json.loads(frame(slow, "top", "--json"))["ranks"][0]
        assert (row["operation"], row["open"], row["status"]) == ("all_reduce default_pg #4", True, "stalled")
        slow.processes[1].kill()
        slow.until(lambda: not runs(slow.pids[1]))
        out, _ = check.communicate(timeout=LONG_S)
    finally:
        check.kill()
        check.wait()
    assert check.returncode == 1
    assert json.loads(out)["ranks"] == [1]
