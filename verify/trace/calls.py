"""The record of `turnstile.record.install` as trace-event JSON: a lane a group for calls, one a thread for its waits.

A rank is a process. A call's bar begins where the program made it and ends where the record knows that it was over:
when the program's wait for it returned, or a quarter of a second late at most where it never waited. Flows (s, t, f)
join the bars of calls that meet: same group, same members, same number, on all ranks, in order of arrival.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kernel.record import Kind
from verify.live.installed import call_words
from verify.readers.installed_ring import Ring
from verify.runs import one_clock
from verify.trace.chrome import PROCESS, SPARE, Event, nested

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kernel.record import Event as Entry
    from kernel.record import Recording
    from verify.readers.installed_call import Item

HOST: Final = 1
"""The thread of the trace for the main thread's waits; each further thread of the program has `SPARE` numbers too."""
MOMENTS: Final = {Kind.DECISION: "decided: ", Kind.EXCEPTION: "exception: ", Kind.MARK: ""}


@dataclass
class Bar:
    """One stretch of one lane. end_ns: None if it was open. meets: what calls that meet share."""

    name: str
    start_ns: int
    end_ns: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    meets: tuple[Any, ...] | None = None


@dataclass
class Lanes:
    """One rank. lanes: title -> bars, in the order of the threads that the trace has for them."""

    recording: Recording
    lanes: dict[str, list[Bar]] = field(default_factory=dict)
    moments: list[tuple[str, int, str]] = field(default_factory=list)


def lanes_of(recording: Recording) -> Lanes:
    """Everything that one rank's record tells. Stretches whose beginning was overwritten are left out."""
    made = Lanes(recording)
    ring = Ring(recording)
    waits: dict[tuple[int, str], Bar] = {}
    calls: dict[int, list[Bar]] = {}
    begun: dict[int, tuple[int, str]] = {}
    for item in ring.items:
        calls.setdefault(item.number, []).append(_bar(item, ring.rank))

    def title(entry: Entry) -> str:
        return "waits" if entry.epoch == 0 else f"waits of {ring.threads.get(entry.epoch, f'thread {entry.epoch}')}"

    def begin(entry: Entry, what: str, name: str, site: str = "") -> None:
        end(entry, what)
        bar = waits[entry.epoch, what] = Bar(name, entry.time_ns, None, {"site": entry.site or site})
        made.lanes.setdefault(title(entry), []).append(bar)

    def end(entry: Entry, what: str) -> None:
        if (bar := waits.pop((entry.epoch, what), None)) is not None:
            bar.end_ns = max(entry.time_ns, bar.start_ns)

    made.lanes["waits"] = []
    for entry in recording.events:
        match entry.kind:
            case Kind.CALL_WAIT:
                found = calls.get(entry.a)
                name, site = (found[0].name, found[0].more["site"]) if found else ("a call", "")
                begin(entry, "call", f"waits for {name}", site)
                begun[entry.a] = (entry.epoch, "call")
            case Kind.CALL_WAITED:
                end(entry, "call")
            case Kind.CALL_DONE:
                for bar in calls.get(entry.a, ()):
                    if bar.end_ns is None:
                        bar.end_ns = max(entry.time_ns, bar.start_ns)
                        bar.more |= {"failed": entry.text} if entry.text else {}
                if (where := begun.pop(entry.a, None)) is not None and (bar_ := waits.pop(where, None)) is not None:
                    bar_.end_ns = max(entry.time_ns, bar_.start_ns)
            case Kind.SYNC:
                begin(entry, "device", f"waits for {entry.text if entry.text != 'device' else 'its device'}")
            case Kind.SYNCED:
                end(entry, "device")
            case Kind.HOST_WAIT_ENTER:
                begin(entry, "host", f"waits for {entry.text}")
            case Kind.HOST_WAIT_LEAVE:
                end(entry, "host")
            case kind if kind in MOMENTS:
                made.moments.append((MOMENTS[kind] + entry.text, entry.time_ns, entry.site))
            case _:
                pass
    bars = {number: iter(mine) for number, mine in calls.items()}
    for item in ring.items:
        made.lanes.setdefault(f"calls on {item.group.name}", []).append(next(bars[item.number]))
    return made


