"""Arguments of the Python API of another type than they must be, and names that lead elsewhere: one line each."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel import files
from kernel.errors import UsageError
from kernel.request import SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout import cli
from rollout.engine import Engine
from rollout.report import files as report_files
from rollout.trace import read as trace
from tests.test_faults_input import _two_turns

if TYPE_CHECKING:
    from rollout.ranks.nursery import Nursery

HOUSE = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


WRONG: list[dict[str, Any]] = [
    {"model": 5}, {"model": None}, {"model": b"x"}, {"world": 5}, {"world": "4"}, {"device": 7}, {"device": None},
    {"policy_config": "x"}, {"policy_config": [1]}, {"out": 5}, {"out": b"x"}, {"kv_tokens": "x"}, {"rows": None},
    {"rank_timeout_s": "x"}, {"rank_timeout_s": None}, {"stall_timeout_s": None}, {"exit_s": "x"}, {"nursery": 5},
    {"compiled": "x"}, {"policy": 5},
]  # fmt: skip


def test_an_argument_that_cannot_be_written_out_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^model=<int>: must be a path"):
        Engine(10**5000)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_engine_s_arguments(wrong: dict[str, Any], checkpoint: Path) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=rf"^{name}=") as caught:
        Engine(**{"model": checkpoint, **wrong})
    assert repr(value) in str(caught.value)
    assert "must be" in str(caught.value)


@pytest.mark.parametrize("sizes", [("4",), (1.5,), (None,), (4, "2"), (4, 2, None)], ids=str)
def test_a_world_s_sizes(sizes: tuple[Any, ...]) -> None:
    name = ("size", "adp", "ep")[len(sizes) - 1]
    with pytest.raises(UsageError, match=f"{name}={sizes[-1]!r}: must be a whole number"):
        World(*sizes)


def test_a_world_of_numpy_s_numbers_is_one_of_python_s() -> None:
    assert World(np.int64(4), np.int32(2), np.uint8(4)) == World(4, 2, 4)
    assert type(World(np.int64(4)).size) is int


async def test_what_an_open_engine_is_given(checkpoint: Path, nursery: Nursery) -> None:
    async with Engine(checkpoint, World(1), nursery=nursery) as engine:
        unknown: Any
        for unknown in (5, None, "abc", {1: 2}):
            with pytest.raises(UsageError, match=r"prompt=.*: must be a sequence of token ids"):
                engine.session().generate(unknown)
        for unknown in ("x", 5, {"max_tokens": 3}):
            with pytest.raises(UsageError, match=r"params=.*: must be turnstile\.SamplingParams, or None"):
                engine.session().generate([3], unknown)
        unknown = 5
        with pytest.raises(UsageError, match="policy_config=5: must be a mapping"):
            await engine.use_policy("fine", unknown)
        with pytest.raises(UsageError, match="record=5: must be a path"):
            await engine.use_policy("fine", record=unknown)
        with pytest.raises(UsageError, match="path=5: must be a path"):
            await engine.update_weights(unknown)
        with pytest.raises(UsageError, match="error=5: must be a"):
            engine.abort(unknown)
        assert len((await engine.generate([3], SamplingParams(max_tokens=2, ignore_eos=True))).tokens) == 2


@pytest.mark.parametrize("name", ["file", "file/below", "file/far/below"])
def test_a_file_where_the_run_s_directory_would_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    what = "it is a file" if name == "file" else rf"{tmp_path}/file above it is a file"
    with pytest.raises(UsageError, match=rf"--out {tmp_path}/{name}: {what}: choose a directory that can be written"):
        report_files.directory(tmp_path / name)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("command", ["rollout", "compare"])
def test_a_current_directory_that_is_gone(command: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = (
        f"import os, sys; os.rmdir({str(tmp_path / 'gone')!r}); from turnstile.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--out", str(tmp_path / "out")], cwd=tmp_path / "gone",
        env={**os.environ, "PYTHONPATH": str(HOUSE)}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "turnstile: the current directory is gone: change into one that is there, and start again\n"
    assert not (tmp_path / "out").exists()


def test_a_pipe_that_is_waited_for_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "SILENT_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said = ""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(trace.read, pipe)
        while not said and not reading.done():
            said += capsys.readouterr().err
        pipe.write_text("\n".join(_two_turns()))
        assert len(reading.result().trajectories) == 1
    assert said == f"turnstile: --trace {pipe}: a pipe to which nobody has written yet, waiting for at most 60 s\n"
    monkeypatch.setattr(files, "PIPE_S", 0.1)
    assert cli.main(["rollout", "--trace", str(pipe), "--out", str(tmp_path / "out")]) == 2
    assert "a pipe that nobody wrote to for 0.1 s" in capsys.readouterr().err
