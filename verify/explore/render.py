"""A counterexample as text: at most 30 lines of at most 120 columns."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from verify import words
from verify.events import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from verify.explore.counterexample import Counterexample
    from verify.explore.story import Row

LINES = 30
WIDTH = 120
_LABEL = 10
_COLUMNS = 4
_WIDEST = 55
_LONGEST = 6


def as_text(found: Counterexample) -> str:
    """The text. What has no room is said to be left out; the replay line is always whole."""
    tail = [*_told("rule", str(found.broken), 2), *_replay(found.token)]
    head = [*_told("failed", _headline(found), 2), *_told("scope", found.scope, 2)]
    head += _told("schedule", _schedule(found), 2)
    critical = _told("critical", found.critical, 2)
    critical = _list("plan", found.plan, 8) + critical
    room = LINES - len(head) - len(tail) - len(critical)
    chain = _list("waits", found.chain or (found.say,), max(3, room - len(found.lanes) - 4))
    chain += _legend(found.chain)
    hosts = _told("hosts", "; ".join(_hosts(found.hosts)), 2) if found.hosts else []
    lanes = _lanes(found)
    while len(lanes) + len(chain) + len(hosts) > room and len(lanes) > 4:
        del lanes[2]
        lanes[1] = f"{'':{_LABEL}}..."
    return "\n".join([*head, *lanes, *chain, *hosts, *critical, *tail])


def _headline(found: Counterexample) -> str:
    what = f"{found.cls} ({found.rule} is broken), {found.certainty}"
    return f"{what}: only if {found.condition}" if found.condition else what


def _schedule(found: Counterexample) -> str:
    if found.fidelity == "fifo":
        how = "the tasks of a rank run in asyncio's order (fifo)"
    else:
        how = "needs ready tasks of a rank in an order that asyncio was not seen to have (any)"
    made = len(found.decisions)
    return f"{found.steps} steps, {made or 'no'} decision{'s'[: made != 1]} away from the default; {how}"


def _told(label: str, text: str, most: int) -> list[str]:
    """A labelled paragraph of at most so many lines."""
    lines = textwrap.wrap(text, WIDTH - _LABEL, break_long_words=True, max_lines=most, placeholder=" ...")
    return [f"{label if not number else '':{_LABEL}}{line}".rstrip() for number, line in enumerate(lines)]


def _list(label: str, items: Sequence[str], most: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        wrapped = textwrap.wrap(item, WIDTH - _LABEL - 2, subsequent_indent="  ", max_lines=3, placeholder=" ...")
        if len(lines) + len(wrapped) > most and lines:
            lines.append("...")
            break
        lines += wrapped
    return [f"{label if not number else '':{_LABEL}}{line}".rstrip() for number, line in enumerate(lines)]


def _legend(chain: Sequence[str]) -> list[str]:
    """What the name of a collective means."""
    named = re.search(r"\b([DP]) (\w+)\[(\w+)\] #(\d+)", " ".join(chain))
    if named is None:
        return []
    phase = "decode" if named[1] == "D" else "prefill"
    what = f"call {named[4]}, from 0, of {phase} on its {named[3]} group, an {OPERATIONS.get(named[2], named[2])}"
    return [f"{'':{_LABEL}}({named[0]}: {what})".replace(" an r", " a r")]


def _hosts(hosts: Sequence[tuple[int, str]]) -> Iterator[str]:
    """Ranks that wait at the same line together."""
    places: dict[str, list[int]] = {}
    for rank, text in hosts:
        places.setdefault(text, []).append(rank)
    for text, ranks in places.items():
        yield f"{words.ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} at {text}"


def _replay(token: str) -> list[str]:
    """The replay line; a long one goes on in the next line, as a shell reads it."""
    text, lines = f"turnstile check --replay {token}", []
    if len(text) > _LONGEST * WIDTH:
        return [f"{'replay':{_LABEL}}the token has {len(token)} characters: take `replay` from the JSON form"]
    while len(text) > WIDTH:
        lines.append(f"{text[: WIDTH - 1]}\\")
        text = text[WIDTH - 1 :]
    return [*lines, text]


def _lanes(found: Counterexample) -> list[str]:
    """One column a rank; those that have no part in it are left out."""
    if not found.lanes:
        return []
    ranks = list(found.ranks)
    if len(ranks) > _COLUMNS:
        active = sorted({row.rank for row in found.lanes}, key=lambda rank: (rank not in _wanted(found), rank))
        ranks = sorted(active[:_COLUMNS])
    width = min(_WIDEST, (WIDTH - _LABEL) // max(1, len(ranks)))
    others = [rank for rank in range(found.size) if rank not in ranks]
    left = f" ({words.ranks(others)}: not shown)" if others else ""
    lines = [f"{'lanes':{_LABEL}}{(found.caption + ', then') if found.caption else 'from the start'}{left}"]
    lines.append(f"{'':{_LABEL}}{''.join(f'rank {rank}'.ljust(width) for rank in ranks)}".rstrip())
    for rows in _blocks([row for row in found.lanes if row.rank in ranks], width):
        mark = "-->" if any(row.critical for row in rows) else ""
        for text in textwrap.wrap("; ".join(row.text for row in rows), width - 2, subsequent_indent="  "):
            lines.append(f"{mark:>{_LABEL - 2}}  {'':{width * ranks.index(rows[0].rank)}}{text}".rstrip())
            mark = ""
    return lines


def _wanted(found: Counterexample) -> set[int]:
    critical = {row.rank for row in found.lanes if row.critical}
    return critical | {rank for rank in range(found.size) if any(f"rank {rank}" in line for line in found.chain)}


def _blocks(rows: Sequence[Row], width: int) -> Iterator[list[Row]]:
    """Neighbouring events of one rank share a line where they fit; the critical one has its own."""
    line: list[Row] = []
    for row in rows:
        fits = line and line[-1].rank == row.rank and not (row.critical or line[-1].critical)
        if fits and len("; ".join(each.text for each in (*line, row))) < width - 1:
            line.append(row)
            continue
        if line:
            yield line
        line = [row]
    if line:
        yield line
