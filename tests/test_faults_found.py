"""What once went wrong with signals, two runs in one directory, other models and unusable files."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.request import SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout import fingerprint, replay, resume
from rollout.engine import Engine
from rollout.ranks import nursery
from rollout.report import files as report_files
from rollout.trace import read as trace
from rollout.trace.trajectory import Trajectory, Turn
from tests.commands import lingering, until
from tests.test_faults_cli import lines, rollout, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rollout.ranks.nursery import Nursery

ROW: dict[str, Any] = {
    "policy": "fine", "repeat": 0, "trajectory": "a", "turn": 0, "request": 1, "prompt_tokens": 3, "new_tokens": 3,
    "cached_tokens": 0, "asked_tokens": 2, "output_tokens": 2, "finish_reason": "length", "wait_ms": 0,
    "released_ns": 1, "submitted_ns": 2, "finished_ns": 5, "token_ns": [3, 4], "tokens": [7, 8],
}  # fmt: skip


def with_nursery(run: subprocess.Popen[str]) -> bool:
    """Whether the command has started its forking process."""
    found = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=False)
    return bool(found.stdout.strip())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_has_hardly_begun_ends_at_the_first_signal(number: signal.Signals, tmp_path: Path) -> None:
    with rollout(tmp_path / "run", *lingering(tmp_path)) as run:
        until(lambda: with_nursery(run))
        run.send_signal(number)
        stdout, stderr = run.communicate(timeout=120)
    assert (run.returncode, stdout) == (130, "")
    assert stderr.startswith("turnstile: interrupted")
    assert stderr.count("\n") == 1


MOMENTS = """
import os, signal, sys, threading, time

if sys.orig_argv[1:3] == ["-m", "turnstile"]:
    seen, at, hits = [0, False], int(os.environ["AT"]), int(os.environ["HITS"])
    begins = os.environ["SINCE"]

    def hit():
        for _ in range(hits):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    def hook(event, args):
        seen[1] = seen[1] or begins in (event, f"{event} {args[0] if args else ''}")
        seen[0] += seen[1]
        if seen[0] == at and seen[1]:
            seen[0] += 1
            threading.Thread(target=hit, daemon=True).start()

    sys.addaudithook(hook)
