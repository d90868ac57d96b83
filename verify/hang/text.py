"""A diagnosis as people read it: the verdict, the chain, the lanes as in a train timetable, the fix, what is unknown.

At most 25 lines. In the timetable each column is one operation and each row the ranks that stand alike in it: `done`,
`waits`, `not called`, `left`, `no evidence`, or nothing where the rank is no member. Rows that are blamed, or in the
cycle, are marked.
"""

from __future__ import annotations

import re
import textwrap
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from verify import words
from verify.blame import Certainty, Class
from verify.hang.stacks import source_line
from verify.matching import RECENT, Standing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from verify.events import Site
    from verify.hang.diagnosis import Diagnosis
    from verify.matching import Meeting, Seat

WIDTH: Final = 120
LINES: Final = 25
INDENT: Final = 10
COLUMNS: Final = 4
ROWS: Final = 6
CELL: Final = 22


def as_text(diagnosis: Diagnosis) -> str:
    """At most LINES lines of at most WIDTH columns."""
    found = diagnosis.verdict
    lines = _field("verdict", _head(diagnosis), 1)
    lines += _field("why", found.plain, 4)
    lines += [line for each in _news(diagnosis) for line in _field("", each, 2)]
    if found.certainty is Certainty.CONDITIONAL and found.condition:
        lines += _field("only if", found.condition, 3)
    lines += [f"{'lanes' if n == 0 else '':<{INDENT}}{line}".rstrip() for n, line in enumerate(timetable(diagnosis))]
    lines += [f"{'source' if n == 0 else '':<{INDENT}}{line}" for n, line in enumerate(_sources(diagnosis))]
    if found.fix:
        lines += _field("fix", found.fix, 2)
    if terms := _terms("\n".join(lines)):
        lines += _field("terms", terms, 2)
    room = max(1, LINES - len(lines))
    unknown = [line for n, each in enumerate(diagnosis.unknown) for line in _field("" if n else "unknown", each, 2)]
    if len(unknown) > room:
        unknown = [*unknown[: room - 1], f"{'':<{INDENT}}... and more: see --json"]
    return "\n".join([*lines, *unknown][:LINES])


TERMS: Final = (
    (re.compile(r"\b[DP]\.[A-Z]+\b"), "D.TP, P.EP, ...: groups of decode, of prefill (docs/debugging.md, section 2)"),
    (re.compile(r"\brendezvous\b"), "rendezvous: all ranks meet before and after a forward"),
    (re.compile(r"\breduce_scatterv\b"), "reduce_scatterv: reduce_scatter in parts of different sizes"),
)
"""What is no term of PyTorch, and is told where it is used."""


def _terms(text: str) -> str:
    return "; ".join(gloss for pattern, gloss in TERMS if pattern.search(text))


def _head(diagnosis: Diagnosis) -> str:
    found = diagnosis.verdict
    if found.cls is Class.NONE:
        what = "nothing wrong found" if found.certainty is Certainty.CERTAIN else "undecided"
        return f"{what}: {diagnosis.source}"
    blamed = words.ranks(found.ranks) if found.ranks else "no rank to blame"
    return f"{found.cls} ({found.certainty}): {blamed}: {diagnosis.source}"


def _field(name: str, text: str, most: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{name:<{INDENT}}", subsequent_indent=" " * INDENT, break_on_hyphens=False,
        max_lines=most, placeholder=" ...",
    )  # fmt: skip


def _news(diagnosis: Diagnosis) -> list[str]:
    """Lines of the chain that the sentence does not hold."""
    say = diagnosis.verdict.say.lower()
    return [line for line in diagnosis.verdict.chain if line.lower() not in say][:3]


def timetable(diagnosis: Diagnosis) -> list[str]:
    """The lanes: a heading of two lines, then a row for all ranks that stand alike; nothing where no call is known."""
    columns = _columns(diagnosis)
    if not columns:
        return []
    rows: dict[tuple[str, ...], list[int]] = {}
    everybody = sorted({seat[0] for meeting in columns for seat in meeting.seats})
    unsure = diagnosis.situation.unsure
    lost = {name: {rank for rank, group in unsure if group == name} for name in {each.key[0].name for each in columns}}
    left = (Standing.EXITED, Standing.RAISED)
    gone = {host.rank for host in diagnosis.situation.hosts if host.standing in left and not host.thread}
    cells = [_cells(meeting, diagnosis.dark | lost[meeting.key[0].name], gone) for meeting in columns]
    standing = {rank: tuple(column.get(rank, "") for column in cells) for rank in everybody}
    for rank in everybody:
        rows.setdefault(standing[rank], []).append(rank)
    graph = diagnosis.graph
    ring = {graph.nodes[node]["rank"] for node in diagnosis.core if node[0] != "op"} if graph is not None else set()
    # Where the odd ones of a ring are known, the others in it are not marked.
    marked = set(diagnosis.verdict.ranks)
    if diagnosis.verdict.cls is Class.CYCLE and not marked and diagnosis.verdict.certainty is not Certainty.UNDECIDED:
        marked = ring
    # Blamed ranks apart from others that stand alike, and first.
    parted = [
        (row, part)
        for row, ranks in rows.items()
        for part in ([r for r in ranks if r in marked], [r for r in ranks if r not in marked])
        if part
    ]
    parted.sort(key=lambda row: (row[1][0] not in marked, row[1][0]))
    heads = [_heading(meeting) for meeting in columns]
    lines = [f"{'':<24}" + "".join(f"{_cut(head[n]):<{CELL}}" for head in heads) for n in (0, 1)]
    for row, ranks in parted[:ROWS]:
        label = _cut(f"{'>' if ranks[0] in marked else ' '} {_span(ranks)}")
        lines.append(f"{label:<24}" + "".join(f"{_cut(cell):<{CELL}}" for cell in row))
    if len(parted) > ROWS:
        lines.append(f"  and {sum(len(ranks) for _, ranks in parted[ROWS:])} ranks more")
    return [line.rstrip() for line in lines]


