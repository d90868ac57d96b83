"""What is measured from the ranks' intervals (`verify.intervals`): waits, and how much of P lies beside D."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

from rollout.report.metrics import Metrics, spread
from verify.intervals import DECODE, PERMIT, Interval, intervals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.record import Recording

Span = tuple[int, int]


def from_records(recordings: Iterable[Recording]) -> Metrics:
    """Waits and overlap of one run, from the records of its ranks; the keys are those of `measure`."""
    return measure(list(chain.from_iterable(map(intervals, recordings))))


def measure(intervals: Sequence[Interval]) -> Metrics:
    """Waits and overlap of one run.

    decode_wait: an iteration's start on the device less the later of the previous iteration's end and the moment its
    rows became ready. permit_wait: the release of P less the later of its arrival at its endpoint and the end of its
    work on the device, 0 where the release came first. pd_overlap_ratio: share of the recorded time in which a rank has
    P and D in flight, averaged over the ranks.
    """

    def waits(label: str) -> Iterable[float]:
        return (one.ms for one in intervals if one.lane == "wait" and one.label == label)

    return {
        **spread("decode_wait_ms", waits(DECODE)),
        **spread("permit_wait_ms", waits(PERMIT)),
        **spread("rendezvous_ms", (one.ms for one in intervals if one.lane == "rendezvous")),
        "pd_overlap_ratio": overlap_ratio(intervals),
    }


def overlap_ratio(intervals: Iterable[Interval]) -> float | None:
    """Time with P and D both in flight, over the time from the first work to the last, averaged over the ranks."""
    ranks: dict[int, dict[str, list[Span]]] = defaultdict(lambda: {"P": [], "D": []})
    for one in intervals:
        if one.lane in ("P", "D"):
            ranks[one.rank][one.lane].append((one.start_ns, one.end_ns))
    spans = list(chain.from_iterable(lane for lanes in ranks.values() for lane in lanes.values()))
    length = max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0
    if length <= 0:
        return None
    return sum(common(lanes["P"], lanes["D"]) for lanes in ranks.values()) / len(ranks) / length


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, as disjoint spans in order."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def common(one: Iterable[Span], other: Iterable[Span]) -> int:
    """Nanoseconds that lie in both unions."""
    left, right = merged(one), merged(other)
    total = i = j = 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def window(intervals: Sequence[Interval], iterations: int = 12) -> Span | None:
    """The stretch of about `iterations` decode iterations of the first rank that shows most of P beside D.

    None when no work was recorded.
    """
    work = [one for one in intervals if one.lane in ("P", "D")]
    if not work:
        return None
    rank = min(one.rank for one in work)
    own = [one for one in work if one.rank == rank]
    prefill = [(one.start_ns, one.end_ns) for one in own if one.lane == "P"]
    starts = sorted(one.start_ns for one in own if one.lane == "D") or sorted(start for start, _ in prefill)
    ends = sorted(one.end_ns for one in own)
    if len(starts) <= iterations:
        return min(one.start_ns for one in work), max(one.end_ns for one in work)
    # An iteration counts when P works during it or just before the next one, whatever the policy lets overlap.
    gaps = [common(prefill, [span]) > 0 for span in zip(starts, [*starts[1:], ends[-1]], strict=True)]
    score = [sum(gaps[at : at + iterations]) for at in range(len(starts) - iterations)]
    best = score.index(max(score))
    return starts[best], starts[best + iterations]
