"""Metrics against an independent recomputation with numpy, medians over repeats, and what the tables say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.replay import Row
from rollout.report import tables as report
from rollout.report.metrics import combine, measure, percentile, spread

MS = 1_000_000


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Row], dict[str, int]]:
    """Rows of a run as a replay would leave them, some turns cut short."""
    rows: list[Row] = []
    asked: dict[str, int] = {}
    for name in range(draw(st.integers(0, 5))):
        trajectory = f"c{name}"
        asked[trajectory] = draw(st.integers(1, 4))
        now = draw(st.integers(0, 50)) * MS
        for turn in range(asked[trajectory]):
            released = now
            submitted = released + draw(st.integers(0, 3 * MS))
            wanted = draw(st.integers(1, 6))
            given_ = wanted if draw(st.integers(0, 9)) else draw(st.integers(0, wanted - 1))
            stamps, at = [], submitted
            for _ in range(given_):
                at += draw(st.integers(1, 40 * MS))
                stamps.append(at)
            prompt = draw(st.integers(1, 500))
            reason = "length" if given_ == wanted else "abort"
            lengths = (prompt, 1, draw(st.integers(0, prompt)), wanted, given_)
            times = (released, submitted, at, tuple(stamps))
            rows.append(Row("fine", 0, trajectory, turn, len(rows), *lengths, reason, 0.0, *times))
            if given_ < wanted:
                break
            now = at + draw(st.integers(0, 100 * MS))
    return rows, asked


def recomputed(rows: list[Row], asked: dict[str, int]) -> dict[str, Any]:
    """The definitions of rollout.report.metrics, computed another way."""
    good = [row for row in rows if row.output_tokens == row.asked_tokens]
    first = np.array([row.token_ns[0] - row.submitted_ns for row in good]) / 1e6
    whole = np.array([row.token_ns[-1] - row.submitted_ns for row in good]) / 1e6
    counts = np.array([row.output_tokens for row in good])
    many = counts > 1
    values = {
        "ttft_ms": first,
        "e2el_ms": whole,
        "tpot_ms": (whole - first)[many] / (counts[many] - 1) if len(good) else np.array([]),
        "itl_ms": np.concatenate([np.diff(row.token_ns) for row in good] or [np.array([])]) / 1e6,
    }
    ends: dict[str, int] = {}
    starts: dict[str, int] = {}
    turns: dict[str, int] = {}
    for row in good:
        ends[row.trajectory] = row.finished_ns
        starts.setdefault(row.trajectory, row.released_ns)
        turns[row.trajectory] = turns.get(row.trajectory, 0) + 1
    values["trajectory_completion_s"] = np.array(
        [(ends[name] - starts[name]) / 1e9 for name in ends if turns[name] == asked[name]]
    )
    expected: dict[str, Any] = {}
    for name, array in values.items():
        some = len(array) > 0
        expected[f"mean_{name}"] = array.mean() if some else None
        expected[f"median_{name}"] = np.percentile(array, 50) if some else None
        expected[f"p99_{name}"] = np.percentile(array, 99) if some else None
    span = (np.max([r.finished_ns for r in rows]) - np.min([r.released_ns for r in rows])) / 1e9 if rows else None
    inputs, outputs = sum(r.prompt_tokens for r in rows), sum(r.output_tokens for r in rows)
    return expected | {
        "completed": len(good),
        "failed": len(rows) - len(good),
        "completed_trajectories": len(values["trajectory_completion_s"]),
        "makespan_s": span,
        "request_throughput": len(good) / span if span else None,
        "output_throughput": outputs / span if span else None,
        "total_token_throughput": (inputs + outputs) / span if span else None,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "kv_cache_hit_percent": 100 * sum(r.cached_tokens for r in rows) / inputs if inputs else None,
    }


@given(runs())
def test_metrics_are_those_of_an_independent_computation(run: tuple[list[Row], dict[str, int]]) -> None:
    rows, asked = run
    found, expected = measure(rows, asked), recomputed(rows, asked)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-9)), key


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 100))
def test_percentiles_interpolate_like_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-3)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=7))
def test_repeats_give_medians_and_interquartile_ranges(values: list[float]) -> None:
    combined = combine([{"x": value, "nothing": None} for value in values])
    low, middle, high = np.percentile(values, [25, 50, 75])
    assert combined == {
        "repeats": len(values),
        "x": pytest.approx(middle),
        "x_iqr": pytest.approx(high - low, abs=1e-6),
        "nothing": None,
        "nothing_iqr": None,
    }


def test_a_single_run_stays_as_it_is() -> None:
    assert combine([{"x": 1.5}]) == {"x": 1.5}


METRICS: dict[str, float | None] = {
    "completed": 64,
    "failed": 1,
    "makespan_s": 12.3456,
    "request_throughput": 5.184,
    "kv_cache_hit_percent": None,
    "pd_overlap_ratio": 0.25,
    **spread("ttft_ms", [10.0, 20.0]),
    **spread("decode_wait_ms", []),
}


def test_the_table_of_one_policy_names_values_and_leaves_out_what_was_not_measured() -> None:
    lines = report.table("fine", METRICS, "the slice").splitlines()
    assert lines[0].strip("= ") == "fine"
    assert lines[1] == "the slice"
    assert any(line.startswith("Makespan (s):") and line.endswith(" 12.346") for line in lines)
    assert any(line.startswith("Prompt tokens from the KV cache") and line.endswith(" -") for line in lines)
    assert any("Time to first token" in line for line in lines)
    assert any(line.startswith("Median:") and line.endswith(" 15.000") for line in lines)
    assert not any("Decode waits" in line for line in lines)


def test_the_comparison_has_a_row_for_each_policy_and_says_what_it_shows() -> None:
    other = {key: None if value is None else value * 2 for key, value in METRICS.items()}
    text = report.comparison({"normal": METRICS, "a/very/long/policy.py:Name": other}, "the slice")
    lines = text.splitlines()
    assert lines[0] == "the slice"
    assert text.endswith(report.CAPTION)
    assert "not GPU speed" in report.CAPTION
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("normal", "a/very"))}
    # makespan, requests, p99 TTFT, p99 request, trajectory, D wait, rendezvous, overlap
    assert rows["normal"] == ["12.35", "5.18", "19.9", "-", "-", "-", "-", "0.250"]
    assert rows["a/very/long/policy.py:Name"][:3] == ["24.69", "10.37", "39.8"]
    table = [line for line in lines if line.startswith(("policy", "normal", "a/very"))]
    assert len({len(line) for line in table}) == 1


def test_the_comparison_of_repeats_shows_the_spread() -> None:
    combined = combine([{"makespan_s": 1.0}, {"makespan_s": 2.0}, {"makespan_s": 4.0}])
    text = report.comparison({"fine": combined}, "the slice")
    assert "2.00 [1.50]" in text
    assert "Medians of 3 repeats [interquartile range]." in text
