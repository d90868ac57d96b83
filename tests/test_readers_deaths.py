"""How a process that could raise nothing ended, as faulthandler and torchrun tell it; and when that is no cause."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.reading import read_or_line
from tests.test_hang_evidence import DUMPS, hang
from tests.test_readers_logs import timeout
from verify.blame import Certainty, Class
from verify.events import Kind
from verify.hang.diagnosis import diagnose_found
from verify.readers import deaths, stacks
from verify.readers.found import AFTER
from verify.readers.gather import gather

if TYPE_CHECKING:
    from pathlib import Path

DIES = """
import faulthandler, sys
faulthandler.enable()
def load():
    {0}
load()
"""
SEGFAULT = "import ctypes; ctypes.string_at(8)"
ABORT = "import os; os.abort()"
CURRENT = 'Fatal Python error: Aborted\n\n{0} (most recent call first):\n  File "{1}", line 20 in {2}\n'
WITHIN = "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
REPORT = """E1130 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) local_rank: 1 (pid: 777)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_10:00:00
  host      : h
  rank      : 1 (local_rank: 1)
  exitcode  : {0} (pid: 777)
  error_file: <N/A>
"""


def last_words(folder: Path, what: str) -> str:
    script = folder / "dies.py"
    script.write_text(DIES.format(what))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False).stderr


def job(folder: Path, name: str, text: str) -> Path:
    """Dumps in which rank 1 is missing, and a log beside them."""
    shutil.copytree(DUMPS, folder / "job")
    (folder / "job" / name).write_text(text)
    return folder / "job"


@pytest.mark.parametrize(("what", "named"), [(SEGFAULT, "Segmentation fault"), (ABORT, "Aborted")])
@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_real_crash_is_an_exit_and_nobody_stands_there_any_more(
    what: str, named: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(f"{prefix}{line}\n" for line in last_words(tmp_path, what).splitlines())
    folder = job(tmp_path, "rank1.log" if not prefix else "all.log", text)
    code, out = hang(capsys, "--json", folder)
    found = json.loads(out)
    assert (code, found["class"], found["certainty"], found["ranks"]) == (1, "exception", "certain", [1])
    assert f"Fatal Python error: {named} at" in " ".join(found["say"].split())
    assert "dies.py" in found["say"]
    assert "Rank 1 stands" not in found["say"]
    assert not any("not used" in line for line in found["unknown"])


@pytest.mark.parametrize(
    ("before", "thread", "file", "function"),
    [
        (timeout(1, 50), "Current thread 0x00007f [MainThread]", "train.py", "main"),
        ("", "Thread 0x00007f [MainThread]", "train.py", "main"),
        ("", "Current thread 0x00007f [MainThread]", WITHIN, "all_reduce"),
    ],
)
def test_a_rank_that_was_aborted_as_it_hung_is_no_cause(
    before: str, thread: str, file: str, function: str, tmp_path: Path
) -> None:
    path = tmp_path / "rank1.log"
    path.write_text(before + CURRENT.format(thread, file, function))
    found = deaths.READER.read(path)
    assert found.events == ()
    assert found.remarks == ((1, f"{AFTER}Fatal Python error: Aborted"),)
    assert stacks.READER.read(path).stacks == ()


def test_a_rank_that_was_started_again_has_not_left(tmp_path: Path) -> None:
    path = tmp_path / "rank1.log"
    path.write_text(last_words(tmp_path, SEGFAULT) + "step 4: loss 2\n")
    assert deaths.READER.read(path).events == ()


def test_a_crash_of_nobody_known_is_told(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(last_words(tmp_path, SEGFAULT))
    found = deaths.READER.read(path)
    assert found.events == ()
    assert "rank<k>" in found.unknown[0]


@pytest.mark.parametrize(("code", "cls"), [(-9, "exception"), (-11, "exception"), (-6, "missing"), (-15, "missing")])
def test_a_child_that_torchrun_saw_killed(
    code: int, cls: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A watchdog aborts a rank that waits, and a launcher terminates the others: neither is a cause."""
    _, out = hang(capsys, "--json", job(tmp_path, "torchrun.log", REPORT.format(code)))
    found = json.loads(out)
    assert (found["class"], found["ranks"]) == (cls, [1])