def _columns(diagnosis: Diagnosis) -> list[Meeting]:
    """The operations that tell the story: those in the chain first, in the order of their members' calls."""
    told = diagnosis.verdict.say + " ".join(diagnosis.verdict.chain)
    meetings = [meeting for meeting in diagnosis.situation.meetings.values() if not meeting.key[0].name.startswith("?")]
    blamed = set(diagnosis.verdict.ranks)
    named = [meeting for meeting in meetings if words.number(meeting).lower() in told.lower()]
    open_ = [meeting for meeting in meetings if any(not launch.done for launch, _ in meeting.arrived.values())]
    open_.sort(key=lambda each: (not _lacks(each, blamed), _place(each)))
    chosen = list({id(each): each for each in (*named[:COLUMNS], *open_[:COLUMNS])}.values())[:COLUMNS]
    if len(chosen) < COLUMNS:
        last = {rank: launches[-1].order for rank, launches in diagnosis.situation.launches.items() if launches}
        known = {id(meeting) for meeting in (*open_, *chosen)}
        recent = [meeting for meeting in meetings if id(meeting) not in known and _recent(meeting, last)]
        chosen += [max(recent, key=_place)] if recent else []
    return sorted(chosen, key=_place)


def _recent(meeting: Meeting, last: dict[int, int]) -> bool:
    """Whether it is one of the last calls of a member, which evidence never leaves out."""
    launches = [launch for launch, _ in meeting.arrived.values() if launch.order >= 0]
    return any(last[launch.rank] - launch.order < RECENT for launch in launches)


def _lacks(meeting: Meeting, ranks: set[int]) -> bool:
    return any(seat[0] in ranks and seat not in meeting.arrived for seat in meeting.seats)


def _place(meeting: Meeting) -> tuple[float, object]:
    orders = [launch.order for launch, _ in meeting.arrived.values()]
    return (sum(orders) / len(orders), meeting.key)


def _heading(meeting: Meeting) -> tuple[str, str]:
    (kind, name, members), number = meeting.key
    if kind == "pair":
        tag = name.partition(" tag ")[2]
        return f"{members[0]} -> {members[1]}", f"transfer {number + 1}" + (f" tag {tag}" if tag else "")
    calls = [call for _, (_, call) in sorted(meeting.arrived.items(), key=itemgetter(0)) if call.operation]
    return f"{calls[0].name if calls else 'call'} {number + 1}", name or "{" + ",".join(map(str, members)) + "}"


def _cells(meeting: Meeting, dark: Collection[int], gone: Collection[int]) -> dict[int, str]:
    """How each member stands in an operation. dark: ranks whose call there may be lost. gone: those that left."""
    mine: dict[int, list[Seat]] = {}
    for seat in meeting.seats:
        mine.setdefault(seat[0], []).append(seat)
    mixed = len({call.name for _, call in meeting.arrived.values() if call.operation}) > 1
    cells = {}
    for rank, seats in mine.items():
        arrived = [meeting.arrived[seat] for seat in seats if seat in meeting.arrived]
        if not arrived or (rank in dark and all(launch.order < 0 for launch, _ in arrived)):
            cells[rank] = "no evidence" if rank in dark else "left" if rank in gone else "not called"
            continue
        state = "done" if all(launch.done for launch, _ in arrived) else "waits"
        state = "failed" if any(call.failed for _, call in arrived) else state
        call = arrived[0][1]
        cells[rank] = f"{state} ({call.name})" if mixed and call.operation else state
    return cells


def _cut(text: str) -> str:
    most = CELL - 2
    return text if len(text) <= most else f"{text[: most - 2]}.."


def _span(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7, 12`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank{'s' if len(parts) > 1 or len(parts[0]) > 1 else ''} {text}"


def _sources(diagnosis: Diagnosis) -> Iterator[str]:
    """The lines of the program that the report names, where their files are here."""
    told = diagnosis.verdict.say + " ".join(diagnosis.verdict.chain)
    sites: dict[Site, None] = {place.line: None for place in diagnosis.places.values() if place.line is not None}
    for meeting in diagnosis.situation.meetings.values():
        sites |= {call.site: None for _, call in meeting.arrived.values() if call.site is not None}
    quoted = 0
    for site in sites:
        if quoted < 3 and str(site) in told and (line := source_line(site)):
            quoted += 1
            name = site.file.rpartition("/")[2]
            yield f"{name}:{site.line}: {line}"[: WIDTH - INDENT]
