"""Timelines as trace-event JSON, in the object form with `traceEvents` (the "Trace Event Format" of Chromium).

A rank is a process, a lane a thread; times are microseconds since the first event of all ranks. A finished slice is a
complete event (X), an open one a begin without an end (B), which Perfetto draws to the end as "did not end". Flows
(s, t, f) join the slices in which ranks stand at the same boundary of the same epoch, in order of arrival.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from verify.runs import one_clock
from verify.slices import Lane, Slice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from verify.slices import Timeline

SPARE: Final = 8
"""Threads that a lane may need for slices that overlap without nesting."""
PROCESS: Final = 1000
"""The process id of rank 0. Perfetto takes process 0 and thread 0 for the idle task."""
PLACES: Final = {lane: 1 + at * SPARE for at, lane in enumerate(Lane)}
TITLES: Final = {
    Lane.HOST: "host",
    Lane.TURNSTILE: "turnstile (P's host enqueue)",
    Lane.P: "P on the device",
    Lane.D: "D on the device",
    Lane.P_CALLS: "collectives on P's stream",
    Lane.D_CALLS: "collectives on D's stream",
}
Event = dict[str, Any]


def trace_lines(timelines: Sequence[Timeline]) -> Iterator[str]:
    """The trace of these ranks as JSON text, one event a line."""
    clock = _clock(timelines)
    policies = sorted({str(each.recording.meta.get("policy", "")) for each in timelines} - {""})
    about = {
        "policy": ", ".join(policies),
        "world": str(next((each.recording.meta["world"] for each in timelines if "world" in each.recording.meta), "")),
        "clock": "monotonic, one host" if one_clock(each.recording for each in timelines) else "wall, several hosts",
        "overwritten": {str(each.recording.rank): each.recording.dropped for each in timelines},
        "unreadable": {str(each.recording.rank): each.recording.torn for each in timelines},
    }
    yield '{"displayTimeUnit": "ms",\n"otherData": ' + json.dumps(about) + ',\n"traceEvents": [\n'
    before = ""
    for event in _events(timelines, clock):
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "\n]}\n"


def _clock(timelines: Sequence[Timeline]) -> Callable[[Timeline, int], float]:
    """From a rank's time to microseconds of the trace."""
    shared = one_clock(each.recording for each in timelines)

    def absolute(one: Timeline, time_ns: int) -> int:
        return time_ns if shared else one.recording.wall(time_ns)

    starts = [absolute(each, event.time_ns) for each in timelines for event in each.recording.events]
    start = min(starts, default=0)
    return lambda one, time_ns: (absolute(one, time_ns) - start) / 1e3


def _events(timelines: Sequence[Timeline], clock: Callable[[Timeline, int], float]) -> Iterator[Event]:
    arrivals: dict[tuple[int, int], dict[int, tuple[float, int, int]]] = {}
    for one in timelines:
        rank = one.recording.rank
        yield _named("process_name", rank, PLACES[Lane.HOST], name=f"rank {rank}")
        yield _named(
            "process_labels", rank, PLACES[Lane.HOST], labels=f"pid {one.recording.pid} on {one.recording.host}"
        )
        yield _named("process_sort_index", rank, PLACES[Lane.HOST], sort_index=rank)
        for lane in Lane:
            for spare, slices in enumerate(nested([each for each in one.slices if each.lane is lane])):
                thread = PLACES[lane] + spare
                yield _named("thread_name", rank, thread, name=TITLES[lane] + (f" ({spare + 1})" if spare else ""))
                yield _named("thread_sort_index", rank, thread, sort_index=thread)
                for each in slices:
                    at = clock(one, each.start_ns)
                    yield _slice(each, thread, at)
                    if each.boundary is not None:
                        arrivals.setdefault(each.boundary, {}).setdefault(rank, (at, rank, thread))
        for moment in one.moments:
            scope = "p" if moment.name.startswith("exception") else "t"
            yield {
                "ph": "i", "name": moment.name, "cat": "moment", "pid": PROCESS + rank, "tid": PLACES[moment.lane],
                "ts": clock(one, moment.time_ns), "s": scope, "args": dict(moment.more),
            }  # fmt: skip
        for level in one.levels:
            yield {
                "ph": "C", "name": "submitted, not finished", "pid": PROCESS + rank,
                "tid": PLACES[Lane.HOST], "ts": clock(one, level.time_ns),
                "args": {"P": level.p, "D": level.d},
            }  # fmt: skip
    yield from _flows(arrivals)


class Stretch(Protocol):
    """What has a beginning and perhaps an end."""

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int | None: ...


One = TypeVar("One", bound=Stretch)


def nested(slices: Iterable[One]) -> list[list[One]]:
    """The slices of a lane, spread over as many threads as it takes for any two of a thread to be disjoint or nested.

    A thread of the format holds a stack. Work of a stream comes one after the other, but its times may be a device's
    own, a little off. At most `SPARE` threads; what fits on none of them is left out.
    """
    threads: list[list[One]] = [[]]
    stacks: list[list[float]] = [[]]
    for one in sorted(slices, key=lambda each: (each.start_ns, -_end(each))):
        for thread, stack in zip(threads, stacks, strict=True):
            while stack and stack[-1] <= one.start_ns:
                stack.pop()
            if not stack or _end(one) <= stack[-1]:
                thread.append(one)
                stack.append(_end(one))
                break
        else:
            if len(threads) < SPARE:
                threads.append([one])
                stacks.append([_end(one)])
    return threads


def _end(one: Stretch) -> float:
    return float("inf") if one.end_ns is None else one.end_ns


def _slice(one: Slice, thread: int, at: float) -> Event:
    event: Event = {
        "ph": "X",
        "name": one.name,
        "cat": one.lane.value,
        "pid": PROCESS + one.rank,
        "tid": thread,
        "ts": at,
    }
    if one.end_ns is None:
        event["ph"] = "B"
    else:
        event["dur"] = (one.end_ns - one.start_ns) / 1e3
    return {**event, "args": {**one.more, **({"open": True} if one.end_ns is None else {})}}


def _flows(arrivals: dict[tuple[int, int], dict[int, tuple[float, int, int]]]) -> Iterator[Event]:
    """From the first rank that reached a boundary to the last."""
    for number, ((epoch, boundary), met) in enumerate(sorted(arrivals.items()), start=1):
        if len(met) < 2:
            continue
        order = sorted(met.values())
        for place, (at, rank, thread) in enumerate(order):
            phase = "s" if place == 0 else "f" if place == len(order) - 1 else "t"
            yield {
                "ph": phase, "name": f"boundary {boundary} of e{epoch}", "cat": "boundary", "id": number,
                "pid": PROCESS + rank, "tid": thread, "ts": at, "bp": "e",
            }  # fmt: skip


def _named(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": PROCESS + rank, "tid": thread, "ts": 0, "args": args}
