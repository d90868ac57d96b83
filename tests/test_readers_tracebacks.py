"""A traceback in a log: the end of a rank, or of a thread, a child, a finalizer, or nothing that mattered."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.record.layout import Kind as Kind_
from tests.installed_rings import pair, told
from tests.test_hang_evidence import hang
from tests.test_readers_deaths import job
from tests.test_readers_logs import status, timeout, written
from verify.attach import attach
from verify.events import Kind, Site
from verify.hang.diagnosis import diagnose_found
from verify.readers import watchdog
from verify.readers.found import AFTER, ENDED, STILL, Found, Stack
from verify.readers.gather import gather, merge
from verify.readers.tracebacks import FEW

if TYPE_CHECKING:
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 20, in main\n    load()\n'
LEFT = f"{TRACE}KeyError: 'loss'\n"
SPY = 'Process 71: python train.py\nPython v3.12.1 (/usr/bin/python3.12)\n\nThread 71 (idle): "MainThread"\n    {0}\n'

ASIDE = {
    "thread": "import threading\ndef write(): raise OSError('disk full')\n"
    "t = threading.Thread(target=write, name='writer'); t.start(); t.join()",
    "child": "import multiprocessing\ndef work(): raise OSError('disk full')\n"
    "p = multiprocessing.get_context('fork').Process(target=work); p.start(); p.join()",
    "finalizer": "class X:\n    def __del__(self): raise OSError('disk full')\nX()",
    "asyncio": "import asyncio\nasync def f(): raise OSError('disk full')\n"
    "async def main():\n    t = asyncio.ensure_future(f()); await asyncio.sleep(0); del t\nasyncio.run(main())",
    "logging": "import logging, sys\nclass H(logging.StreamHandler):\n"
    "    def format(self, record): raise OSError('disk full')\nlogging.getLogger().addHandler(H())\n"
    "logging.error('x')",
}


def alone(folder: Path, text: str) -> Diagnosis:
    """Of ranks 0 and 1, which wait, and of rank 2, of which there is this log."""
    stuck = "".join(timeout(rank, 50) + status(rank, 50, 50, 49) for rank in (0, 1))
    logs = [written(folder, stuck, "job.log"), written(folder, text, "rank2.log")]
    return diagnose_found(watchdog.of_logs(logs))


def says(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hang(capsys, "--json", *paths)[1])
    return found


@pytest.mark.parametrize("name", ASIDE)
def test_what_python_itself_prints_of_others_ends_no_rank(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words of this very interpreter, so that no other way of putting it is missed."""
    script = tmp_path / "program.py"
    script.write_text(ASIDE[name] + "\n")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "OSError: disk full" in run.stderr
    found = says(capsys, job(tmp_path, "rank1.log", run.stderr))
    assert (found["class"], found["ranks"]) == ("missing", [1])
    assert any("disk full" in line for line in found["chain"])
    if name == "thread":
        assert any(f"rank 1: {ENDED}thread writer ended by OSError: disk full at " in line for line in found["chain"])


@pytest.mark.parametrize(
    "after",
    [
        "", "\n", "Fatal Python error: Aborted\n",
        "[rank2]:[W1130 20:28:12.1 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called\n",
        "[rank2]:[E1130 20:28:12.1 ProcessGroupNCCL.cpp:683] [Rank 1] some watchdog thread terminated\n",
        "E1130 20:28:12.2 26472 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)\n"
        + TRACE + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n" + "=" * 60 + "\n"
        "train.py FAILED\n" + "-" * 60 + "\nFailures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n"
        "[0]:\n  time      : now\n" + "=" * 60 + "\n",
        "Exception ignored in: <function X.__del__ at 0x7f>\n" + TRACE + "TypeError: at the end\n",
        "\nDuring handling of the above exception, another exception occurred:\n\n" + TRACE + "TypeError: more\n",
        "srun: error: node1: task 1: Exited with exit code 1\n",
    ],
)  # fmt: skip
def test_what_is_written_of_an_end_leaves_it_one(after: str, tmp_path: Path) -> None:
    verdict = alone(tmp_path, "step 3\n" + LEFT + after).verdict
    assert (str(verdict.cls), str(verdict.certainty), verdict.ranks) == ("exception", "certain", (2,))
    assert "KeyError: 'loss'" in verdict.say