"""
EVENTS = [
    *[("import rollout", at) for at in (2, 300, 1300, 1450, 5000, 12_000, 17_500)],
    *[("subprocess.Popen", at) for at in (1, 6, 20, 60)],
]
"""Of the interpreter (an import, a file, a socket ...), since the first module and since ranks are started."""


@pytest.mark.slow
@pytest.mark.parametrize("hits", [1, 9])
def test_whenever_it_is_interrupted_it_ends_in_one_line(
    hits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(MOMENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HITS", str(hits))
    reached = set()
    for since, at in EVENTS:
        monkeypatch.setenv("SINCE", since)
        monkeypatch.setenv("AT", str(at))
        with rollout(tmp_path / f"{since[:6]}{at}", "--fraction", "0.2", "--time-scale", "1") as run:
            stdout, stderr = run.communicate(timeout=120)
        assert (run.returncode, stdout, stderr.count("\n")) == (130, "", 1), (since, at, stderr)
        assert stderr.startswith("turnstile: interrupted")
        reached.add(stderr.startswith("turnstile: interrupted: "))
    assert reached == {False, True}, "signals came before there was a run, and during one"


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.005, 0.05])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_end_again_and_again_ends_as_if_told_once(
    number: signal.Signals, pause_s: float, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with rollout(out, *lingering(tmp_path)) as run:
        until(lambda: lines(out) >= 3)
        while run.poll() is None:
            run.send_signal(number)
            time.sleep(pause_s)
        stdout, stderr = run.communicate(timeout=120)
    assert (run.returncode, stdout, stderr.count("\n")) == (130, "", 1)
    assert stderr.startswith("turnstile: interrupted: ")
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_a_directory_has_one_run_at_a_time_and_one_model(tmp_path: Path) -> None:
    out, policy = tmp_path / "run", lingering(tmp_path)
    with rollout(out, *policy) as run:
        until(lambda: lines(out) >= 3)
        run.send_signal(signal.SIGSTOP)  # it is not to be through before the second one has looked
        with rollout(out, *policy, "--resume") as second:
            said = second.communicate(timeout=120)[1]
        run.send_signal(signal.SIGCONT)
        assert (second.returncode, said.count("\n")) == (2, 1)
        assert "another run is going on in it" in said
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=120)
    done = rows(out)
    other = write_checkpoint(tmp_path / "other", seed=99)
    with rollout(out, *policy, "--resume", "--model", str(other)) as again:
        said = again.communicate(timeout=120)[1]
    assert (again.returncode, said.count("\n")) == (2, 1)
    assert "model_sha256" in said
    assert rows(out) == done


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_closed_standard_stream_is_no_fault(closed: str, tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -m turnstile rollout --fraction 0.02 --turns 1 --length-scale 0.02 --time-scale 0"
        f" --out {tmp_path / 'run'} --json {closed}"
    )
    ran = subprocess.run(["sh", "-c", command], timeout=300, check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_a_context_of_millions_is_refused_at_once(tmp_path: Path) -> None:
    turn = {"conversation_id": "c", "turn": 0, "new_tokens": 200_000_000, "retained_tokens": 0, "output_tokens": 3,
            "input_tokens": 200_000_000, "wait_ms": 0}  # fmt: skip
    (tmp_path / "trace.jsonl").write_text(json.dumps(turn) + "\n")
    command = [sys.executable, "-m", "turnstile", "rollout", "--trace", str(tmp_path / "trace.jsonl")]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], timeout=120, check=False, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "grows to 200000003 tokens, but --kv-tokens by default is 32768" in ran.stderr
    assert not (tmp_path / "run").exists()


def change(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(ROW | fields).encode()


@pytest.mark.parametrize(
    "line",
    [
        lambda: b"\xff\xfe",
        lambda: b"[" * 100_000,
        lambda: b"[]",
        change(trajectory=["a"]),
        change(finished_ns="x"),
        change(tokens=["x"]),
        change(token_ns=[1.5]),
        change(turn=None),
    ],
)
def test_a_line_that_is_no_row_is_named(line: Callable[[], bytes], tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(change()() + b"\n" + line() + b"\n")
    with pytest.raises(UsageError, match=r"requests\.jsonl:2: not a row"):
        resume.rows(path)


@pytest.mark.parametrize("fields", [{"new_tokens": 4}, {"asked_tokens": 1, "output_tokens": 1}, {"tokens": [7, 99]}])
def test_a_row_of_another_run_is_named(fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    trajectories = [Trajectory("a", (Turn(3, 2),))]
    path.write_bytes(change()() + b"\n")
    assert list(resume.kept(path, replay.read_rows(path), trajectories, 99)) == [("fine", 0)]
    path.write_bytes(change(turn=7)() + b"\n" + change(**fields)() + b"\n")
    with pytest.raises(UsageError, match=r"requests\.jsonl:2: turn 0 of a is not that of the trace"):
        resume.kept(path, replay.read_rows(path), trajectories, 99)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "3"])
def test_a_run_json_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match="cannot be read"):
        resume.check(tmp_path, {})


def test_a_directory_is_held_by_one(tmp_path: Path) -> None:
    held = report_files.hold(tmp_path, resume=False)
    with pytest.raises(UsageError, match="another run is going on"):
        report_files.hold(tmp_path, resume=True)
    os.close(held)
    (tmp_path / "run.json").touch()
    with pytest.raises(UsageError, match="another run has just begun"):
        report_files.hold(tmp_path, resume=False)
    os.close(report_files.hold(tmp_path, resume=True))


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        report_files.directory(tmp_path / ("x" * 300))


def test_an_identifier_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"conversation_id": "\\ud800", "turn": 0, "new_tokens": 1, "retained_tokens": 0}')
    with pytest.raises(UsageError, match=r"t\.jsonl:1: field 'conversation_id'"):
        trace.read(path)


def test_a_fingerprint_tells_weights_apart_and_copies_not(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", vocab=20_000, hidden=128)  # large enough to be sampled
    shutil.copytree(first, tmp_path / "b")
    second = write_checkpoint(tmp_path / "c", vocab=20_000, hidden=128, seed=1)
    assert sum(path.stat().st_size for path in first.glob("*.safetensors")) > 8 << 20
    assert fingerprint.of(first) == fingerprint.of(tmp_path / "b") != fingerprint.of(second)


async def test_an_update_that_its_caller_gave_up_leaves_nothing_paused(tmp_path: Path, nursery: Nursery) -> None:
    old, new = write_checkpoint(tmp_path / "old"), write_checkpoint(tmp_path / "new", seed=1)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async with Engine(new, World(), nursery=nursery) as engine:
        expected = (await engine.generate([3, 4, 5], params)).tokens
    async with Engine(old, World(), nursery=nursery) as engine:
        assert (await engine.generate([3, 4, 5], params)).tokens != expected
        update = asyncio.create_task(engine.update_weights(new))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        update.cancel()
        assert (await engine.generate([3, 4, 5], params)).tokens == expected


async def test_a_stopped_nursery_does_not_keep_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "END_S", 0.5)
    made = nursery.Nursery()
    made._asked = True
    os.kill(made._process.pid, signal.SIGSTOP)
    made.close()
    assert made._process.returncode == -signal.SIGKILL
