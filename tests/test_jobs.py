"""Processes of two jobs are never taken for one: one line says which belongs to which, with a command for each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from verify.attach import attach
from verify.jobs import launcher_of, refuse_records, refuse_several

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "WORLD_SIZE", "MASTER_ADDR")


def commands(told: str) -> list[list[int]]:
    return [[int(pid) for pid in re.findall(r"--pid (\d+)", each)] for each in re.findall(r"`([^`]*)`", told)]


def refused(
    ranks: dict[int, int | None], told: dict[int, dict[str, str]], launchers: dict[int, int] | None = None
) -> str:
    try:
        refuse_several(ranks, told, (launchers or dict.fromkeys(ranks, 1)).__getitem__)
    except UsageError as error:
        return str(error)
    return ""


@given(
    jobs=st.lists(
        st.tuples(st.sampled_from(["29500", "29501"]), st.sampled_from(["none", "a"]), st.sampled_from(["2", "3"])),
        min_size=1, max_size=3, unique=True,
    ),
    bare=st.booleans(), data=st.data(),
)  # fmt: skip
def test_each_job_gets_a_command_with_all_of_its_ranks(
    jobs: list[tuple[str, str, str]], bare: bool, data: st.DataObject
) -> None:
    """Where jobs differ in nothing of their environment, the process that started them parts them."""
    told: dict[int, dict[str, str]] = {}
    ranks: dict[int, int | None] = {}
    launchers: dict[int, int] = {}
    expected = []
    for n, (port, run, size) in enumerate(jobs):
        mine = {100 * (n + 1) + rank: rank for rank in range(int(size))}
        expected.append(set(mine))
        ranks |= mine
        shared = {} if bare else {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run, "WORLD_SIZE": size}
        told |= {pid: {**shared, "MASTER_ADDR": "here"} for pid in mine}
        launchers |= dict.fromkeys(mine, n)
    order = data.draw(st.permutations(sorted(ranks)))
    said = refused({pid: ranks[pid] for pid in order}, told, launchers)
    if len(jobs) == 1:
        assert said == ""
    else:
        assert sorted(map(sorted, commands(said))) == sorted(map(sorted, expected))
        assert f"processes of {len(jobs)} jobs" in said
        assert "\n" not in said


def test_one_job_is_one_however_its_master_is_spelled() -> None:
    told = {1: {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, 2: {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}}
    assert refused({1: 0, 2: 1}, told) == ""
    assert commands(refused({1: 0, 2: 0}, told)) == [[1], [2]]
    # A rank that was started without what the others have is told apart by nothing.
    assert refused({1: 0, 2: 1}, {1: {"MASTER_PORT": "1", "WORLD_SIZE": "2"}, 2: {"MASTER_PORT": "1"}}) == ""


def test_what_nothing_parts_is_refused_all_the_same() -> None:
    same = {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert refused({7: 1, 8: 1}, {7: same, 8: same}) == "--pid 7 and --pid 8 are both rank 1: give the pids of one job"
    assert refused({7: None, 8: None}, {7: same, 8: same}) == ""


def test_records_in_two_folders_are_of_two_jobs() -> None:
    paths = {7: [Path("a/rank0.ring")], 8: [Path("b/rank0.ring")], 9: []}
    with pytest.raises(UsageError, match=r"`turnstile hang --pid 7` \(record in a\); `turnstile hang --pid 8` "):
        refuse_records(paths, {})
    refuse_records({7: [Path("a/rank0.ring")], 8: [Path("a/rank1.ring")]}, {})


@pytest.fixture
def two_jobs() -> Iterator[list[list[int]]]:
    """The pids of the ranks of two jobs of two ranks each, on two ports."""
    script = "import signal; print('up', flush=True); signal.pause()"
    with ExitStack() as stack:
        pids: list[list[int]] = []
        for port in ("29511", "29512"):
            pids.append([])
            for rank in ("0", "1"):
                env = {name: value for name, value in os.environ.items() if name not in NAMES}
                env |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
                process = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
                stack.callback(process.wait)
                stack.callback(process.kill)
                assert process.stdout is not None
                stack.callback(process.stdout.close)
                process.stdout.readline()
                pids[-1].append(process.pid)
        yield pids


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux is needed, for /proc")
def test_processes_of_two_jobs_are_told_apart(two_jobs: list[list[int]]) -> None:
    mixed = [pid for pair in zip(*two_jobs, strict=True) for pid in pair]
    with pytest.raises(UsageError, match="processes of 2 jobs: look at one at a time") as refusal:
        attach(mixed, spy=None)
    assert commands(str(refusal.value)) == two_jobs
    assert "(ranks 0 and 1, MASTER_PORT=29511)" in str(refusal.value)
    for job in two_jobs:
        assert {stack.rank for stack in attach(job, spy=None).stacks} == {0, 1}
    assert launcher_of(mixed[0]) == os.getpid()
