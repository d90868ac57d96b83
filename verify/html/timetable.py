"""What every rank called, drawn as a railway timetable: ranks are stations, and an operation is a train that calls at
all of its members. Trains that cross between two stations are operations in opposite order; one whose line ends in a
ring has not been called where the ring is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from verify import words
from verify.html.graph import CHARACTER, svg
from verify.matching import RECENT, Standing

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from verify.matching import Host, Launch, Meeting, Situation

STATIONS: Final = 24
FEW: Final = 12
"""Ranks of a job that has more than `STATIONS`."""
FEW_CALLS: Final = 4
CALLS: Final = RECENT
"""Of each rank, the last ones are drawn."""
ROW: Final = 56
LEFT: Final = 92
COLOURS: Final = 6


@dataclass(frozen=True, slots=True)
class Stop:
    """One call on one rank. at, until: place from the left, in columns or in the unit of the timetable.

    state: open (it waits), done, or outside (no operation: what the rank is in instead). train: "" for none, else
    `Call 2 on dp` as `verify.words.number` says it. shift: pixels below the middle of the rank's track.
    """

    rank: int
    at: float
    text: str
    state: str
    title: str = ""
    train: str = ""
    until: float | None = None
    shift: int = 0


@dataclass(frozen=True)
class Timetable:
    """stations: ranks in order. lacking: train -> members that never called it. marked: trains of a ring.

    unit: "" where places are columns, else what `at` is in. left_out: what is not drawn, in words.
    """

    stations: tuple[int, ...]
    stops: tuple[Stop, ...]
    lacking: dict[str, tuple[int, ...]]
    marked: frozenset[str] = frozenset()
    unit: str = ""
    left_out: str = ""


def of_situation(
    situation: Situation, marked: Collection[Any] = (), blamed: Collection[int] = (), dark: Collection[int] = ()
) -> Timetable:
    """The last calls of each rank. marked: keys of the meetings of a ring. blamed: ranks to keep when not all fit.

    dark: ranks without a record of calls: that they lack one is not known.
    """
    everybody = sorted({host.rank for host in situation.hosts} | set(situation.launches))
    stations = _stations(situation, everybody, marked, blamed)
    most = CALLS if len(stations) == len(everybody) else FEW_CALLS
    last = {rank: situation.launches.get(rank, [])[-most:] for rank in stations}
    columns = _columns(last)
    stops: list[Stop] = []
    lacking: dict[str, tuple[int, ...]] = {}
    for rank, launches in last.items():
        for launch in launches:
            for meeting in launch.meetings:
                train = words.number(meeting)
                what = words.operation(meeting).partition(" (")[0]
                guessed = meeting.key[0].name in words.GUESSED
                if meeting.key[0].kind == "pair" and not guessed:
                    what = "send" if rank == meeting.key[0].members[0] else "recv"
                text = words.operation(meeting) if guessed else f"{what} {_place(meeting)}"
                state = "done" if launch.done else "open"
                title = f"rank {rank}: {words.operation(meeting)}{words.at(launch.event)}"
                stops.append(Stop(rank, columns[id(launch)], text, state, title, train))
                absent = {seat[0] for seat in meeting.seats if seat not in meeting.arrived}
                absent -= set() if guessed else set(dark)
                lacking[train] = tuple(sorted(absent & set(stations)))
    end = max((stop.at for stop in stops), default=-1.0) + 1
    stops += [
        Stop(host.rank, end, *_beyond(host)) for host in situation.hosts if host.rank in last and _beyond(host)[0]
    ]
    rest = len(everybody) - len(stations)
    older = sum(calls[-1].order >= most for calls in situation.launches.values() if calls)
    left_out = [f"{rest} more ranks"] * (rest > 0) + [f"older calls of {older} ranks"] * (older > 0)
    named = frozenset(words.number(situation.meetings[key]) for key in marked if key in situation.meetings)
    return Timetable(stations, tuple(stops), lacking, named, "", " and ".join(left_out))


def _place(meeting: Meeting) -> str:
    (kind, name, members), count = meeting.key
    if kind == "pair":
        return f"{members[0]}-{members[1]} #{count + 1}"
    return f"{name or '{' + ','.join(map(str, members[:6])) + (',...' if len(members) > 6 else '') + '}'} #{count + 1}"


def _stations(
    situation: Situation, everybody: Sequence[int], marked: Collection[Any], blamed: Collection[int]
) -> tuple[int, ...]:
    """All ranks, or a few of many: those blamed, of the ring, without whom operations wait, who wait for the blamed."""
    if len(everybody) <= STATIONS:
        return tuple(everybody)
    involved = {seat[0] for key in marked if key in situation.meetings for seat in situation.meetings[key].arrived}
    lacked = {seat[0] for each in situation.meetings.values() for seat in each.seats if seat not in each.arrived}
    beside = {
        seat[0]
        for each in situation.meetings.values()
        if any(seat[0] in blamed and seat not in each.arrived for seat in each.seats)
        for seat in each.arrived
    }
    order = sorted(
        everybody,
        key=lambda rank: (rank not in blamed, rank not in involved, rank not in lacked, rank not in beside, rank),
    )
    return tuple(sorted(order[:FEW]))


def _columns(last: dict[int, list[Launch]]) -> dict[int, float]:
    """A column for each launch: in order on each rank, and the same one on all members where the orders allow it."""
    at = dict.fromkeys(last, 0)
    columns: dict[int, float] = {}
    column = 0
    drawn = {id(launch) for launches in last.values() for launch in launches}
    while any(at[rank] < len(launches) for rank, launches in last.items()):
        front = {rank: launches[at[rank]] for rank, launches in last.items() if at[rank] < len(launches)}
        heads = {id(launch) for launch in front.values()}
        whole = [rank for rank, launch in front.items() if _together(launch, drawn) <= heads | set(columns)]
        # Where nobody's next call is next everywhere, the orders cross: each rank then goes on by itself. Groups whose
        # ranks do not lie between one another's share a column.
        ready: set[int] = set()
        taken: list[tuple[int, int]] = []
        for rank in sorted(whole, key=lambda rank: (front[rank].order, rank)):
            mine = _together(front[rank], drawn)
            seats = [seat[0] for meeting in front[rank].meetings for seat in meeting.seats if seat[0] in last]
            low, high = min(seats, default=rank), max(seats, default=rank)
            if mine <= ready or any(low <= end and start <= high for start, end in taken):
                continue
            ready |= mine
            taken.append((low, high))
        moved = [rank for rank, launch in front.items() if id(launch) in ready] or list(front)
        for rank in moved:
            columns[id(front[rank])] = column
            at[rank] += 1
        column += 1
    return columns


def _together(launch: Launch, drawn: set[int]) -> set[int]:
    """The launches that meet this one, itself included, as far as they are drawn."""
    met = {id(other) for meeting in launch.meetings for other, _ in meeting.arrived.values()}
    return (met & drawn) | {id(launch)}


def _beyond(host: Host) -> tuple[str, str, str]:
    """What a rank is in after its last call, where that is no operation."""
    title = words.standing(host)
    match host.standing:
        case Standing.OUTSIDE:
            return _cut(f"in {host.event.operation if host.event else ''}"), "outside", title
        case Standing.RAISED:
            return _cut(f"left by {host.event.operation if host.event else ''}"), "outside", title
        case Standing.EXITED:
            return "left", "outside", title
        case Standing.UNKNOWN:
            return "unknown", "outside", title
        case Standing.ELSEWHERE | Standing.FINISHED:
            return ("elsewhere" if host.standing is Standing.ELSEWHERE else "at its end"), "outside", title
    if host.event is not None and host.event.kind.value == "wait":
        return "host waits", "outside", f"rank {host.rank} waits on the host{words.at(host.event)}"
    return "", "", ""


def _cut(text: str) -> str:
    return text if len(text) <= 28 else text[:25] + "..."


def draw(timetable: Timetable) -> str:
    """The timetable as SVG; "" where there is nothing to draw."""
    if not timetable.stops:
        return ""
    timed = bool(timetable.unit)
    if timed:
        low = min(stop.at for stop in timetable.stops)
        high = max(stop.until if stop.until is not None else stop.at for stop in timetable.stops)
        scale = 1000.0 / max(high - low, 1e-9)
        centre = {id(stop): LEFT + 10 + (stop.at - low) * scale for stop in timetable.stops}
        width = LEFT + 1040.0
    else:
        centre, width = _spread(timetable)
        low = scale = 0.0
    top = 66.0 if timed else 44.0
    rows = {rank: top + ROW * at for at, rank in enumerate(timetable.stations)}
    height = top + ROW * len(rows) - 16
    back = [
        f'<line class="track" x1="{LEFT}" y1="{y}" x2="{width - 12:.1f}" y2="{y}"/>'
        f'<text class="station" x="{LEFT - 12}" y="{y + 4.5}">rank {rank}</text>'
        for rank, y in rows.items()
    ]
    lines: list[str] = []
    boxes: list[str] = []
    rings: list[str] = []
    trains: dict[str, list[Stop]] = {}
    for stop in timetable.stops:
        if stop.train:
            trains.setdefault(stop.train, []).append(stop)
        if timed:
            boxes.append(_bar(stop, centre[id(stop)], rows[stop.rank] + stop.shift, low, scale, timetable.marked))
        else:
            boxes.append(_pill(stop, centre[id(stop)], rows[stop.rank], timetable.marked))
    colours = {name: at % COLOURS for at, name in enumerate(sorted({_line(train) for train in trains}))}
    for train, stops in trains.items():
        style = "bad" if train in timetable.marked else f"t{colours[_line(train)]}"
        stops.sort(key=lambda stop: rows[stop.rank])
        points = " ".join(f"{centre[id(stop)]:.1f},{rows[stop.rank] + stop.shift}" for stop in stops)
        lines.append(f'<polyline class="train {style}" points="{points}"><title>{escape(train)}</title></polyline>')
        for rank in timetable.lacking.get(train, ()):
            near = min(stops, key=lambda stop: abs(rows[stop.rank] - rows[rank]))
            x = max(centre[id(stop)] for stop in stops) if timed else centre[id(near)]
            shift = near.shift
            lines.append(
                f'<line class="train lacking {style}" x1="{centre[id(near)]:.1f}" y1="{rows[near.rank] + shift}"'
                f' x2="{x:.1f}" y2="{rows[rank] + shift}"/>'
            )
            rings.append(
                f'<circle class="lacks" cx="{x:.1f}" cy="{rows[rank] + shift}" r="7">'
                f"<title>rank {rank} has not called {escape(train)}</title></circle>"
            )
    axis = [f'<text class="note left" x="{LEFT}" y="16">{escape(timetable.unit)}</text>'] if timed else []
    if timed:
        for tick in range(6):
            x, value = LEFT + 10 + 200 * tick, low + 200 * tick / scale
            axis.append(f'<text class="note" x="{x}" y="30">{value:,.1f}</text>')
    return svg(width, height, [*axis, *back, *lines, *boxes, *rings], "what each rank called, in order")


def _line(train: str) -> str:
    """What trains of one colour share: `Call 2 on dp` and `Call 3 on dp` run on one line."""
    return re.sub(r"\d+ ", "", train, count=1)


def _spread(timetable: Timetable) -> tuple[dict[int, float], float]:
    """Columns as wide as their widest text."""
    widths: dict[float, float] = {}
    for stop in timetable.stops:
        widths[stop.at] = max(widths.get(stop.at, 0.0), CHARACTER * len(stop.text) + 20)
    middle, x = {}, LEFT + 12.0
    for at in sorted(widths):
        middle[at] = x + widths[at] / 2
        x += widths[at] + 40
    return {id(stop): middle[stop.at] for stop in timetable.stops}, x


def _pill(stop: Stop, x: float, y: float, marked: Collection[str]) -> str:
    wide = CHARACTER * len(stop.text) + 16
    style = f"{stop.state} bad" if stop.train in marked and stop.train else stop.state
    return (
        f'<g class="stop {style}"><title>{escape(stop.title)}</title><rect x="{x - wide / 2:.1f}" y="{y - 13}"'
        f' width="{wide:.1f}" height="26" rx="5"/><text x="{x:.1f}" y="{y + 4.5}">{escape(stop.text)}</text></g>'
    )


def _bar(stop: Stop, x: float, y: float, low: float, scale: float, marked: Collection[str]) -> str:
    end = stop.until if stop.until is not None else stop.at
    wide = max(3.0, (end - stop.at) * scale)
    style = f"{stop.state} bad" if stop.train in marked and stop.train else stop.state
    text = ""
    if wide > CHARACTER * len(stop.text) + 6:
        text = f'<text x="{x + wide / 2:.1f}" y="{y + 4.5}">{escape(stop.text)}</text>'
    return (
        f'<g class="stop {style}"><title>{escape(stop.title)}</title><rect x="{x:.1f}" y="{y - 11}"'
        f' width="{wide:.1f}" height="22" rx="3"/>{text}</g>'
    )