@pytest.mark.parametrize(
    ("lines", "left", "certainty"), [(0, True, "certain"), (3, True, "conditional"), (4, False, "")]
)
def test_a_rank_that_writes_on_has_not_left(lines: int, left: bool, certainty: str, tmp_path: Path) -> None:
    found = alone(tmp_path, LEFT + "saved the model\n" * lines)
    assert str(found.verdict.cls) == ("exception" if left else "missing")
    if left:
        assert str(found.verdict.certainty) == certainty
    else:
        assert any("rank 2 logged KeyError: 'loss' at train.py:20 in main; it may" in line for line in found.unknown)


def test_another_traceback_shows_that_it_went_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = says(capsys, job(tmp_path, "rank1.log", LEFT + TRACE + "ValueError: bad batch\n"))
    assert "which left by ValueError: bad batch" in found["say"]
    assert "rank 1: it logged KeyError: 'loss' at train.py:20 in main" in found["chain"]


@pytest.mark.parametrize(("frames", "there"), [
    ("sleep (libc.so.6)\n    main (train.py:9)\n    <module> (train.py:40)", True),
    ("_shutdown (threading.py:1590)", False),
    ("wait (threading.py:629)\n    flush (train.py:8)", False),
])  # fmt: skip
def test_a_rank_that_was_seen_since_has_not_left(
    frames: str, there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its main thread runs the program; or has ended, while other threads or what is done at exit keep the process."""
    folder = job(tmp_path, "rank1.log", LEFT)
    (folder / "rank1.txt").write_text(SPY.format(frames))
    found = says(capsys, folder)
    assert (found["class"] != "exception") == there
    line = "rank 1: it was still there after it had logged KeyError: 'loss'"
    assert (line in found["chain"]) == there


def test_a_process_that_is_looked_at_has_not_left(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text(LEFT)
    script = "import time, sys\nprint('here', flush=True)\ntime.sleep(600)\n"
    (tmp_path / "sleeps.py").write_text(script)
    with subprocess.Popen(
        [sys.executable, tmp_path / "sleeps.py"], stdout=subprocess.PIPE, env={"RANK": "0", "WORLD_SIZE": "1"}
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            logs = gather([log])
            assert any(event.kind is Kind.EXIT for event in logs.events)
            both = merge([logs, attach([process.pid])])
        finally:
            process.kill()
    assert not any(event.kind is Kind.EXIT for event in both.events)
    assert "left" not in diagnose_found(both).verdict.say


LOST = f"{TRACE}RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation\n"


@pytest.mark.parametrize("lines", [0, FEW, FEW + 1, 40])
def test_a_timeout_that_was_caught_is_no_wait_that_lasts(lines: int, tmp_path: Path) -> None:
    log = written(tmp_path, LOST + "".join(f"retry {n}\n" for n in range(lines)), "rank1.log")
    assert watchdog.of_logs([log]).overdue == (frozenset({1}) if lines <= FEW else frozenset())


@pytest.mark.parametrize("seen", [None, "other", "lively", "stack"])
def test_who_was_seen_since_caught_what_it_logged(seen: str | None, tmp_path: Path) -> None:
    """And nothing of it is told as if it had left, or still waited in that call."""
    logs = gather([written(tmp_path, LOST, "rank1.log"), written(tmp_path, f"{LEFT}a\nb\nc\nd\n", "rank0.log")])
    assert (logs.overdue, [rank for rank, text in logs.remarks if text.startswith(AFTER)]) == (frozenset({1}), [1])
    main = (Site("train.py", 8, "<module>"),)
    stacks = tuple(Stack(rank, "MainThread", main, pid=70 + rank) for rank in (0, 1)) if seen == "stack" else ()
    lively = {"lively": frozenset({0, 1}), "other": frozenset({5})}.get(seen or "", frozenset())
    both = merge([logs, Found("here", stacks=stacks, lively=lively)])
    caught = seen in ("lively", "stack")
    assert both.overdue == (frozenset() if caught else frozenset({1}))
    assert [rank for rank, text in both.remarks if text.startswith(STILL)] == ([1] if caught else [])
    assert [rank for rank, text in both.remarks if text.startswith(AFTER)] == ([] if caught else [1])
    assert any("rank 0 logged KeyError: 'loss'" in line for line in both.unknown) is not caught


def test_a_dump_of_the_rank_may_be_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = says(capsys, job(tmp_path, "rank1.log", LEFT))
    assert (found["class"], found["certainty"]) == ("exception", "conditional")
    assert "rank 1 did not go on after that" in found["say"]


def test_logs_of_two_streams_tell_nothing_of_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "stderr.log").write_text(LEFT)
    (folder / "stdout.log").write_text("step 1\n" + "saved the model\n" * 9)
    for paths in (sorted(folder.iterdir()), sorted(folder.iterdir())[::-1]):
        found = watchdog.of_logs(paths)
        assert [event.operation for event in found.events if event.kind is Kind.EXIT] == ["KeyError: 'loss'"]


LINES = [
    *LEFT.splitlines(), "", "step 4", "saved", "Exception in thread Thread-1 (f):", "Process Foo-1:", "   ",
    "ValueError: odd", "During handling of the above exception, another exception occurred:", "[W1130 x",
    "RuntimeError: NCCL error", "Exception ignored in: <f>", "future: <Task>",
]  # fmt: skip


@given(lines=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(LINES)), max_size=40))
def test_ranks_in_one_log_do_not_disturb_each_other(
    lines: list[tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is told of a rank is what its own lines tell alone; and never that it left without a traceback."""

    def says_of(kept: list[tuple[int, str]], rank: int) -> list[object]:
        keep = "[rank7]: " + "\n[rank7]: ".join(LEFT.splitlines()) + "\n"
        text = keep + "".join(f"[rank{who}]: {line}\n" for who, line in kept)
        found = watchdog.READER.read(written(tmp_path_factory.mktemp("logs"), text))
        exits = [event.operation for event in found.events if event.kind is Kind.EXIT and event.rank == rank]
        remarks = [text for who, text in found.remarks if who == rank]
        return [exits, remarks, [each for each in found.traced if each[0] == rank], rank in found.undated]

    for rank in (0, 1):
        mine = [each for each in lines if each[0] == rank]
        assert says_of(lines, rank) == says_of(mine, rank)
        assert says_of(mine, rank)[0] == [] or any(line.startswith("Traceback") for _, line in mine)


def test_only_what_the_traceback_told_is_taken_back() -> None:
    """An end that something else tells stays, wherever a thread of the process was seen."""
    from verify.events import Event, Site, State

    log = Found(
        "log", (Event(0, Kind.EXIT, "SIGKILL", state=State.COMPLETED), Event(0, Kind.EXIT, "ValueError: x")),
        traced=frozenset({(0, "ValueError: x")}),
    )  # fmt: skip
    seen = Found("spy", stacks=(Stack(0, "MainThread", (Site("t.py", 3, "<module>"),), 71),))
    assert [event.operation for event in merge([log, seen]).events] == ["SIGKILL"]


MESH = (
    "RuntimeError: Gloo connectFullMesh failed with [/gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR:"
    " Connection refused, remote=[10.0.0.1]:40361$0"
)


@pytest.mark.parametrize(("other", "left"), [("", {0}), (TRACE + MESH, {0, 1}), (LEFT, {1})])
def test_a_host_that_cannot_be_reached_is_nobodys_end(other: str, left: set[int], tmp_path: Path) -> None:
    logs = [written(tmp_path, TRACE + MESH + "\n", "rank0.log"), written(tmp_path, f"step 1\n{other}", "rank1.log")]
    for each in (logs, logs[::-1]):
        found = watchdog.of_logs(each)
        assert {event.rank for event in found.events if event.kind is Kind.EXIT} == left
        assert {rank for rank, text in found.remarks if text.startswith(AFTER)} == ({0} if left == {1} else set())


@pytest.mark.parametrize(
    ("how", "cls", "ranks"),
    [("waits", "exception", (0,)), ("the same", "below", ()), ("before", "exception", (1,))],
)
def test_a_record_blames_who_could_not_connect(how: str, cls: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Unless nobody could, or another one had left before."""
    text = MESH.replace("RuntimeError: ", "")
    for (rank, _), mine in zip(pair(tmp_path), (True, how == "the same"), strict=True):
        if rank.rank == 1 and how == "before":
            rank.text(Kind_.EXCEPTION, "KeyError: 'MASTER_PORT'")
            continue
        group = rank.group("the default group", 0, 1)
        call = rank.call(group, "creation of the group", 0, medium="host")
        rank.wait(call)
        if mine:
            rank.done(call, f"RuntimeError: {text}")
            rank.text(Kind_.EXCEPTION, f"RuntimeError: {text}", a=call + 1)
    found = told(tmp_path)
    assert (str(found.verdict.cls), found.verdict.ranks) == (cls, ranks)
