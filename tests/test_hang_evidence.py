"""`turnstile hang` on evidence that is poor, damaged, of two jobs, or in the way of its own output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.errors import UsageError
from kernel.journal import Journal
from kernel.record import Recorder, ring_path
from verify.hang import main

DATA = Path(__file__).parent / "data"
DUMPS = DATA / "fr" / "h200" / "missing_member"
MEGATRON = DATA / "fr" / "megatron16" / "lock_gil"


def hang(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and what was printed."""
    code = main("hang", [str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def run(folder: Path, *ranks: int) -> Path:
    """A run's directory with rings of these ranks."""
    for rank in ranks:
        path = ring_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        Journal(Recorder(path, rank=rank, groups={"P.TP": (0, 1)}, capacity=64)).close()
    return folder


@pytest.mark.parametrize("name", ["locals.txt", "native.txt", "spy.json", "rank1.txt", "rank0.txt"])
def test_stacks_alone_are_no_all_clear(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = hang(capsys, "--json", DATA / "stacks" / name)
    assert code == 3
    assert json.loads(out)["certainty"] == "undecided"


def test_a_process_that_shows_nothing_is_no_all_clear(capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        code, out = hang(capsys, "--pid", process.pid)
    finally:
        process.kill()
        process.communicate()
    assert code == 3
    assert "stacks alone do not show that calls meet" in " ".join(out.split())


def test_damaged_dumps_beside_others_cost_only_what_they_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 3 and 4 have no part in the fault of ranks 9 and 14."""
    shutil.copytree(MEGATRON, tmp_path / "job")
    os.truncate(tmp_path / "job" / "_dump_3", 500)
    os.truncate(tmp_path / "job" / "_dump_4", 0)
    code, out = hang(capsys, "--json", tmp_path / "job")
    found = json.loads(out)
    assert (code, found["class"], found["ranks"]) == (1, "missing", [9, 14])
    told = [line for line in found["unknown"] if line.startswith("not used: ")]
    assert len(told) == 2
    assert "no dump, log or stack from ranks 3 and 4" in found["unknown"]
    for name in ("_dump_3", "_dump_4"):  # named, it was meant
        with pytest.raises(UsageError, match=f"{name}: (damaged|empty)"):
            hang(capsys, tmp_path / "job" / name)


def test_an_unsafe_dump_is_refused_wherever_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DUMPS, tmp_path / "job")
    (tmp_path / "job" / "dump_rank_2").write_bytes(b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00idtR.")
    with pytest.raises(UsageError, match="dump_rank_2: unsafe pickle, not loaded"):
        hang(capsys, tmp_path / "job")


def test_a_page_is_never_written_over_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DUMPS, tmp_path / "job")
    dump, page = tmp_path / "job" / "dump_rank_0", tmp_path / "page.html"
    before = dump.read_bytes()
    with pytest.raises(UsageError, match="dump_rank_0: it exists and is no page"):
        hang(capsys, tmp_path / "job", "--html", dump)
    assert dump.read_bytes() == before
    for _ in range(2):  # an older page may be replaced
        assert hang(capsys, DUMPS, "--html", page)[0] == 1
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_two_runs_are_not_taken_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run(tmp_path / "all" / "one", 0, 1), run(tmp_path / "all" / "other", 1)
    with pytest.raises(UsageError, match="both hold rank 1: name the record of one run"):
        hang(capsys, one, other)
    with pytest.raises(UsageError, match=r"all: it holds 2 runs: name one of them: one, other$"):
        hang(capsys, tmp_path / "all")


def test_records_of_two_hosts_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = hang(capsys, run(tmp_path / "here", 0), run(tmp_path / "there", 1))
    assert code in (0, 3)
    assert "no dump, log or stack" not in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["--json", str(DUMPS)], [str(DUMPS)]])
def test_output_that_cannot_be_written_is_one_line_and_no_verdict(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "turnstile", "hang", *arguments], stdout=full, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent, timeout=120, check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "the output cannot be written (No space left on device)" in ended.stderr
