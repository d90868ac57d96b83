"""What `pgrep -f` finds beside the ranks is left out: wrappers, launchers, workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from verify.attach import attach
from verify.lineage import ancestors, is_python, only_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux is needed, for /proc")

FORKS = """
import os, signal, sys
child = os.fork() if {forks} else 0
if child or not {forks}:
    print(os.getpid(), child, flush=True)
signal.pause()
"""
LAUNCHES = """
import os, subprocess, sys
rank = {**os.environ, "RANK": "1"}
subprocess.run([sys.executable, "-c", sys.argv[1]], env=rank)
"""


def start(*command: str, rank: str | None = "1") -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    env |= {"RANK": rank} if rank is not None else {}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)


class Family:
    """A process that starts ranks, and what those print: their pids. All of them end with it."""

    def __init__(self, *command: str, rank: str | None = "1") -> None:
        self.process = start(*command, rank=rank)
        assert self.process.stdout is not None
        self.pids = [int(word) for word in self.process.stdout.readline().split() if word != "0"]

    def __enter__(self) -> Family:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def wrapped() -> Iterator[Family]:
    """`sh -c "python rank; :"` with the rank in its environment too."""
    with Family("sh", "-c", '"$0" -c "$1"; :', sys.executable, FORKS.format(forks=False)) as family:
        yield family


def test_a_wrapper_is_no_rank(wrapped: Family) -> None:
    (rank,) = wrapped.pids
    shell = wrapped.process.pid
    assert (is_python(rank), is_python(shell)) == (True, False)
    assert shell in ancestors(rank)
    for pids in ([shell, rank], [rank, shell]):
        found = attach(pids, spy=None)
        assert {stack.pid for stack in found.stacks} == {rank}
        assert not any(str(shell) in line for line in found.unknown)


def test_a_wrapper_alone_is_told_by_what_it_is(wrapped: Family) -> None:
    (rank,) = wrapped.pids
    shell = wrapped.process.pid
    with pytest.raises(UsageError) as refused:
        attach([shell], spy=None)
    line = str(refused.value)
    assert line.startswith(f"--pid {shell} (sh -c ")
    assert "no rank: it is not a Python process" in line
    assert line.endswith(f"give --pid {rank} in its place")


def test_a_launcher_without_a_rank_is_no_rank() -> None:
    with Family(sys.executable, "-c", LAUNCHES, FORKS.format(forks=False), rank=None) as family:
        found = attach([family.process.pid, *family.pids], spy=None)
        assert {stack.pid for stack in found.stacks} == set(family.pids)
        assert not any("which rank is it" in line for line in found.unknown)


def test_a_worker_that_a_rank_forked_is_not_the_rank() -> None:
    with Family(sys.executable, "-c", FORKS.format(forks=True)) as family:
        rank, worker = family.pids
        assert only_ranks([worker, rank], {rank: 1, worker: 1}, []) == [rank]
        # The one that keeps a record is the rank, whoever forked it.
        assert only_ranks([worker, rank], {rank: 1, worker: 1}, [worker]) == [worker]
        # Ranks that one process has forked are all ranks.
        assert only_ranks([worker, rank], {rank: 0, worker: 1}, []) == [worker, rank]


def test_a_process_that_ends_while_it_is_looked_at_is_gone(tmp_path: Path) -> None:
    process = start(sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        spy = tmp_path / "spy"
        spy.write_text(f"#!/bin/sh\nkill -9 {process.pid}\nsleep 0.5\necho 'Error: No such file' >&2\nexit 1\n")
        spy.chmod(0o755)
        found = attach([process.pid], spy=str(spy))
        assert [line for line in found.unknown if "gone: it ended" in line]
        assert not any("as root" in line for line in found.unknown)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
