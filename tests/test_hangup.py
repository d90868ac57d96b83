"""A run whose terminal is closed ends as one that was told to; one that was started with `nohup` does not notice."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

import pytest

from tests.commands import lingering, until
from tests.test_faults_cli import ARGUMENTS, ROOT, gone, lines, processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow


def start(out: Path, stream: int, prepare: Callable[[], object], *arguments: str) -> subprocess.Popen[bytes]:
    arguments = (*(each for each in ARGUMENTS if each != "--json"), *arguments)
    return subprocess.Popen(
        [sys.executable, "-m", "turnstile", "rollout", "--out", str(out), *arguments], cwd=ROOT,
        stdin=stream, stdout=stream, stderr=stream, start_new_session=True, preexec_fn=prepare,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )  # fmt: skip


@pytest.mark.parametrize("seen", [True, False], ids=["a terminal", "a terminal that nobody reads"])
def test_a_closed_terminal_ends_a_run_whose_turns_are_kept(seen: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ours, theirs = pty.openpty()
    run = start(out, theirs, lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), *lingering(tmp_path))
    os.close(theirs)
    try:
        until(lambda: lines(out) >= 3 or run.poll() is not None)
        ranks = until(lambda: processes(out))
        if seen:
            assert os.read(ours, 1)
        os.close(ours)
        ours = -1
        assert run.wait(120) == 130
        for name in ("run.json", "report.json"):
            assert json.loads((out / name).read_text())["status"] == "interrupted"
        assert lines(out) >= 3
        until(lambda: all(gone(pid) for pid in ranks.values()))
    finally:
        if ours >= 0:
            os.close(ours)
        run.kill()
        run.wait()


def test_nohup_keeps_a_run_from_noticing(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with open(os.devnull, "w") as nothing:
        run = start(out, nothing.fileno(), nohup, *lingering(tmp_path))
        try:
            until(lambda: lines(out) >= 3 or run.poll() is not None)
            for _ in range(3):
                run.send_signal(signal.SIGHUP)
            (tmp_path / "cured").touch()
            assert run.wait(120) == 0
        finally:
            run.kill()
            run.wait()
    assert json.loads((out / "run.json").read_text())["status"] == "complete"
