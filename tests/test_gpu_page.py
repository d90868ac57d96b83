"""What `bench/gpu` derives: the roofline's arithmetic and reading of records, and the page of results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bench.gpu import limits, page, roofline
from kernel.errors import TurnstileError
from kernel.journal import Journal
from kernel.record import Recorder, read, ring_path
from kernel.request import Phase
from models.config import read_config
from rollout.device import DeviceOptions

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.record import Event

CONFIG: Any = read_config(page.HOUSE / "bench" / "gpu" / "models" / "paper")
BF16 = DeviceOptions("cuda").resolved(CONFIG)


def test_a_decode_iteration_moves_each_weight_once_and_each_row_s_kv() -> None:
    from kernel.topology import World
    from rollout.ranks.memory import weight_bytes

    whole = weight_bytes(CONFIG, World(), BF16) - CONFIG.vocab_size * CONFIG.hidden_size * 2
    many = limits.decode_bytes(CONFIG, BF16, 10_000, 0)
    kv = 2 * 42 * 4 * 128 * 2
    assert many == pytest.approx(whole + 10_000 * (kv + 2 * CONFIG.hidden_size), rel=1e-4)
    assert limits.decode_bytes(CONFIG, BF16, 32, 1001) - limits.decode_bytes(CONFIG, BF16, 32, 1) == 32 * 1000 * kv
    assert limits.experts_used(CONFIG, 1) == pytest.approx(8)
    one, fp8 = (limits.decode_bytes(CONFIG, each, 1, 0) for each in (BF16, DeviceOptions("cuda", quantization="fp8")))
    assert one - fp8 == pytest.approx(42 * 8 * 3 * 2560 * 768)


def test_prefill_counts_two_operations_a_used_weight_and_pairs_of_attention() -> None:
    used = 42 * (2560 * 128 * 72 + 8 * 3 * 2560 * 768 + 2560 * 64)
    head = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert limits.prefill_flops(CONFIG, 1) == 2 * used + 4 * 42 * 32 * 128 + head
    split = limits.prefill_flops(CONFIG, 100) + limits.prefill_flops(CONFIG, 28, start=100) - head
    assert split == pytest.approx(limits.prefill_flops(CONFIG, 128))


@pytest.fixture
def events(tmp_path: Path) -> list[Event]:
    now = [0]
    journal = Journal(Recorder(ring_path(tmp_path, 0), rank=0, groups={}, clock=lambda: now[0]))

    def work(phase: Phase, label: str, a: int, b: int, ms: float, idle: float) -> None:
        journal.submitted(label, phase, (), a, b, 1)
        now[0] += int(idle * 1e6)
        journal.device(phase, label, "start")
        now[0] += int(ms * 1e6)
        journal.device(phase, label, "finish")

    for number, rows in enumerate((2, 4, 4, 4, 4, 1)):
        work(Phase.D, f"D {number}", 4, rows, 10, 1)
    for journal.epoch in (0, 1):
        for start in (0, 2):
            work(Phase.P, f"P e{journal.epoch} [{start},{start + 2})", start, start + 2, 30 + journal.epoch, 5)
    journal.close()
    return read(ring_path(tmp_path, 0)).events


def test_full_iterations_and_whole_epochs_are_read_from_the_record(events: list[Event]) -> None:
    found = roofline.decode_seconds(events, 4)
    assert (found["count"], found["device_s"], found["step_s"]) == (4, pytest.approx(0.010), pytest.approx(0.011))
    assert roofline.prefill_seconds(events) == [pytest.approx(0.060), pytest.approx(0.062)]
    with pytest.raises(TurnstileError, match="1 decode iterations had all 2 rows"):
        roofline.decode_seconds(events, 2)
    shares = roofline.ratios(
        {
            "decode": {"bytes": 2e9, "device_s": 0.01, "step_s": 0.02},
            "prefill": {"flops": 3e12, "device_s": 0.01},
        },
        {"bytes_s": 4e11, "flops_s": 6e14},
    )
    assert list(shares.values()) == [0.5, 0.25, 0.5]


def test_the_page_says_what_was_measured_and_what_was_not() -> None:
    empty = page.page({})
    assert "Nothing has been measured yet." in empty
    assert all(claim in empty and why in empty for claim, why in page.NOT_RUN)
    hazard = {"experiments": {"crossing": {"ok": True, "progress": 0}}}
    group = {"workload": "trace", "wait": 0.0, "policy": "fine:span=2", "makespan_s": 12.5, "repeats": 1}
    ladder = {
        "settings": {
            "world": {"size": 2, "adp": 2, "ep": 1}, "shape": {"fraction": 0.25, "length_scale": 1.0}, "rows": 64,
            "device": {"weights": "dummy", "quantization": None}, "model": "m", "trace": "paper", "prefill_tokens": 9,
        },
        "groups": [group], "best": "fine:span=2", "about": [{"gpus": ["H200", "H200"], "versions": {"torch": "2.11"}}],
        "aims": [{"aim": "h", "target": None, "value": 0.5, "met": None}],
    }  # fmt: skip
    full = page.page({"ladder-g2.json": ladder, "hazard.json": hazard, "notes.json": {}})
    assert "2 x H200; torch 2.11" in full
    assert "| fine:span=2 | 1 | 12.50 |" in full
    assert "| h | - | 0.5 | - |" in full
    assert "| crossing | True | progress 0 |" in full
    assert "Nothing has been measured" not in full
    told = page.page({"hazard.json": {"experiments": {"routed": {"expected": True, "say": "all done"}}}}, "## Remarks")
    assert "| routed | True | all done |" in told
    assert told.index("## Remarks") < told.index("## The hazard")


def test_the_committed_page_is_that_of_the_committed_files(tmp_path: Path) -> None:
    assert page.PAGE.read_text() == page.page(page.read(page.RESULTS), page.findings(page.RESULTS))
    (tmp_path / "ladder.json").write_text(json.dumps({"groups": []}))
    assert page.read(tmp_path) == {"ladder.json": {"groups": []}}
