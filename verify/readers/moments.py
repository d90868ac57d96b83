"""When the entries of a Flight Recorder dump were made, and whether open ones have waited for as long as they may."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from verify.matching import JOINT
from verify.readers.calls import Moment, Patience, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.readers.calls import Call, Name
    from verify.readers.repeats import Thin

SPANS: Final = 64
EVERY: Final = 256
"""Of so many records, it is kept when one was made."""


@dataclass(frozen=True)
class When:
    """When entries were made, by their place in the order of records.

    places: theirs in the file. made, over: when they were made, and when their end was seen, of those that are left, if
    any were left out.
    """

    places: Sequence[int]
    made: Sequence[int]
    over: Sequence[int]
    repeated: Thin | None

    def __call__(self, at: int) -> int:
        """ns since 1970; 0 if that is not told."""
        return self._time(at, self.made, ended=False)

    def ended(self, at: int) -> int:
        """When the end of an entry was seen, ns since 1970; 0 if that is not told."""
        return self._time(at, self.over, ended=True)

    def _time(self, at: int, known: Sequence[int], ended: bool) -> int:
        place = self.places[at]
        if self.repeated is None:
            return known[place]
        like, row = self.repeated.order[place], self.repeated.rows[place]
        if row is None:
            return known[like]
        plan = self.repeated.plans[like]
        column = plan.ended if ended else plan.created
        return known[like] if column is None else row[column]


def spans_of(calls: Sequence[Call], seqs: Sequence[int], when: When) -> tuple[Span, ...]:
    """Of some collectives that have ended: the first one ever, and every SPANS-th, if all its entries tell their times.
    """
    found: dict[tuple[Name, int], list[int]] = {}
    for at in [at for at, seq in enumerate(seqs) if seq == 1 or not seq % SPANS]:
        call = calls[at]
        if call.backend == "nccl" and not call.transfer and call.done:
            found.setdefault((call.group, seqs[at]), []).append(at)
    spans = []
    for (group, seq), places in found.items():
        began, ended = [when(at) for at in places], [when.ended(at) for at in places]
        if 0 < min(began) <= min(ended) and all(calls[at].marker or calls[at].operation in JOINT for at in places):
            spans.append(Span(group, seq, min(began), max(ended)))
    return tuple(spans)


def alike(one: Call, other: Call) -> bool:
    """Whether two calls of one number are of one coalesced group."""
    return one is other or (one.group == other.group and one.transfer == other.transfer)


def moments_of(records: Sequence[int], when: Callable[[int], int]) -> tuple[Moment, ...]:
    """The first and the last record, and one of EVERY, where it is told when they were made. records: in order."""
    if not records:
        return ()
    some = range(-records[0] % EVERY, len(records), EVERY)
    if any(records[at] % EVERY for at in some):
        some = range(0)  # there are gaps
    places = sorted({0, *some, len(records) - 1})
    return tuple(Moment(records[at], made) for at in places if (made := when(at)) > 0)


def patience_of(
    waiting: Sequence[Call], calls: Sequence[Call], seqs: Sequence[int], when: Callable[[int], int], moved: int
) -> Patience:
    """Of the open calls among `calls`, each of which is one of `waiting`. moved: the latest time in the dump.

    What a coalesced group holds stays open for ever in a dump: only its end tells.
    """
    due, longest = 0, 0
    start = until = 0
    ended = False
    places = list(map(id, calls)) if waiting else []
    for call in waiting:
        timeout, at = call.timeout_ms or 0, -1
        while True:
            try:
                at = places.index(id(call), at + 1)
            except ValueError:
                break
            if not start <= at < until:
                start, until = at, at + 1
                while until < len(calls) and seqs[until] == seqs[at] and alike(calls[until], call):
                    until += 1
                ended = calls[until - 1].marker and calls[until - 1].done
            if not ended and (made := when(at)) > 0:
                longest = max(longest, timeout)
                due = min(due or sys.maxsize, made + timeout * 1_000_000)
                break  # those after it are younger
    return Patience(longest, 0 < due <= moved, due)