def _bar(item: Item, rank: int) -> Bar:
    call, group = item.call, item.group
    more: dict[str, Any] = {"site": item.site, "number": item.sequence + 1, "backend": item.medium}
    for name, value in (
        ("ranks", list(group.ranks) if group.ranks is not None else None), ("dtype", call.dtype), ("root", call.root),
        ("reduce", call.reduce), ("tag", call.tag), ("stream", item.stream), ("by", call.via),
        ("elements_in", _elements(item.sizes)), ("elements_out", _elements(item.outputs)),
    ):  # fmt: skip
        if value not in (None, ""):
            more[name] = value
    meets: tuple[Any, ...] | None = None
    if call.peer is None:
        meets = (group.name, group.ranks, "", item.sequence)
    elif call.peer >= 0:
        ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
        meets = (group.name, group.ranks, f"{ends[0]} to {ends[1]} tag {call.tag}", item.sequence)
    return Bar(call_words(call, group.name, item.sequence + 1), item.time_ns, None, more, meets)


def _elements(sizes: tuple[tuple[int, ...], ...] | None) -> list[int] | int | None:
    if not sizes:
        return None
    flat = [size for each in sizes for size in each]
    return flat[0] if len(flat) == 1 else flat


def installed_lines(recordings: Mapping[int, Recording]) -> Iterator[str]:
    """The trace of these ranks as JSON text, one event a line."""
    shared = one_clock(recordings.values())
    about = {
        "program": "recorded by turnstile.record.install",
        "clock": "monotonic, one host" if shared else "wall, several hosts",
        "overwritten": {str(rank): each.dropped for rank, each in sorted(recordings.items())},
        "unreadable": {str(rank): each.torn for rank, each in sorted(recordings.items())},
    }
    yield '{"displayTimeUnit": "ms",\n"otherData": ' + json.dumps(about) + ',\n"traceEvents": [\n'
    before = ""
    for event in _events([lanes_of(each) for _, each in sorted(recordings.items())], shared):
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "\n]}\n"


def _events(ranks: Sequence[Lanes], shared: bool) -> Iterator[Event]:
    def absolute(one: Lanes, time_ns: int) -> int:
        return time_ns if shared else one.recording.wall(time_ns)

    times = [absolute(one, event.time_ns) for one in ranks for event in one.recording.events[:1]]
    start = min(times, default=0)
    met: dict[tuple[Any, ...], list[tuple[float, int, int]]] = {}
    for one in ranks:
        process = PROCESS + one.recording.rank
        for name, args in (
            ("process_name", {"name": f"rank {one.recording.rank}"}),
            ("process_labels", {"labels": f"pid {one.recording.pid} on {one.recording.host}"}),
            ("process_sort_index", {"sort_index": one.recording.rank}),
        ):
            yield _named(name, process, HOST, args)
        for place, (title, bars) in enumerate(one.lanes.items()):
            for spare, mine in enumerate(nested(bars)):
                thread = HOST + place * SPARE + spare
                yield _named("thread_name", process, thread, {"name": title + (f" ({spare + 1})" if spare else "")})
                yield _named("thread_sort_index", process, thread, {"sort_index": thread})
                for bar in mine:
                    at = (absolute(one, bar.start_ns) - start) / 1e3
                    kind = "waits" if title.startswith("waits") else "call"
                    event: Event = {"ph": "B", "name": bar.name, "cat": kind, "pid": process, "tid": thread, "ts": at}
                    if bar.end_ns is not None:
                        event |= {"ph": "X", "dur": (bar.end_ns - bar.start_ns) / 1e3}
                    yield {**event, "args": {**bar.more, **({"open": True} if bar.end_ns is None else {})}}
                    if bar.meets is not None:
                        met.setdefault(bar.meets, []).append((at, process, thread))
        for text, time_ns, site in one.moments:
            yield {
                "ph": "i", "name": text, "cat": "moment", "pid": process, "tid": HOST,
                "ts": (absolute(one, time_ns) - start) / 1e3, "s": "p" if text.startswith("exception") else "t",
                "args": {"site": site},
            }  # fmt: skip
    for number, (key, places) in enumerate(met.items(), start=1):
        if len({process for _, process, _ in places}) < 2:
            continue
        for place, (at, process, thread) in enumerate(order := sorted(places)):
            phase = "s" if place == 0 else "f" if place == len(order) - 1 else "t"
            yield {
                "ph": phase, "name": f"call {key[3] + 1} on {key[0]}", "cat": "meets", "id": number, "pid": process,
                "tid": thread, "ts": at, "bp": "e",
            }  # fmt: skip


def _named(what: str, process: int, thread: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": dict(args)}
