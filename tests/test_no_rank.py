"""Pids that are no ranks: each is told by what it is, and the others are looked at all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from turnstile.__main__ import main
from verify.attach import attach
from verify.no_rank import command

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux is needed, for /proc")

WAITS = "import os, signal; os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
MAPS = (
    "import mmap, sys; file = open(sys.argv[-1], 'rb'); kept = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ); "
)
"""A process looks as if torch was loaded in it where it has mapped a file of that name."""
NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'pt_gloo_runloop', 0, 0, 0); "
FORKS = "import os; child = os.fork(); "
LAUNCHES = """
import os, subprocess, sys
for rank in "10":
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": rank})
signal = __import__("signal"); signal.pause()
"""


@contextmanager
def running(*words: str, rank: str | None = None, lines: int = 1) -> Iterator[list[int]]:
    """A command, and the pids that it prints, its own first. All of them end with it."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"RANK": rank} if rank is not None else {}
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(lines)]
        yield [process.pid, *(pid for pid in pids if pid != process.pid)]
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def torch(tmp_path: Path) -> str:
    """A file that looks like one of torch."""
    path = tmp_path / "libtorch_cpu.so"
    path.write_bytes(b"x")
    return str(path)


def refusal(*pids: int) -> str:
    with pytest.raises(UsageError) as refused:
        attach(pids, spy=None)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_what_is_no_rank_is_told_by_its_command() -> None:
    with running("sh", "-c", "echo $$; read forever") as (shell,):
        assert refusal(shell).startswith(f"--pid {shell} (sh -c echo $$; read forever): no rank: ")
        with running(sys.executable, "-c", WAITS) as (other,):
            assert "without torch, and without RANK" in refusal(other)
            both = refusal(shell, other)
            assert "(and 1 more that is none)" in both
            assert both.endswith("give the pids of the ranks, as `pgrep -f train.py` finds them")
    assert "no rank" in refusal(1)


def test_the_others_are_looked_at_all_the_same(torch: str) -> None:
    with (
        running("sh", "-c", "echo $$; read forever") as (shell,),
        running(sys.executable, "-c", WAITS, rank="0") as (zero,),
        running(sys.executable, "-c", MAPS + WAITS, torch) as (nameless,),
    ):
        found = attach([1, shell, zero, nameless], spy=None)
        assert {stack.pid for stack in found.stacks} == {zero, nameless}
        told = [line for line in found.unknown if "no rank" in line]
        assert [line.split(" (")[0] for line in told] == ["pid 1", f"pid {shell}"]
        beside = attach([shell], spy=None, beside=True)
        assert beside.stacks == ()
        assert [line for line in beside.unknown if command(shell) in line] == list(beside.unknown)


def test_a_launcher_names_its_ranks_in_their_order() -> None:
    with running(sys.executable, "-c", LAUNCHES, "-c", WAITS, lines=2) as (launcher, *ranks):
        order = sorted(ranks, key=lambda pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"RANK=")[-1][:1])
        line = refusal(launcher)
        assert "it has started 2 ranks, and waits for them" in line
        assert line.endswith(f"give --pid {order[0]} --pid {order[1]} in its place")
        # As `pgrep -f` finds all of them, it is no news.
        assert not any("no rank" in each for each in attach([launcher, *ranks], spy=None).unknown)


@pytest.mark.parametrize("backend", [False, True])
def test_a_worker_names_its_rank_unless_it_is_in_a_group_itself(backend: bool, torch: str) -> None:
    code = MAPS + FORKS + (f"child or exec({NAMED!r}); " if backend else "") + WAITS
    with running(sys.executable, "-c", code, torch, rank="3", lines=2) as (rank, worker):
        if backend:
            assert {stack.pid for stack in attach([worker], spy=None).stacks} == {worker}
            return
        line = refusal(worker)
        assert f"it works for pid {rank}, which is rank 3: give --pid {rank} in its place" in line
        assert {stack.pid for stack in attach([worker, rank], spy=None).stacks} == {rank}


def test_the_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running("sh", "-c", "echo $$; read forever") as (shell,):
        assert main(["hang", "--pid", str(shell)]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith(f"turnstile: --pid {shell} (sh -c ")
        assert told.err.count("\n") == 1
