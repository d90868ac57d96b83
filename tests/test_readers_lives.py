"""Several dumps of one rank: of one process the newest counts, of one that was started again the later life, and those
of two jobs are refused with a command for each.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.fr_dumps import Recorder, recorders, save
from tests.healthy import SECOND, START
from verify.blame import Certainty, Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.flight_recorder import decode
from verify.readers.gather import gather
from verify.readers.lives import two_processes

if TYPE_CHECKING:
    from pathlib import Path

TWO = {"0": ("default_pg", (0, 1))}


def job(start: int, calls: int, late: int | None = None, every: int = SECOND // 100) -> list[Recorder]:
    """Two ranks that made calls from `start` on; `late` never made the last one, in which the other waits."""
    ranks = recorders(2, TWO)
    for rank in ranks:
        for n in range(calls):
            rank.call("0", time_created_ns=start + n * every, time_discovered_completed_ns=start + n * every + 1000)
        if late not in (None, rank.rank):
            rank.call("0", state="scheduled", retired=False, time_created_ns=start + calls * every)
    return ranks


@given(
    calls=st.integers(1, 700), more=st.integers(0, 700), keep=st.none() | st.integers(1, 300),
    gap=st.integers(1, 10 * SECOND), as_json=st.booleans(), other=st.integers(1, 10 * SECOND),
)  # fmt: skip
def test_dumps_of_one_process_are_known_and_those_of_two_are_not_taken_for_it(
    calls: int, more: int, keep: int | None, gap: int, as_json: bool, other: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """A ring that holds all, or the newest, at two moments; and the same of a process that began at another time."""
    folder = tmp_path_factory.mktemp("dumps")
    dumps = []
    for name, start, many in (("one", START, calls), ("later", START, calls + more), ("else", START + other, calls)):
        rank = job(start, many, every=gap)[0]
        if keep is not None:
            rank.entries = rank.entries[-keep:]
        save(folder, [rank], name=f"{name}_{{}}", as_json=as_json)
        dumps.append(decode(folder / f"{name}_0"))
    assert not two_processes(dumps[0], dumps[1])
    assert two_processes(dumps[0], dumps[2])
    assert [moment.record for moment in dumps[1].moments] == sorted({moment.record for moment in dumps[1].moments})
    assert all(each.created_ns == START + each.record * gap for each in dumps[1].moments)


@pytest.mark.parametrize("by", ["folder", "name"])
@pytest.mark.parametrize("apart", [SECOND // 3, 300 * SECOND])
def test_dumps_of_two_jobs_are_refused_with_a_command_for_each(by: str, apart: int, tmp_path: Path) -> None:
    """One may have stood still before the other began: what both have recorded does not tell that it ran on."""
    places = []
    for n, start in enumerate((START, START + apart)):
        folder = tmp_path / (str(n) if by == "folder" else "all")
        name = "dump_rank_{}" if by == "folder" else f"job{n}_rank{{}}"
        save(folder, job(start, 300, late=1), name=name)
        places.append(str(folder) if by == "folder" else str(folder / name.format("*")))
    with pytest.raises(UsageError, match="both named for rank 0") as refusal:
        gather(sorted({tmp_path / "0", tmp_path / "1"}) if by == "folder" else [tmp_path / "all"])
    assert "\n" not in str(refusal.value)
    assert re.findall(r"`turnstile hang (.*?)`", str(refusal.value)) == places
    alone = diagnose_found(gather(list(tmp_path.glob("*/job1_rank*")) if by == "name" else [tmp_path / "1"]))
    assert (alone.verdict.cls, alone.verdict.ranks) == (Class.MISSING, (1,))


def test_what_no_name_parts_is_refused_without_a_command(tmp_path: Path) -> None:
    save(tmp_path, job(START, 9), name="a_rank{}")
    save(tmp_path, job(START + SECOND // 100, 9)[:1], name="b_rank{}")
    with pytest.raises(UsageError, match="sort the dumps in the folder by job") as refusal:
        gather([tmp_path])
    assert "`" not in str(refusal.value)


@pytest.mark.parametrize("whole", [False, True])
def test_a_dump_of_before_a_restart_blames_nobody(whole: bool, tmp_path: Path) -> None:
    """Rank 1 has left a dump of the first life only: that it lacks the calls of the second one means nothing."""
    save(tmp_path, job(START, 30), name="first_rank{}")
    for file in tmp_path.iterdir():
        os.utime(file, ns=(START + 60 * SECOND, START + 60 * SECOND))
    again = job(START + 90 * SECOND, 8, late=1)
    if not whole:
        again[0].entries = again[0].entries[-3:]
    save(tmp_path, again[:1], name="second_rank{}")
    found = diagnose_found(gather([tmp_path]))
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "no dump from rank 1" in found.verdict.say
    assert any("first_rank1: not used: it is of an earlier run" in line for line in found.unknown)
    # With its own dump of that life, it is the one that is missing.
    save(tmp_path, again[1:], name="second_rank{}")
    assert diagnose_found(gather([tmp_path])).verdict.ranks == (1,)


@pytest.mark.parametrize("hours", [0, 1])
def test_a_dump_of_yesterday_beside_those_of_today_blames_nobody(hours: int, tmp_path: Path) -> None:
    """As a folder keeps it where the rank that is stuck now has written none. Ranks may start minutes apart."""
    old = job(START, 5)[1:]
    if not hours:
        # It waits for the others, which have not begun: this may be.
        for entry in old[0].entries:
            entry |= {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
    save(tmp_path, old)
    save(tmp_path, job(START + 600 * SECOND + hours * 3600 * SECOND, 8, late=1)[:1])
    found = diagnose_found(gather([tmp_path]))
    assert found.verdict.certainty is not Certainty.CERTAIN
    assert not hours or (found.code, found.verdict.ranks) == (3, ())
    assert any("it ends" in line and "s before dump_rank_0 begins" in line for line in found.unknown) is bool(hours)


def test_a_copy_and_a_dump_of_another_backend_are_no_other_process(tmp_path: Path) -> None:
    ranks = job(START, 5, late=1)
    save(tmp_path, ranks)
    save(tmp_path / "copy", ranks)
    host = recorders(2, TWO, "gloo")
    for rank in host:
        rank.call("0", time_created_ns=START - SECOND)
    save(tmp_path / "host", host)
    found = diagnose_found(gather([tmp_path, tmp_path / "copy", tmp_path / "host"]))
    assert found.verdict.ranks == (1,)


SPIED = """Process {pid}: python train.py
Python v3.12.1 (/usr/bin/python3.12)

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    step (train.py:{line})
"""


def spied(folder: Path, name: str, pid: int, line: int = 7) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(SPIED.format(pid=pid, line=line))
    return folder


def test_stacks_of_two_processes_of_one_rank_are_refused(tmp_path: Path) -> None:
    folders = [spied(tmp_path / name, "rank0.txt", pid) for name, pid in (("one", 71), ("other", 72))]
    with pytest.raises(UsageError, match="pid 71 and 72, both of rank 0: name those of one job"):
        gather(folders)


def test_a_rank_that_stands_elsewhere_at_a_second_look_runs(tmp_path: Path) -> None:
    for rank in (0, 1):
        spied(tmp_path / "early", f"rank{rank}.txt", 71 + rank)
        spied(tmp_path / "late", f"rank{rank}.txt", 71 + rank, line=7 + rank)
    found = diagnose_found(gather([tmp_path / "early", tmp_path / "late"]))
    assert found.code == 3
    assert "rank 1 runs at train.py:7 in step" in found.verdict.say


@pytest.mark.parametrize(("backend", "sure"), [("nccl", True), ("gloo", False)])
def test_a_dump_that_ended_with_a_rank_before_that_began_is_of_an_earlier_run(
    backend: str, sure: bool, tmp_path: Path
) -> None:
    """Rank 1's calls have ended, which they could not without rank 0. On gloo it is not recorded when they did."""
    ranks = recorders(2, TWO, backend)
    for rank, start in zip(ranks, (START + 300 * SECOND, START), strict=True):
        for n in range(5):
            rank.call("0", time_created_ns=start + n, time_discovered_completed_ns=start + n, retired=True)
            if backend == "gloo":
                rank.entries[-1] |= {"state": "scheduled", "time_discovered_completed_ns": None}
    ranks[0].call("0", "all_gather", out=16, state="scheduled", retired=False, time_created_ns=START + 301 * SECOND)
    ranks[1].call("0", time_created_ns=START + 5)
    found = diagnose_found(gather([save(tmp_path, ranks)]))
    assert any("it is of an earlier run" in line for line in found.unknown) is sure
    assert (found.verdict.cls is Class.MISMATCH) is not sure
