"""A second look: whoever moved a moment ago goes on, or turns out to be stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verify.blame import Certainty, Class
from verify.events import Communicator, Event, Kind, State
from verify.hang.again import EVERY_S, LONGEST_S, settled
from verify.hang.diagnosis import diagnose_found
from verify.readers.found import Found

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND = 1_000_000_000
BOTH = frozenset({0, 1})
GROUP = Communicator((0, 1), "dp")
WAITS = Event(0, Kind.COLLECTIVE, "all_reduce", communicator=GROUP, sequence=0, blocking=True, state=State.STARTED)
OUTSIDE = Event(1, Kind.EXTERNAL, "the device's work of D 7", state=State.STARTED)


def look(moved_s: float, lively: Sequence[int]) -> Found:
    """Rank 0 waits for rank 1, which is elsewhere; these ranks moved a moment ago."""
    moved_ns = int(moved_s * SECOND)
    return Found("run", (WAITS, OUTSIDE), BOTH, BOTH, moved_ns=moved_ns, lively=frozenset(lively), whole=BOTH)


def after(looks: Sequence[Found]) -> tuple[Found, Class, Certainty, tuple[int, ...], int]:
    """What a command that sees these, one after the other (the last for good), ends with, and how often it waited."""
    slept: list[float] = []
    left = [*looks[1:]]

    def read() -> Found:
        return left.pop(0) if len(left) > 1 else left[0] if left else looks[-1]

    found, diagnosis = settled(looks[0], read, diagnose_found, sleep=slept.append)
    verdict = diagnosis.verdict
    assert sum(slept) <= LONGEST_S
    assert set(slept) <= {EVERY_S}
    return found, verdict.cls, verdict.certainty, verdict.ranks, len(slept)


def test_a_run_that_goes_on_is_well_at_the_second_look() -> None:
    _, cls, certainty, ranks, waited = after([look(1.0, [0, 1]), look(1.4, [0, 1])])
    assert (cls, certainty, ranks, waited) == (Class.NONE, Certainty.CERTAIN, (), 1)


def test_a_run_that_has_just_got_stuck_is_told_once_it_counts_as_still() -> None:
    looks = [look(1.0, [0, 1])] * 9 + [look(1.0, [])]
    found, cls, _, ranks, waited = after(looks)
    assert (cls, ranks, waited) == (Class.OUTSIDE, (1,), 9)
    assert found is looks[-1]


def test_one_rank_that_moves_on_beside_one_that_stands_still_is_no_all_clear() -> None:
    _, cls, _, ranks, _ = after([look(1.0, [0, 1]), look(2.0, [0])])
    assert (cls, ranks) == (Class.OUTSIDE, (1,))


def test_what_stays_open_ends_all_the_same() -> None:
    _, _, certainty, ranks, waited = after([look(1.0, [0, 1])])
    assert (certainty, ranks, waited) == (Certainty.UNDECIDED, (), LONGEST_S / EVERY_S)


@pytest.mark.parametrize("lively", [[], [0]])
def test_what_is_decided_is_not_looked_at_again(lively: list[int]) -> None:
    _, cls, certainty, ranks, waited = after([look(1.0, lively)])
    assert (cls, ranks, waited) == (Class.OUTSIDE, (1,), 0)
    assert certainty is not Certainty.UNDECIDED
