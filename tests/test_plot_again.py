"""`turnstile plot`: a run's figures are those that were drawn at its end, also where that was interrupted."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from rollout import cli
from rollout.report import plots
from tests import test_rollout_cli
from tests.test_rollout_cli import SMALL, write_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

engines = test_rollout_cli.engines


def figures(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.png")}


@pytest.mark.parametrize(
    ("arguments", "cut"),
    [
        (("rollout",), {}),
        (("rollout",), {5: 1}),
        (("compare", "--policy", "normal", "--policy", "fine:span=2"), {}),
        (("compare", "--policy", "normal", "--policy", "fine", "--repeat", "2"), {}),
    ],
    ids=["one policy", "a turn ended early", "several", "repeats"],
)
def test_figures_are_drawn_again_as_they_were(
    arguments: tuple[str, ...], cut: dict[int, int], engines: Callable[..., Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    engines(on_policy=write_record, cut=cut or None)
    out = tmp_path / "run"
    assert cli.main([*arguments, *SMALL, "--out", str(out)]) == int(bool(cut))
    before = figures(out)
    assert len(before) == (2 if arguments[0] == "rollout" else 3)
    for name in before:
        (out / name).unlink()
    rest = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert cli.main(["plot", str(out)]) == 0
    assert figures(out) == before
    said = capsys.readouterr()
    assert {*said.out.splitlines()} == {str(out / name) for name in before}
    assert said.err == ""
    assert all(path.read_bytes() == data for path, data in rest.items())


@pytest.mark.parametrize("where", ["lanes", "completion", "_png"])
def test_an_interrupt_while_figures_are_drawn_says_how_to_draw_them(
    where: str, engines: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    engines(on_policy=write_record)
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, where, interrupted)
        assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"turnstile: interrupted: the run is complete and kept in {out}, its figures are not: `turnstile plot {out}`"
        " draws them\n"
    )
    for name in ("run.json", "report.json"):
        assert json.loads((out / name).read_text())["status"] == "complete"
    assert not [path for path in out.iterdir() if path.name.startswith(".")], "nothing half-written"
    assert cli.main(["plot", str(out)]) == 0
    assert {*figures(out)} == {"completion.png", "lanes-fine.png"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out: (out / "run.json").unlink(), "it holds no run (run.json)"),
        (lambda out: (out / "run.json").write_text('{"status": "interrupted"}'), "is not complete (interrupted)"),
        (lambda out: (out / "run.json").write_text("[]"), "is not complete (no status)"),
        (lambda out: (out / "run.json").write_text("{"), "run.json: it cannot be read"),
        (lambda out: (out / "run.json").write_text('{"status": "complete"}'), "it names no policies, repeat and slice"),
        (lambda out: (out / "requests.jsonl").write_text("[]\n"), "requests.jsonl:1: not a row of requests.jsonl"),
        (lambda out: (out / "requests.jsonl").unlink(), "requests.jsonl: it cannot be read (No such file"),
        (lambda out: [(out / "requests.jsonl").unlink(), os.mkfifo(out / "requests.jsonl")], "not a regular file"),
    ],
)
def test_what_holds_no_complete_run_is_one_line(
    change: Callable[[Path], object], says: str, engines: Callable[..., Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    engines()
    out = tmp_path / "run"
    assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 0
    before = figures(out)
    change(out)
    capsys.readouterr()
    assert cli.main(["plot", str(out)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert says in said.err
    assert figures(out) == before


@pytest.mark.parametrize("where", [".", "run.json"])
def test_a_run_that_others_could_have_written_is_refused(
    where: str, engines: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines(on_policy=write_record)
    out = tmp_path / "run"
    assert cli.main(["rollout", *SMALL, "--out", str(out)]) == 0
    before = figures(out)
    (out / where).chmod(0o777)
    capsys.readouterr()
    assert cli.main(["plot", str(out)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"turnstile: {out / where}: others may write it (mode 777): `chmod go-w` it")
    assert said.err.count("\n") == 1
    assert figures(out) == before
