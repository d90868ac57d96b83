"""The grid of request rates of `bench/gpu`: its order, what fits, what it reports; and the whole of it on CPU ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu import page, rate, rate_report
from bench.gpu.grid import START_S, UNKNOWN_S, Grid, Ranks, RateCell, next_cell

if TYPE_CHECKING:
    from pathlib import Path

GRID = Grid()
FINE = "fine:span=4"


def test_the_plan_interleaves_what_is_compared() -> None:
    cells = list(GRID.cells())
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 3 * 2 * 5
    for number in range(5):
        mine = cells[12 * number : 12 * (number + 1)]
        assert {cell.repetition for cell in mine} == {number}, "one repetition after the other"
        assert all(one.ranks == other.ranks for one, other in zip(mine[::2], mine[1::2], strict=True))
    assert len({cell.ranks for cell in cells[::12]}) == 5, "each repetition begins elsewhere"
    firsts = [cell.policy for cell in cells[::2]]
    assert abs(firsts.count("normal") - firsts.count(FINE)) <= 2


@given(
    seconds=st.lists(st.floats(5, 80), min_size=60, max_size=60),
    start_s=st.floats(10, 80),
    window=st.floats(250, 600),
    failing=st.sets(st.integers(0, 59), max_size=3),
)
def test_invocations_together_run_every_cell_and_none_overruns(
    seconds: list[float], start_s: float, window: float, failing: set[int]
) -> None:
    cells = list(GRID.cells())
    takes = dict(zip(cells, seconds, strict=True))
    done: dict[RateCell, float] = {}
    failures: dict[RateCell, int] = {}
    for _ in range(80):
        left, up, broken, ran = window, None, set[Ranks](), 0
        known = start_s if done else START_S
        while cell := next_cell(cells, done, failures, left, up=up, start_s=known, broken=broken):
            assert cell not in done
            assert cell.ranks not in broken
            left -= 0 if cell.ranks == up else start_s
            up, known = cell.ranks, start_s
            ran += 1
            if cells.index(cell) in failing and failures.get(cell, 0) < 2:
                failures[cell] = failures.get(cell, 0) + 1
                broken.add(cell.ranks)
                up = None
                continue
            left -= takes[cell]
            # What is not known may take longer than it was given; ranks that are known never overrun for long.
            assert left > -80
            done[cell] = takes[cell]
        if not ran:
            break
    assert {cell for cell in cells if cell not in done} == {cells[at] for at in failing}


def test_nothing_is_begun_that_does_not_fit() -> None:
    [first, second, *_] = GRID.cells()
    one = {"up": None, "start_s": 40.0}
    assert next_cell([first], {}, {}, UNKNOWN_S * 1.15 + 39, **one) is None  # type: ignore[arg-type]
    assert next_cell([first], {}, {}, UNKNOWN_S * 1.15 + 41, **one) == first  # type: ignore[arg-type]
    # The ranks are up: a later repetition fits where other ranks do not.
    again = RateCell(*first.ranks, first.policy, 1)
    other = RateCell("plain", "nccl", "normal", 0)
    done = {first: 20.0, second: 20.0}
    assert next_cell([other, again], done, {}, 30.0, up=first.ranks, start_s=40.0) == again
    assert next_cell([other, again], done, {}, 90.0, up=first.ranks, start_s=40.0) == other


def results(**rates: float) -> dict[RateCell, dict[str, Any]]:
    """Runs by `<exchange>_<policy>`, three repetitions each, in which only the first of fine over DeepEP is off."""
    found = {}
    for name, value in rates.items():
        exchange, policy = name.split("_")
        for number in range(3):
            off = 0.9 if (exchange, policy, number) == ("deepep", "fine", 0) else 1.0
            metrics = {
                "request_throughput": value * off, "output_throughput": 100 * value * off, "makespan_s": 100 / value,
            }  # fmt: skip
            cell = RateCell("fp8", exchange, {"fine": FINE}.get(policy, policy), number)
            found[cell] = {"metrics": metrics, "about": {"gpus": ["H"] * 2}}
    return found


def test_the_ratios_of_the_paper() -> None:
    found = rate_report.summary(
        results(none_normal=10, none_fine=11, nccl_normal=10.4, nccl_fine=11, deepep_normal=9, deepep_fine=11.5)
    )
    by = {each["ratio"]: each for each in found["ratios"]}
    assert list(by) == [
        f"{FINE} over deepep, over normal over deepep",
        f"{FINE} over deepep, over normal over nccl",
        f"{FINE} over deepep, over normal over none",
        f"{FINE} over nccl, over normal over nccl",
        f"{FINE} over none, over normal over none",
    ]
    first, second, third, *others = by.values()
    assert (first["requests"], first["target"], first["met"]) == (pytest.approx(11.5 / 9), 1.218, True)
    assert (first["requests_low"], first["requests_high"]) == (pytest.approx(0.9 * 11.5 / 9), pytest.approx(11.5 / 9))
    assert (second["requests"], second["target"], second["met"]) == (pytest.approx(11.5 / 10.4), 1.125, False)
    assert (third["requests"], third["met"]) == (pytest.approx(1.15), True)
    assert third["tokens"] == pytest.approx(1.15)
    assert all(each["target"] is each["met"] is None for each in others)
    text = rate_report.text(found)
    assert "fp8 weights (median [IQR])" in text
    assert text.count("at least 1.125") == 2


def test_a_grid_that_is_not_whole_has_the_ratios_that_it_can_have() -> None:
    assert rate_report.summary({})["ratios"] == []
    assert rate_report.text(rate_report.summary({})).startswith("weights")
    found = rate_report.summary(results(deepep_fine=11, none_normal=10))
    assert [each["ratio"] for each in found["ratios"]] == [f"{FINE} over deepep, over normal over none"]


def test_the_page_shows_them_and_drops_the_claim() -> None:
    claim = "DeepEP: request rate end to end"
    assert claim in page.page({})
    device = {"weights": "dummy", "quantization": None}
    settings = {
        "world": {"size": 2, "adp": 2, "ep": 2}, "device": device, "model": "m", "trace": "paper",
        "shape": {"fraction": 0.5, "length_scale": 0.25}, "rows": 32, "prefill_tokens": 16384,
    }  # fmt: skip
    shown = page.page({"rate-g2.json": {"settings": settings, **rate_report.summary(
        results(deepep_normal=9, deepep_fine=11.5))}})  # fmt: skip
    assert claim not in shown
    assert "## Request rates over expert exchanges (`rate-g2.json`)" in shown
    ratio = f"{FINE} over deepep, over normal over deepep"
    assert f"| fp8 | {ratio} | 1.278 | 1.150 to 1.278 | 1.278 | at least 1.218 | yes |" in shown


SMALL = (
    "--device", "cpu", "--world", "2", "--adp", "2", "--ep", "2", "--fraction", "0.02", "--turns", "2",
    "--length-scale", "0.01", "--rows", "2", "--prefill-tokens", "16", "--repetitions", "1", "--weights", "plain",
)  # fmt: skip


def test_two_invocations_on_cpu_ranks_measure_the_grid_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`gloo` cannot be had by ranks of one host: the others are measured all the same."""
    for needed in ("torch", "uvloop", "safetensors"):
        pytest.importorskip(needed)
    from models.tiny import write_checkpoint

    write_checkpoint(tmp_path / "model")
    argv = [*SMALL, "--model", str(tmp_path / "model"), "--minutes", "10"]
    wide = ["--exchanges", "none", "gloo", "shm", "--out", str(tmp_path / "1")]
    assert rate.main([*argv, *wide]) == 1
    out, err = capfd.readouterr()
    assert err.count("\n") == 1
    assert "rate: plain weights over gloo: --exchange gloo: the ranks of this host share memory" in err
    assert "2 runs are left" in out
    names = {path.stem for path in (tmp_path / "1" / "cells").iterdir()}
    assert names == {f"rate_plain_{exchange}_{policy}_0" for exchange in ("none", "shm")
                     for policy in ("normal", "fine-span=4")}  # fmt: skip
    fewer = ["--exchanges", "none", "shm", "--earlier", str(tmp_path / "1"), "--out", str(tmp_path / "2")]
    assert rate.main([*argv, *fewer]) == 0
    out, err = capfd.readouterr()
    assert (": makespan" in out, "Nothing is left." in out, err) == (False, True, "")
    found = json.loads((tmp_path / "2" / "rate.json").read_text())
    assert {(group["exchange"], group["policy"]) for group in found["groups"]} == {
        (exchange, policy) for exchange in ("none", "shm") for policy in ("normal", FINE)
    }
    for group in found["groups"]:
        assert group["request_throughput"] > 0
        assert group["completed"] == 6
        assert group["dropped_events"] == 0
    assert len(found["ratios"]) == 2
    assert rate.main([*argv, *fewer, "--seed", "1"]) == 2
    assert "its cells were measured with shape" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "x", "--device", "cpu", "--weights", "fp8"], "--quantization applies to --device cuda only"),
        (["--model", "x", "--device", "cpu", "--weights", "plain", "--policies", "fin"], "did you mean fine"),
        (["--model", "nowhere", "--device", "cpu", "--weights", "plain"], "nowhere: no such directory"),
    ],
)
def test_unusable_commands_are_one_line(
    argv: list[str], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert rate.main([*argv, "--out", str(tmp_path)]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert err.count("\n") == 1