@pytest.mark.parametrize("cut", range(0, 220, 7))
def test_last_words_that_are_cut_give_a_finding_or_a_line(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "rank1.log"
    path.write_text((CURRENT.format("Current thread 0x7f", "train.py", "main") + REPORT.format(-9))[cut : -cut or None])
    found = read_or_line(deaths.READER, path)
    assert found is not None
    assert all(event.kind is Kind.EXIT for event in found.events)
    read_or_line(stacks.READER, path)


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("mypkg.DataCorrupt: shard 7", True), ("StopIteration", True), ("INFO: step", False), ("done: 5", False),
        ("WARNING", False),
    ],
)  # fmt: skip
def test_the_class_of_an_exception_may_have_any_name(
    line: str, own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = f'Traceback (most recent call last):\n  File "train.py", line 20, in main\n    load()\n{line}\n'
    _, out = hang(capsys, "--json", job(tmp_path, "rank1.log", trace))
    assert json.loads(out)["class"] == ("exception" if own else "missing")


TIMED_OUT = (
    "[rank{0}]:[E810 10:00:00] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
    " OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600096 milliseconds before timing out.\n"
    "[rank{0}]:[E810 10:00:00] [PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure detected by watchdog at work sequence"
    " id: 5 PG status: last enqueued work: 5, last completed work: 4\n"
)
LAST_WORDS = (
    "Fatal Python error: {0}\n\nThread 0x00007f2b (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
    'Current thread 0x00007f8e (most recent call first):\n  File "{1}", line 20 in {2}\n'
    '  File "/job/train.py", line 40 in <module>\n'
)
CALL = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "all_reduce"


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("error", "inside", "left"),
    [
        ("Segmentation fault", False, True),
        ("Segmentation fault", True, True),
        ("Bus error", False, True),
        ("Aborted", False, True),
        ("Aborted", True, False),  # somebody ended it since it hung
    ],
)
def test_a_rank_that_ended_beside_those_whose_calls_timed_out(
    error: str, inside: bool, left: bool, together: bool, tmp_path: Path
) -> None:
    """Its own log has no line of a watchdog, and it belongs to the group of all ranks all the same."""
    (tmp_path / "job").mkdir()
    words = LAST_WORDS.format(error, *(CALL if inside else ("/job/train.py", "load")))
    logs = {0: TIMED_OUT.format(0), 1: words, 2: TIMED_OUT.format(2)}
    if together:
        logs[1] = "".join(f"[rank1]: {line}\n" for line in words.splitlines())
        (tmp_path / "job" / "all.log").write_text("".join(logs.values()))
    else:
        for rank, text in logs.items():
            (tmp_path / "job" / f"rank{rank}.log").write_text(text)
    found = diagnose_found(gather([tmp_path / "job"]))
    verdict = found.verdict
    if left:
        assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (1,))
        assert "anks 0 and 2 wait in all_reduce (call 5 on default_pg) for rank 1, which left by" in verdict.say
        assert f"Fatal Python error: {error}" in verdict.say
    else:
        # Whether it had made the call, nothing tells.
        assert (found.code, verdict.ranks) == (3, ())


def test_a_rank_with_a_stack_alone_belongs_to_the_group_of_all(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    for rank in (0, 2):
        (tmp_path / "job" / f"rank{rank}.log").write_text(TIMED_OUT.format(rank))
    (tmp_path / "job" / "rank1.txt").write_text(
        'Thread 71 (idle): "MainThread"\n    read (data.py:7)\n    <module> (train.py:9)\n'
    )
    verdict = diagnose_found(gather([tmp_path / "job"])).verdict
    assert verdict.cls is not Class.BELOW
    assert verdict.certainty is not Certainty.CERTAIN
