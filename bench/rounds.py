"""From a rank's record to its decode-only rounds: what each enqueued, how often it met the others, how long it took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from kernel.record import Kind
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.record import Event

WITH_P: Final = frozenset({Kind.BOUNDARY, Kind.PERMIT, Kind.PROMOTE, Kind.SUBMIT, Kind.WORK_START, Kind.WORK_FINISH})


class Call(NamedTuple):
    """A collective as a rank enqueued it. rows: of all members together. head: it collects logits, not hidden rows."""

    op: str
    group: str
    rows: int
    head: bool


@dataclass(slots=True)
class Round:
    """One round of one rank. rows: its own in the D iteration, -1 without one. left_ns: end of its last exchange."""

    number: int
    rows: int = -1
    prefill: bool = False
    calls: Counter[Call] = field(default_factory=Counter)
    exchanges: Counter[str] = field(default_factory=Counter)
    entered_ns: int = 0
    left_ns: int = 0
    waited_ns: int = 0
    marks: list[tuple[str, int]] = field(default_factory=list)
    took_ns: int = 0
    """Since the round before left its last exchange; 0 where that is not known."""


def rounds(events: Iterable[Event]) -> list[Round]:
    """All rounds of one rank, in order. The first one of a record that has wrapped may be a part."""
    found: dict[int, Round] = {}
    for event in events:
        one = found.setdefault(event.round, Round(event.round))
        if event.phase is Phase.P and event.kind in WITH_P:
            one.prefill = True
        match event.kind:
            case Kind.SUBMIT if event.phase is Phase.D:
                one.rows = event.b
            case Kind.ENQUEUE if event.phase is Phase.D:
                one.calls[Call(event.text, event.group, event.a, "head" in event.site)] += 1
            case Kind.EXCHANGE_ENTER:
                one.exchanges[event.text] += 1
                one.entered_ns = event.time_ns
            case Kind.EXCHANGE_LEAVE:
                one.waited_ns += event.time_ns - one.entered_ns
                one.left_ns = event.time_ns
            case Kind.MARK:
                one.marks.append((event.text, event.a))
            case _:
                pass
    ordered = [found[number] for number in sorted(found)]
    for before, one in pairwise(ordered):
        if before.left_ns and one.left_ns:
            one.took_ns = one.left_ns - before.left_ns
    return ordered


def decode_only(all_rounds: Sequence[Round], rows: int, settle: int = 10) -> list[Round]:
    """The rounds in which this rank decodes `rows` rows and no prefill is anywhere near: the longest such stretch, less
    `settle` rounds at each end.
    """
    stretches: list[list[Round]] = [[]]
    for one in all_rounds:
        fits = one.rows == rows and not one.prefill and one.took_ns > 0
        if not fits or (stretches[-1] and one.number != stretches[-1][-1].number + 1):
            stretches.append([])
        if fits:
            stretches[-1].append(one)
    best = max(stretches, key=len)
    return best[settle : len(best) - settle]


def traffic(calls: Counter[Call], hidden: int, vocabulary: int, width: int) -> int:
    """Bytes that the collectives of a round carry: rows of all members times what a row holds. width: of a number."""
    return sum(count * call.rows * (vocabulary if call.head else hidden) * width for call, count in calls.items())


def alike(some: Sequence[Round]) -> bool:
    """Whether all of these enqueued the same calls of the same sizes and met the others equally often."""
    return all(one.calls == some[0].calls and one.exchanges == some[0].exchanges for one in some)
