"""What `bench/gpu/exchange.py` makes of its ranks' numbers, and how its control shares a communication stream."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from bench.gpu import exchange, page
from bench.gpu.streams import handed_over
from tests.fake_gpu import FakeGpu

GOOD = {
    "p_alone_us": 240.0, "d_alone_us": 56.0, "both_us": 251.0, "full_us": 260.0, "one_stream_us": 300.0,
    "shared_us": 297.0, "d_once_us": 57.0, "d_beside_us": 66.0, "d_shared_us": 180.0, "replays": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"both_us": 270.0}, False), ({"d_beside_us": 80.0}, False), ({"one_stream_us": 255.0}, False),
     ({"shared_us": 255.0}, False)],
)  # fmt: skip
def test_both_controls_must_serialise_and_the_phases_must_not(changes: dict[str, float], expected: bool) -> None:
    found = exchange.judged("together", [{**GOOD, **changes}] * 2)
    assert found["expected"] is expected
    assert "over one communication stream" in found["say"]
    assert "one communication stream" in page.page({"exchange-g2.json": {"experiments": {"together": found}}})


def test_a_rank_that_did_not_end_is_no_result_but_where_it_is_one() -> None:
    assert not exchange.judged("together", [GOOD, None])["expected"]
    assert exchange.judged("in_flight", [{"wrong": 0}, None])["expected"]
    assert not exchange.judged("in_flight", [{"wrong": 0}, {"wrong": 0}])["expected"]


def test_d_handed_to_p_s_communication_stream_waits_for_p_there() -> None:
    gpu = FakeGpu()
    d, communication = gpu.stream(), gpu.stream()
    with gpu.on(communication):
        gpu.launch("P dispatch")
    with gpu.on(d):
        gpu.launch("D before")
    work: Any = lambda: gpu.launch("D exchange")  # noqa: E731
    handed_over(d, communication, work, current=gpu.on, event=gpu.event)
    with gpu.on(d):
        gpu.launch("D behind")
    with gpu.on(communication):
        gpu.launch("P combine")
    gpu.run()
    ran = gpu.ran
    assert ran.index("D exchange") > max(ran.index("P dispatch"), ran.index("D before"))
    assert min(ran.index("D behind"), ran.index("P combine")) > ran.index("D exchange")


def test_it_says_what_it_takes() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "bench.gpu.exchange", "--help"],
        cwd=page.HOUSE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--only" in shown.stdout
