"""Intervals and what is measured from them, and the way from a rank's record to intervals."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.journal import Journal
from kernel.record import Recorder, read
from kernel.request import Phase
from kernel.sched.policy import Plan
from rollout.report.lanes import common, from_records, measure, merged, overlap_ratio, window
from verify.intervals import Interval, intervals

if TYPE_CHECKING:
    from pathlib import Path

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=8)


def covered(some: list[tuple[int, int]]) -> set[int]:
    return {tick for start, end in some for tick in range(start, end)}


@given(spans, spans)
def test_common_time_is_that_of_counting_every_tick(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert common(one, other) == len(covered(one) & covered(other))


@given(spans)
def test_merged_spans_are_disjoint_in_order_and_cover_the_same(some: list[tuple[int, int]]) -> None:
    union = merged(some)
    assert covered(union) == covered(some)
    assert all(a[1] < b[0] for a, b in pairwise(union))


@given(st.lists(st.tuples(spans, spans), min_size=1, max_size=3))
def test_overlap_is_the_share_of_the_recorded_time_averaged_over_ranks(
    ranks: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]],
) -> None:
    some = [Interval(rank, "P", "", *span) for rank, (p, _) in enumerate(ranks) for span in p]
    some += [Interval(rank, "D", "", *span) for rank, (_, d) in enumerate(ranks) for span in d]
    moments = [moment for one in some for moment in (one.start_ns, one.end_ns)]
    if not moments or max(moments) == min(moments):
        assert overlap_ratio(some) is None
        return
    busy = [len(covered(p) & covered(d)) for p, d in ranks if p or d]
    assert overlap_ratio(some) == pytest.approx(sum(busy) / len(busy) / (max(moments) - min(moments)))


def test_waits_are_measured_by_their_kind() -> None:
    ms = 1_000_000
    found = measure(
        [
            Interval(0, "wait", "decode", 0, 3 * ms),
            Interval(1, "wait", "decode", 0, 1 * ms),
            Interval(0, "wait", "permit", 0, 8 * ms),
            Interval(0, "rendezvous", "pre-d", 0, 5 * ms),
            Interval(0, "D", "D 0", 0, 10 * ms),
            Interval(0, "P", "P e0 [0,1)", 5 * ms, 20 * ms),
        ]
    )
    assert (found["mean_decode_wait_ms"], found["median_decode_wait_ms"]) == (2, 2)
    assert found["mean_permit_wait_ms"] == 8
    assert found["mean_rendezvous_ms"] == 5
    assert found["pd_overlap_ratio"] == 0.25


def test_nothing_recorded_is_none_not_zero() -> None:
    assert set(measure([]).values()) == {None}
    assert window([]) is None


def test_window_shows_the_iterations_that_prefill_runs_beside() -> None:
    decode = [Interval(0, "D", f"D {i}", 10 * i, 10 * i + 9) for i in range(50)]
    prefill = [Interval(0, "P", "P e0 [0,4)", 300, 345)]
    start, end = window([*decode, *prefill], iterations=6) or (0, 0)
    assert end - start == 60
    assert start <= 300
    assert end >= 340
    assert window(decode[:3]) == (0, 29)


class Script:
    """Writes one rank's record through the rank's own journal, at chosen times."""

    def __init__(self, path: Path) -> None:
        self.now = 0
        self.path = path
        self.journal = Journal(Recorder(path, rank=3, groups={"P.TP": (0, 1)}, clock=lambda: self.now))

    def at(self, ms: float) -> Journal:
        self.now = int(ms * 1e6)
        return self.journal

    def found(self) -> list[Interval]:
        self.journal.close()
        return intervals(read(self.path))

    def decode(self, round_: int, submit: float, start: float, end: float, rows: int) -> None:
        self.at(submit).submitted(f"D {round_}", Phase.D, (), 4, rows, 8)
        self.at(start).device(Phase.D, f"D {round_}", "start")
        self.at(end).device(Phase.D, f"D {round_}", "finish")

    def segment(self, epoch: int, first: int, submit: float, start: float, end: float) -> None:
        label = f"P e{epoch} [{first},{first + 1})"
        self.at(submit).permit(first, first + 1)
        self.journal.submitted(label, Phase.P, (), first, first + 1, 8)
        self.journal.boundary(epoch, first + 1)
        self.at(start).device(Phase.P, label, "start")
        self.at(end).device(Phase.P, label, "finish")


def lengths(some: list[Interval], lane: str, label: str = "") -> list[float]:
    return [one.ms for one in some if one.lane == lane and label in ("", one.label)]


def test_work_and_rendezvous_become_intervals(tmp_path: Path) -> None:
    script = Script(tmp_path / "rank3.ring")
    script.at(0).plan(Plan(round=7, epoch=2), 1)
    script.at(1).exchange("pre-d", leaves=False)
    script.at(4).exchange("pre-d", leaves=True)
    script.decode(7, 4, 5, 9, rows=2)
    script.segment(2, 0, 9, 10, 16)
    script.at(20).submitted("D 8", Phase.D, (), 4, 2, 8)
    script.at(21).device(Phase.D, "D 8", "start")  # never finishes
    found = [one for one in script.found() if one.lane != "wait"]
    assert found == [
        Interval(3, "rendezvous", "pre-d", 1_000_000, 4_000_000, 7, 2),
        Interval(3, "D", "D 7", 5_000_000, 9_000_000, 7, 2),
        Interval(3, "P", "P e2 [0,1)", 10_000_000, 16_000_000, 7, 2),
    ]


def test_decode_waits_from_the_previous_iteration_for_rows_that_were_there(tmp_path: Path) -> None:
    script = Script(tmp_path / "rank3.ring")
    script.decode(0, 0, 1, 5, rows=3)
    script.at(9).promote(1, 2)  # two more rows: of the four, some waited since 5
    script.decode(1, 10, 12, 15, rows=4)
    assert lengths(script.found(), "wait", "decode") == [7]


def test_decode_waits_from_the_promotion_where_all_rows_are_new(tmp_path: Path) -> None:
    script = Script(tmp_path / "rank3.ring")
    script.at(1).promote(0, 3)
    script.decode(0, 1, 1, 5, rows=3)
    script.at(400).promote(1, 2)
    script.decode(8, 401, 403, 404, rows=2)
    # The next rows are ready while the iteration before still runs: they wait from its end.
    script.at(405).submitted("D 9", Phase.D, (), 4, 2, 8)
    script.at(406).device(Phase.D, "D 9", "start")
    script.at(500).promote(2, 1)
    script.at(501).submitted("D 10", Phase.D, (), 4, 1, 8)
    script.at(510).device(Phase.D, "D 9", "finish")
    script.at(512).device(Phase.D, "D 10", "start")
    assert lengths(script.found(), "wait", "decode") == pytest.approx([0, 3, 2, 2])


def test_a_rank_without_rows_and_a_first_iteration_of_unknown_age_wait_for_nothing(tmp_path: Path) -> None:
    script = Script(tmp_path / "rank3.ring")
    script.decode(0, 0, 1, 5, rows=1)  # nothing tells since when its row was ready
    script.decode(1, 8, 9, 10, rows=0)
    assert lengths(script.found(), "wait", "decode") == []


def test_prefill_waits_for_its_permit_once_it_has_nothing_left_to_do(tmp_path: Path) -> None:
    script = Script(tmp_path / "rank3.ring")
    script.at(0).plan(Plan(round=0, epoch=1, activate=1), 1)
    script.journal.boundary(1, 0)
    script.segment(1, 0, 2, 3, 10)  # activated at 0, released at 2
    script.segment(1, 1, 14, 14, 30)  # idle from 10, released at 14
    script.at(25)
    assert lengths(script.found(), "wait", "permit") == [2, 4]


def test_prefill_that_still_runs_at_its_release_did_not_wait(tmp_path: Path) -> None:
    script = Script(tmp_path / "rank3.ring")
    script.at(0).plan(Plan(round=0, epoch=1, activate=1), 1)
    script.journal.boundary(1, 0)
    script.at(1).permit(0, 1)
    script.journal.submitted("P e1 [0,1)", Phase.P, (), 0, 1, 8)
    script.journal.boundary(1, 1)
    script.at(2).device(Phase.P, "P e1 [0,1)", "start")
    script.at(5).permit(1, 2)  # the device is at [0,1)
    script.journal.submitted("P e1 [1,2)", Phase.P, (), 1, 2, 8)
    script.journal.boundary(1, 2)
    script.at(9).permit(2, 2)  # an epoch that has ended: no release
    assert lengths(script.found(), "wait", "permit") == [1, 0]


def test_prefill_does_not_wait_while_a_later_segment_is_queued(tmp_path: Path) -> None:
    script = Script(tmp_path / "rank3.ring")
    script.at(0).plan(Plan(round=0, epoch=1, activate=1), 1)
    for first in (0, 1):
        script.at(first).permit(first, first + 1)
        script.journal.submitted(f"P e1 [{first},{first + 1})", Phase.P, (), first, first + 1, 8)
        script.journal.boundary(1, first + 1)
    script.at(2).device(Phase.P, "P e1 [0,1)", "start")
    script.at(5).device(Phase.P, "P e1 [0,1)", "finish")
    script.at(5).device(Phase.P, "P e1 [1,2)", "start")
    script.at(12).permit(2, 3)  # the device is at [1,2)
    script.journal.submitted("P e1 [2,3)", Phase.P, (), 2, 3, 8)
    script.journal.boundary(1, 3)
    script.at(20).device(Phase.P, "P e1 [1,2)", "finish")
    script.at(20).device(Phase.P, "P e1 [2,3)", "start")
    script.at(30).device(Phase.P, "P e1 [2,3)", "finish")
    script.at(34).permit(3, 4)
    assert lengths(script.found(), "wait", "permit") == [0, 0, 4]


def test_metrics_come_from_all_ranks_records(tmp_path: Path) -> None:
    paths = [tmp_path / "rank0.ring", tmp_path / "rank1.ring"]
    for path, wait in zip(paths, (4, 8), strict=True):
        script = Script(path)
        script.decode(0, 0, 1, 5, rows=1)
        script.decode(1, 0, 5 + wait, 20, rows=1)
        script.journal.close()
    assert from_records(map(read, paths))["mean_decode_wait_ms"] == 6
