"""The ladder of `bench/gpu`: its plan, what it resumes, what it reports; and the whole of it on CPU ranks."""

from __future__ import annotations

import json
import os
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu import jit_cache, ladder, ladder_report, spans
from bench.gpu.cells import BEST, DECODE, TRACE, Cell, Ladder, best_span, expected_s, next_cell
from bench.gpu.store import Store
from kernel.errors import UsageError
from kernel.journal import Journal
from kernel.record import Recorder, read, ring_path
from kernel.request import Phase

if TYPE_CHECKING:
    from pathlib import Path

LADDER = Ladder()
FINE = "fine:span=2"


def first(policy: str, repetition: int = 0, wait: float = 0.0) -> Cell:
    return Cell(TRACE, wait, policy, repetition)


def test_the_plan_holds_everything_that_was_asked_for() -> None:
    cells = LADDER.cells(FINE)
    assert len(set(cells)) == len(cells)
    assert len({cell.key for cell in cells}) == len(cells)
    for policy in ("normal", "global_enqueue", FINE):
        mine = [cell for cell in cells if (cell.workload, cell.wait, cell.policy) == (TRACE, 0.0, policy)]
        assert [cell.repetition for cell in mine] == [*range(5)]
        assert sum((cell.workload, cell.wait, cell.policy) == (TRACE, 1.0, policy) for cell in cells) == 3
        assert sum((cell.workload, cell.policy) == (DECODE, policy) for cell in cells) == 3
        assert {cell.wait for cell in cells if cell.policy == policy} == {0.0, 0.01, 0.03, 0.1, 1.0}
    for policy in ("global_complete", "adaptive", "lean", *(f"fine:span={span}" for span in (1, 2, 3, 4))):
        assert first(policy) in cells
    waits = [cell.wait for cell in cells]
    assert waits == sorted(waits), "short runs first"


def test_repetitions_go_round_and_no_policy_is_always_first() -> None:
    cells = [cell for cell in LADDER.cells(FINE) if (cell.workload, cell.wait) == (TRACE, 0.0) and cell.repetition]
    rounds = [[cell.policy for cell in cells if cell.repetition == repetition] for repetition in range(1, 5)]
    assert all(sorted(each) == sorted(rounds[0]) for each in rounds)
    assert {each[0] for each in rounds} == {"normal", "global_enqueue", FINE}


def test_the_best_span_is_the_fastest_once_all_have_run() -> None:
    times = {first(f"fine:span={span}"): seconds for span, seconds in ((1, 9.0), (2, 7.0), (3, 8.0))}
    assert best_span(LADDER, times) is None
    assert all(cell.policy != BEST for cell in LADDER.cells(None))
    assert best_span(LADDER, times | {first("fine:span=4"): 7.5, first("normal"): 1.0}) == FINE
    assert set(LADDER.cells(None)) < set(LADDER.cells(FINE))


@given(st.lists(st.floats(1, 300), min_size=80, max_size=80), st.floats(30, 600))
def test_invocations_together_run_every_cell_once_and_none_overruns(times: list[float], window: float) -> None:
    cells = LADDER.cells(FINE)
    done: dict[Cell, float] = {}
    for _ in range(200):
        left, ran = window, 0
        while (cell := next_cell(cells, done, {}, left, floor_s={1.0: 40.0})) is not None:
            assert cell not in done
            expected = expected_s(cell, done, 40.0 if cell.wait == 1.0 else 0.0)
            assert expected is None or expected <= left
            done[cell] = min(times[len(done)], window / 1.2)
            left -= done[cell]
            ran += 1
        if not ran:
            break
    left_out = [cell for cell in cells if cell not in done]
    unknown = window < 60 or any(cell.wait == 1.0 for cell in left_out)
    assert not left_out or unknown, "only what is expected to be longer than an invocation is left out"


def test_a_cell_that_failed_twice_is_left_out() -> None:
    cells = LADDER.cells(FINE)
    assert next_cell(cells, {}, {cells[0]: 1}, 600, floor_s={}) == cells[0]
    assert next_cell(cells, {}, {cells[0]: 2}, 600, floor_s={}) == cells[1]
    assert next_cell(cells, {}, {}, 50, floor_s={}) is None


