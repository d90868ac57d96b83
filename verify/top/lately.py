"""The last moments of a run as a timetable: what the devices worked on, and the collectives that are still open."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify.html.timetable import STATIONS, Stop, Timetable
from verify.runs import one_clock
from verify.slices import Lane, timeline

if TYPE_CHECKING:
    from verify.slices import Slice
    from verify.top.frame import Frame
    from verify.top.state import RankState

ITERATIONS: Final = 8
SHIFT: Final = {Lane.D: -13, Lane.P: 13, Lane.D_CALLS: -13, Lane.P_CALLS: 13}
SHARE: Final = 0.2
"""Of the width, for what is open: its bars begin where the last event is, or before, and do not end."""


def lately(frame: Frame) -> Timetable | None:
    """The stretch of the last `ITERATIONS` decode iterations of all ranks; None where there is no work."""
    ranks = sorted(frame.states, key=lambda rank: (rank not in frame.stalled, rank))[:STATIONS]
    states = {rank: frame.states[rank] for rank in sorted(ranks)}
    shared = one_clock(state.recording for state in states.values())
    work: dict[int, list[Slice]] = {}
    for rank, state in states.items():
        found = timeline(replace(state.recording, events=list(state.recent))).slices
        work[rank] = [each for each in found if each.lane in SHIFT and ("waits" not in each.name)]

    def ms(state: RankState, time_ns: int) -> float:
        return (time_ns if shared else state.recording.wall(time_ns)) / 1e6

    starts = [
        sorted(ms(states[rank], each.start_ns) for each in slices if each.lane is Lane.D)[-ITERATIONS:]
        for rank, slices in work.items()
    ]
    times = [ms(state, event.time_ns) for state in states.values() for event in state.recent]
    if not times or not any(work.values()):
        return None
    end = max(times)
    start = min((found[0] for found in starts if found), default=min(times))
    start = max(start, end - 2000.0) if end - start > 2000.0 else start
    edge = end + (end - start) * SHARE if any(state.open for state in states.values()) else end
    stops: list[Stop] = []
    lacking: dict[str, tuple[int, ...]] = {}
    for rank, slices in work.items():
        for each in slices:
            is_open, call = each.end_ns is None, each.call
            if (call is not None and not is_open) or (not is_open and ms(states[rank], each.end_ns or 0) < start):
                continue
            begin = max(start, ms(states[rank], each.start_ns)) - start
            until = (edge if each.end_ns is None else ms(states[rank], each.end_ns)) - start
            train = each.name
            if call is not None:
                members = states[rank].recording.groups.get(call[0], (rank,))
                train = f"Call {call[1]} on {call[0]} of {members}"
                lacking[train] = tuple(
                    one for one in members if one in states and states[one].started.get(call[0], 0) < call[1]
                )
                begin = max(begin, end - start)
            style = "still" if is_open else "p" if each.lane is Lane.P else "done"
            title = f"rank {rank}: {each.name} {each.more.get('site', '')}".strip()
            text = each.name if call is not None or not each.name.startswith("P ") else each.name[2:]
            stops.append(Stop(rank, begin, text, style, title, train, until, SHIFT[each.lane]))
    rest = len(frame.states) - len(states)
    unit = "milliseconds; above: decode and its stream, below: prefill"
    return Timetable(tuple(states), tuple(stops), lacking, frozenset(), unit, f"{rest} more ranks" if rest else "")
