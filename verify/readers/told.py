"""What a rank's last exception tells of another rank: its launcher had said for whose sake it was to give up.

    RankLost: rank 0 in step 394 of TP[0, 1] of D was given up: rank 1 was killed by signal 9

A launcher sees its children end and hears them fall silent, and it says the first such thing only. It says nothing of
why: a process that is killed since its job stands still ends the others in these same words.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Final

from verify.events import Event, Kind, Site, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from verify.readers.record import Ring

CONSEQUENCE: Final = "RankLost:"
"""An exception that tells of another rank's end."""
_ENDED: Final = re.compile(
    r"\brank (?P<rank>\d{1,9}) (?:was killed by signal (?P<signal>\d{1,3})|exited with code (?P<code>-?\d{1,4}))"
)
_SILENT: Final = re.compile(
    r"\branks? (?P<ranks>\d{1,9}(?:, \d{1,9})*)(?: at \S+)?(?:, (?P<how>[^,]{1,60}),)? ha(?:s|ve) not answered for"
    r" (?P<seconds>[\d.]{1,12}) s"
)
_HOW: Final = {"SIGSTOP": "a stop by SIGSTOP or a debugger", "computes": "code that computes and holds its loop"}
_HOLDS: Final = "something that holds its loop"
_STANDS: Final = re.compile(
    r"; rank (?P<rank>\d{1,9}) stands at (?P<file>.+?):(?P<line>\d{1,9}) in (?P<function>[^;]*)"
)
NO_ANSWER: Final = "it had not answered for"


def ended(text: str) -> dict[int, str]:
    """The rank of which an exception's text says how its process ended."""
    found = _ENDED.search(text) if text.startswith(CONSEQUENCE) else None
    if found is None:
        return {}
    return {int(found["rank"]): _named(int(found["signal"])) if found["signal"] else f"exit code {found['code']}"}


def silent(text: str) -> dict[int, Event]:
    """Where the ranks stood that had not answered."""
    if not text.startswith(CONSEQUENCE):
        return {}
    places = {
        int(each["rank"]): Site(each["file"], int(each["line"]), each["function"]) for each in _STANDS.finditer(text)
    }
    events = {}
    for found in _SILENT.finditer(text):
        how = next((what for sign, what in _HOW.items() if sign in (found["how"] or "")), _HOLDS)
        for rank in map(int, found["ranks"].split(", ")):
            what = f"{how} ({NO_ANSWER} {found['seconds']} s)"
            events[rank] = Event(rank, Kind.EXTERNAL, what, site=places.get(rank), state=State.STARTED)
    return events


def _named(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def of_others(rings: Mapping[int, Ring], patience_ns: int) -> tuple[dict[int, Event], list[str]]:
    """What the ranks of some rings tell of each other, and remarks, a line each.

    A process that was killed when nothing had moved for `patience_ns` was killed for that: it is a remark only, and
    what the ranks stood in counts.
    """
    told: dict[int, Event] = {}
    remarks: list[str] = []
    moved = max((each.moved_ns for each in rings.values() if each.moved_ns is not None), default=None)
    for witness, ring in _witnesses(rings):
        assert ring.raised is not None
        for rank, how in ended(ring.raised.text).items():
            if moved is not None and ring.raised.time_ns - moved > patience_ns:
                still = (ring.raised.time_ns - moved) / 1e9
                remarks.append(f"rank {rank}: {how} when nothing had moved for {still:.0f} s: what it stood in counts")
            elif rank not in told:
                told[rank] = Event(rank, Kind.EXIT, f"{how}, as rank {witness} was told", state=State.COMPLETED)
        for rank, event in silent(ring.raised.text).items():
            told.setdefault(rank, event)
    return told, list(dict.fromkeys(remarks))


def _witnesses(rings: Mapping[int, Ring]) -> Iterable[tuple[int, Ring]]:
    """Those that left by such an exception, the earliest first."""
    left = [(rank, ring) for rank, ring in rings.items() if ring.raised is not None]
    return sorted(left, key=lambda each: each[1].raised.time_ns if each[1].raised is not None else 0)