def result(makespan: float, **more: float) -> dict[str, Any]:
    return {"makespan_s": makespan, "p_device_share": 0.5, "output_throughput": 100 / makespan, **more}


def test_a_store_goes_on_where_earlier_ones_ended(tmp_path: Path) -> None:
    one = Store(tmp_path / "1", {"rows": 64, "model": "m"}, Cell)
    one.finished(first("normal"), 12.0, result(10.0), {})
    one.failed(first(FINE), "rank 0 has gone")
    two = Store(tmp_path / "2", {"rows": 64, "model": "m"}, Cell, [tmp_path / "1"])
    assert two.seconds == {first("normal"): 12.0}
    assert two.makespans == {first("normal"): 10.0}
    assert two.failures == {first(FINE): 1}
    three = Store(tmp_path / "2", {"rows": 64, "model": "m"}, Cell)
    assert three.results == two.results
    with pytest.raises(UsageError, match="its cells were measured with rows 64, and this command says 32"):
        Store(tmp_path / "3", {"rows": 32, "model": "m"}, Cell, [tmp_path / "2"])
    (tmp_path / "2" / "cells" / "broken.json").write_text("{")
    with pytest.raises(UsageError, match=r"broken\.json: not a finished cell: remove it"):
        Store(tmp_path / "2", {"rows": 64, "model": "m"}, Cell)


def test_the_summary_has_medians_the_best_span_and_the_aims() -> None:
    results = {
        first("normal", at): {"metrics": result(value), "about": {}} for at, value in enumerate((10.0, 12.0, 11.0))
    }
    waits = {"mean_decode_wait_ms": 100.0}
    results |= {first("global_enqueue"): {"metrics": result(9.0, **waits), "about": {}}}
    for span, seconds in ((1, 8.0), (2, 6.6), (3, 8.0), (4, 8.0)):
        metrics = result(seconds, mean_decode_wait_ms=10.0, overlap_ms=0.0)
        results[first(f"fine:span={span}")] = {"metrics": metrics, "about": {}}
    found = ladder_report.summary(results, LADDER)
    assert found["best"] == FINE
    [normal] = [group for group in found["groups"] if group["policy"] == "normal"]
    assert (normal["makespan_s"], normal["makespan_s_iqr"], normal["repeats"]) == (11.0, 1.0, 3)
    aims = {aim["aim"]: aim for aim in found["aims"]}
    share = aims["share of h that the best span recovers"]
    assert share["value"] == pytest.approx((1 - 6.6 / 11) / 0.5)
    assert share["met"] is True
    assert aims["mean D wait, over global_enqueue's"]["value"] == pytest.approx(0.1)
    assert aims["P and D on the device at once, ms"]["met"] is False, "none at all is not above 0"
    assert aims["decode-only cost: median time between tokens, over normal's, less 1"]["met"] is None
    text = ladder_report.text(found)
    assert "11.00 [1.00]" in text
    assert text.index("fine:span=2 ") < text.index("global_enqueue ") < text.index("normal "), "fastest first"


def test_enqueue_and_device_times_are_read_from_the_record(tmp_path: Path) -> None:
    now = [0]
    journal = Journal(Recorder(ring_path(tmp_path, 0), rank=0, groups={}, clock=lambda: now[0]))
    journal.epoch = 3
    for start, host, device in ((0, 2, 10), (4, 3, 20)):
        label = f"P e3 [{start},{start + 4})"
        journal.permit(start, start + 4)
        journal.submitted(label, Phase.P, (), start, start + 4, 1)
        now[0] += host * 1_000_000
        journal.boundary(3, start + 4)
        journal.device(Phase.P, label, "start")
        now[0] += device * 1_000_000
        journal.device(Phase.P, label, "finish")
    journal.permit(8, 8)
    journal.close()
    recording = read(ring_path(tmp_path, 0))
    assert spans.enqueue_ms(recording) == [2.0, 3.0]
    found = spans.measure({0: recording}, 0.06)
    assert (found["total_enqueue_ms"], found["segments"], found["p_device_ms"]) == (5.0, 2.0, 30.0)
    assert found["p_device_share"] == pytest.approx(0.5)
    assert (found["d_device_ms"], found["overlap_ms"], found["iterations"]) == (0.0, 0.0, 0.0)


