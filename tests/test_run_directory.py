"""What somebody does to a run's directory while it goes on loses no turn, and ends in one line."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from rollout import cli
from rollout.replay import read_rows
from tests import test_rollout_cli
from tests.test_rollout_cli import SMALL, write_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

engines = test_rollout_cli.engines
TWO = ("compare", *SMALL, "--policy", "normal", "--policy", "fine")


def hit(engines: Callable[..., Any], what: Callable[[], object]) -> None:
    """Do it once the first policy's turns are done."""

    def on_policy(policy: str, folder: Path) -> None:
        if policy == "fine":
            what()
        write_record(policy, folder)

    engines(on_policy=on_policy)


@pytest.mark.parametrize("how", ["removed", "cut off", "written to", "replaced"])
def test_rows_that_were_taken_away_are_written_again(
    how: str, engines: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    rows = out / "requests.jsonl"

    def what() -> None:
        if how == "cut off":
            os.truncate(rows, 100)
        elif how == "written to":
            rows.write_bytes(rows.read_bytes() + b"{}\n")
        else:
            rows.unlink()
            if how == "replaced":
                rows.write_bytes(b"mine")

    hit(engines, what)
    assert cli.main([*TWO, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err == (
        f"turnstile: {rows} was removed or changed while the run went on: its 24 turns are written again\n"
    )
    assert len({(row.policy, row.trajectory, row.turn) for row in read_rows(rows)}) == 24
    assert json.loads((out / "run.json").read_text())["status"] == "complete"


@pytest.mark.parametrize("name", ["report.json", "run.json"])
def test_a_report_that_cannot_be_written_is_one_line(
    name: str, engines: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def what() -> None:
        (out / name).unlink(missing_ok=True)
        (out / name).mkdir()

    hit(engines, what)
    assert cli.main([*TWO, "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"turnstile: {out / name} cannot be written at the end of the run (")
    assert said.err.endswith(f" go on with --out {out} --resume\n")
    assert said.err.count("\n") == 1
    assert len(list(read_rows(out / "requests.jsonl"))) == 24


def test_a_directory_that_is_gone_is_one_line(
    engines: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    engines(on_policy=lambda policy, folder: shutil.rmtree(out) if policy == "fine" else None)
    assert cli.main([*TWO, "--out", str(out)]) == 1
    *unread, last = capsys.readouterr().err.splitlines()
    assert all("no usable record" in line for line in unread)
    assert last.startswith(f"turnstile: {out / 'requests.jsonl'} cannot be written at the end of the run (No such")


def test_a_figure_that_cannot_be_written_says_how_to_draw_it(
    engines: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    hit(engines, (out / "completion.png").mkdir)
    assert cli.main([*TWO, "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"turnstile: {out / 'completion.png'} cannot be written (")
    assert said.err.endswith(f"`turnstile plot {out}` draws them\n")
    assert json.loads((out / "run.json").read_text())["status"] == "complete"
