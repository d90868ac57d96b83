"""A frame as a terminal shows it: one line a rank, those that stand still first, and below who waits for whom."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from verify import words
from verify.top.frame import STANDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import JustifyMethod, RenderableType

    from verify.top.frame import Frame, Row

STYLES: Final = {
    "running": "green",
    "idle": "dim",
    "quiet": "yellow",
    "ended": "dim",
    "stalled": "bold yellow",
    "silent": "bold yellow",
    "unknown": "bold yellow",
    "stopped": "bold red",
    "died": "bold red",
    "failed": "bold red",
}
"""Colours underline what the words say; nothing is told by colour alone."""


NARROW: Final = 130
"""Columns of a terminal below which the columns that a stall is not told by are left out."""
MINOR: Final = frozenset({
    "in flight", "epoch", "boundary", "permit", "longest gap", "submitted", "calls left", "open", "decided last",
})  # fmt: skip
"""Columns that only a wide terminal has room for; the lines below the table say who stands and why."""


def picture(frame: Frame, height: int = 0, width: int = 0) -> RenderableType:
    """The frame. height, width: of the screen; 0 for as much as it takes. What is too long is wrapped, never cut."""
    waits = [part for line in _waits(frame) for part in _wrapped(line, width)]
    room = max(3, height - 6 - len(waits)) if height else len(frame.rows)
    rows = sorted(frame.rows, key=lambda row: (row.rank not in frame.stalled, row.rank))[:room]
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", expand=False)
    names = INSTALLED if frame.installed else OURS
    shown = [name for name in names if not (0 < width < NARROW and name in MINOR)]
    for name in shown:
        _column(table, name, frame.installed)
    for row in sorted(rows, key=lambda row: row.rank):
        cells = dict(zip(names, _cells_installed(row) if frame.installed else _cells(row), strict=True))
        table.add_row(*(cells[name] for name in shown))
    parts: list[RenderableType] = [_head(frame), table]
    if len(rows) < len(frame.rows):
        parts.append(Text(f"and {len(frame.rows) - len(rows)} more ranks (--json has all)", "dim"))
    return Group(*parts, *waits)


OURS: Final = (
    "rank", "state", "round", "in flight", "epoch", "boundary", "permit", "last operation", "age", "quiet for",
    "longest gap", "submitted", "calls left",
)  # fmt: skip
INSTALLED: Final = ("rank", "state", "last operation", "age", "quiet for", "open", "at", "decided last")
LEFT: Final = frozenset({"state", "in flight", "last operation", "at", "decided last"})


def _column(table: Table, name: str, installed: bool) -> None:
    justify: JustifyMethod = "left" if name in LEFT else "right"
    if name == "last operation":
        table.add_column(name, overflow="fold" if installed else "ellipsis", no_wrap=not installed, min_width=24)
    elif name in ("at", "decided last"):
        table.add_column(name, overflow="fold" if name == "at" else "ellipsis", no_wrap=name != "at", min_width=10)
    else:
        table.add_column(name, justify=justify, no_wrap=True, min_width=8 if name == "state" else len(name))


def _wrapped(line: Text, width: int, most: int = 6) -> list[Text]:
    """A line below the table as lines of a screen."""
    if not width or not line.plain:
        return [line]
    parts = textwrap.wrap(line.plain, width, subsequent_indent="  ", max_lines=most, placeholder=" ...")
    return [Text(part, line.style) for part in parts]


def _head(frame: Frame) -> Text:
    text = Text()
    text.append(frame.run, "bold")
    text.append(f"  {frame.about}  " if frame.about else "  ")
    counts: dict[str, int] = {}
    for row in frame.rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    for at, (status, count) in enumerate(counts.items()):
        text.append(", " if at else "")
        text.append(f"{count} {status}", STYLES[status])
    return text


def _cells(row: Row) -> list[str | Text]:
    style, status, operation = _common(row)
    return [
        Text(str(row.rank), style),
        status,
        number(row.round),
        row.phase or "-",
        f"e{row.epoch}" if row.epoch >= 0 else "-",
        number(row.boundary),
        number(row.permit),
        operation,
        seconds(row.age_s),
        Text(seconds(row.quiet_s), style),
        f"{row.gap_ms:,.0f} ms" if row.gap_ms is not None else "-",
        f"D {row.d_queue}  P {row.p_queue}",
        str(row.pending),
    ]


def _cells_installed(row: Row) -> list[str | Text]:
    style, status, operation = _common(row)
    return [
        Text(str(row.rank), style), status, operation, seconds(row.age_s), Text(seconds(row.quiet_s), style),
        str(row.pending), Text(short(row.site)), Text(row.decision.partition(" (at ")[0] or "-", "dim"),
    ]  # fmt: skip


def short(site: str) -> str:
    """`train.py:7 step` of a call site with its whole path."""
    place, space, function = site.partition(" ")
    return f"{place.rpartition('/')[2]}{space}{function}" or "-"


def _common(row: Row) -> tuple[str, Text, Text]:
    style = STYLES[row.status] if row.status in STANDING else ""
    status = Text(row.status + (" <-" if row.blocks else ""), "bold red" if row.blocks else STYLES[row.status])
    operation = Text(f"{'in ' if row.open else ''}{row.operation}" or "-", style if row.open else "dim")
    return style, status, operation


def _waits(frame: Frame, most: int = 8) -> list[Text]:
    """What is wrong, below the table: nothing while the run moves."""
    found: list[Text] = []
    if frame.check is not None:
        verdict = frame.check.verdict
        text = f"live check: {verdict.cls} (certain): {verdict.say}"
        found.append(Text(text, "bold red"))
    found += [Text(line, "bold yellow") for line in (*frame.hosts, *few(frame.stale))]
    if frame.missing:
        found.append(Text(f"no record of {words.ranks(frame.missing)}", "bold red"))
    for row in frame.rows:
        if row.exception:
            found.append(
                Text(f"rank {row.rank} left by {row.exception}", "bold red")
            )
    if stopped := [row.rank for row in frame.rows if row.status == "stopped"]:
        verb = "is" if len(stopped) == 1 else "are"
        found.append(Text(f"{words.ranks(stopped)} {verb} stopped, by a signal or a debugger", "bold red"))
    for row in frame.rows:
        if row.installed and row.waits and row.status in STANDING:
            found.append(Text(f"rank {row.rank} {row.waits}"))
    blockers = [row.rank for row in frame.rows if row.blocks]
    if blockers:
        verb = "keeps" if len(blockers) == 1 else "keep"
        found.append(Text(f"<- {words.ranks(blockers)} {verb} others waiting", "bold red"))
    if any(row.status in STANDING for row in frame.rows):
        found += [Text(line, "bold red" if line.startswith("in a ring") else "") for line in frame.waits]
    if len(found) > most:
        found = [*found[:most], Text(f"and {len(found) - most} more lines (--json has all)", "dim")]
    return [Text(""), *found] if found else []


def few(lines: Sequence[str], most: int = 2) -> list[str]:
    """The first of some lines that are alike, and how many more there are."""
    more = len(lines) - most
    return [*lines[:most], *[f"and {more} more such {'ring' if more == 1 else 'rings'}"] * (more > 0)]


def number(value: int | None) -> str:
    """`-` for what is not known or there is none."""
    return "-" if value is None or value < 0 else str(value)


def seconds(value: float | None) -> str:
    """`12 ms`, `3.4 s`, `5 min`."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:,.0f} min" if value < 7200 else f"{value / 3600:,.0f} h"