def test_a_cache_travels_in_parts_and_keeps_its_times(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = jit_cache.environment(cache)
    assert all(value.startswith(str(cache)) for value in environment.values())
    kernel = cache / "flashinfer" / "a" / "kernel.so"
    kernel.parent.mkdir()
    kernel.write_bytes(bytes(range(256)) * 400)
    (cache / "flashinfer" / "a.lock").touch()
    os.utime(kernel, ns=(0, 1_700_000_000_999_999_999))
    parts = jit_cache.pack(cache, tmp_path / "out", part=300)
    assert len(parts) > 1
    assert all(path.stat().st_size <= 300 for path in parts)
    assert jit_cache.unpack(tmp_path / "out", tmp_path / "again") == len(parts)
    again = tmp_path / "again" / "flashinfer" / "a" / "kernel.so"
    assert again.read_bytes() == kernel.read_bytes()
    assert again.stat().st_mtime_ns == 1_700_000_000_000_000_000, "never younger than it was"
    assert not (tmp_path / "again" / "flashinfer" / "a.lock").exists()
    assert jit_cache.unpack(tmp_path / "nothing", tmp_path / "new") == 0
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / f"{jit_cache.NAME}.000").write_bytes(b"x")
    with pytest.raises(tarfile.ReadError):
        jit_cache.unpack(tmp_path / "bad", tmp_path / "new")


SMALL = (
    "--device", "cpu", "--world", "2", "--adp", "2", "--ep", "2", "--fraction", "0.02", "--turns", "2",
    "--length-scale", "0.01", "--rows", "2", "--prefill-tokens", "16", "--decode-tokens", "4", "--repetitions", "2",
    "--recorded", "0", "--decode-only", "0", "--others", "fine:span=1", "fine:span=2",
)  # fmt: skip


def test_two_invocations_on_cpu_ranks_measure_the_campaign_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for needed in ("torch", "uvloop", "safetensors"):
        pytest.importorskip(needed)
    from models.tiny import write_checkpoint

    write_checkpoint(tmp_path / "model")
    argv = [*SMALL, "--model", str(tmp_path / "model"), "--waits", "--minutes", "10"]
    plan = ["--headline", "normal"]
    assert ladder.main([*argv, *plan, "--out", str(tmp_path / "1")]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "Nothing is left." in out
    assert {path.stem for path in (tmp_path / "1" / "cells").iterdir()} == {
        "trace_w0_normal_0", "trace_w0_normal_1", "trace_w0_fine-span=1_0", "trace_w0_fine-span=2_0",
    }  # fmt: skip
    assert not list((tmp_path / "1" / "records").iterdir())
    plan = ["--headline", "normal", "best", "--earlier", str(tmp_path / "1")]
    assert ladder.main([*argv, *plan, "--out", str(tmp_path / "2")]) == 0
    out, _ = capfd.readouterr()
    assert out.count(": makespan") == 1, "only the best span's repetition was left"
    assert ladder.main([*argv, *plan, "--out", str(tmp_path / "2")]) == 0
    assert ": makespan" not in capfd.readouterr().out
    found = json.loads((tmp_path / "2" / "ladder.json").read_text())
    assert found["best"] in ("fine:span=1", "fine:span=2")
    for group in found["groups"]:
        assert group["completed"] == 6
        assert group["segments"] > 0
        assert group["p_device_ms"] > 0
        assert group["dropped_events"] == 0
    assert ladder.main([*argv, *plan, "--out", str(tmp_path / "2"), "--seed", "1"]) == 2
    assert "its cells were measured with shape" in capfd.readouterr().err


def test_unusable_commands_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    for argv, says in (
        (["--model", "nowhere"], "nowhere: no such directory"),
        (["--model", "nowhere.json", "--device", "cpu"], "--model nowhere.json: No such file"),
        (["--model", "x", "--device", "cpu", "--graphs", "off"], "--graphs applies to --device cuda only"),
        (["--model", "x.json", "--headline", "fin", "--device", "cpu"], "did you mean fine"),
    ):
        assert ladder.main([*argv, *out]) == 2
        err = capfd.readouterr().err
        assert says in err
        assert err.count("\n") == 1
