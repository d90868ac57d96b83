"""What the ladder reads from a run's record beyond the waits: device time of each phase, P's enqueue on the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel.record import Kind
from rollout.report import lanes
from rollout.report.lanes import common, merged
from verify.intervals import DECODE, PERMIT, Interval, intervals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernel.record import Recording
    from rollout.report.metrics import Metrics


def enqueue_ms(recording: Recording) -> list[float]:
    """Milliseconds that each segment of P took to enqueue: from its permit to its boundary, on the host."""
    permits: dict[tuple[int, int], int] = {}
    found = []
    for event in recording.events:
        if event.kind is Kind.PERMIT:
            permits[event.epoch, event.b] = event.time_ns
        elif event.kind is Kind.BOUNDARY and (since := permits.pop((event.epoch, event.a), None)) is not None:
            found.append((event.time_ns - since) / 1e6)
    return found


def measure(recordings: Mapping[int, Recording], makespan_s: float) -> Metrics:
    """Waits and overlap as `rollout.report.lanes` has them, their totals, and the phases' share of the makespan.

    Totals are milliseconds, averaged over the ranks. p_device_share is the paper's headroom h where the policy is
    `normal`: the most of the makespan that hiding P can win. overlap_ms: P's device work beside D's.
    """
    ranks = [intervals(recording) for recording in recordings.values()]
    found = [one for rank in ranks for one in rank]
    enqueues = [enqueue_ms(recording) for recording in recordings.values()]
    device = {lane: _mean(_busy_ms(rank, lane) for rank in ranks) for lane in ("P", "D")}
    return {
        **lanes.measure(found),
        "total_decode_wait_ms": _mean(_waited(rank, DECODE) for rank in ranks),
        "total_permit_wait_ms": _mean(_waited(rank, PERMIT) for rank in ranks),
        "total_enqueue_ms": _mean(map(math.fsum, enqueues)),
        "segments": _mean(map(len, enqueues)),
        "iterations": _mean(sum(one.lane == "D" for one in rank) for rank in ranks),
        "p_device_ms": device["P"],
        "d_device_ms": device["D"],
        "p_device_share": device["P"] / (makespan_s * 1e3) if makespan_s and device["P"] is not None else None,
        "overlap_ms": _mean(common(_spans(rank, "P"), _spans(rank, "D")) / 1e6 for rank in ranks),
        "dropped_events": max((recording.dropped for recording in recordings.values()), default=0),
    }


def _spans(rank: Iterable[Interval], lane: str) -> list[tuple[int, int]]:
    return [(one.start_ns, one.end_ns) for one in rank if one.lane == lane]


def _busy_ms(rank: Iterable[Interval], lane: str) -> float:
    return sum(end - start for start, end in merged(_spans(rank, lane))) / 1e6


def _waited(rank: Iterable[Interval], label: str) -> float:
    return math.fsum(one.ms for one in rank if one.lane == "wait" and one.label == label)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None
