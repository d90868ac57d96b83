"""Ten outcomes that were known before this kernel was written: five ways to share a device, with room for one or two.

A hand-made prototype of the protocol (ranks, one P epoch, one D iteration a round, streams with slots) was run under
random schedules first; the real kernel and policies must give the same answers, and exhaustively.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from kernel.topology import World
from verify.blame import Certainty, Class
from verify.explore.policy import Scope, check
from verify.explore.result import Conclusion
from verify.trial.family import family

if TYPE_CHECKING:
    from verify.explore.policy import Report


class Row(NamedTuple):
    """policy, route: of the kernel. one, two: whether some schedule stands still, with room for one and for two."""

    policy: str
    route: str
    one: bool
    two: bool


SKETCH = {
    "no turnstile, separate streams": Row("unordered", "none", True, False),
    "no turnstile, one stream": Row("unordered", "paper", True, True),
    "turnstile, separate streams": Row("fine", "none", True, False),
    "turnstile, one stream, span 1": Row("fine:span=1", "paper", False, False),
    "turnstile, one stream, span 2": Row("fine:span=2", "paper", False, False),
}


def judged(row: Row, capacity: int, world: World, segments: int) -> Report:
    members = family(world, row.policy, segments, 3, capacity=capacity, meetings=2)
    chosen = [member for member in members if member.name in ("P meets D after 0", "P meets D after 1")]
    return check(Scope(row.policy, world, segments, 3, capacity), scenarios=chosen, explained=False)


def agrees(row: Row, capacity: int, world: World, segments: int) -> None:
    hangs = (row.one, row.two)[capacity - 1]
    report = judged(row, capacity, world, segments)
    result = report.guarantees["deadlock_free"]
    if not hangs:
        assert result.verdict is Conclusion.PROVED, result
        assert all(each.verdict is Conclusion.PROVED for each in report.guarantees.values())
        return
    assert result.verdict is Conclusion.REFUTED, result
    assert result.cls is Class.CYCLE
    # What room for two would cure is conditional, what one stream makes is certain.
    assert result.certainty is (Certainty.CERTAIN if row.two else Certainty.CONDITIONAL)


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("row", SKETCH.values(), ids=SKETCH)
def test_two_ranks(row: Row, capacity: int) -> None:
    agrees(row, capacity, World(2, adp=2, route=row.route), 2)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("row", SKETCH.values(), ids=SKETCH)
def test_the_sketch_s_own_size(row: Row, capacity: int) -> None:
    """Four ranks, D over {0,2} and {1,3}, three segments. Routed whole: `paper` leaves part of P unrouted there."""
    route = "all" if row.route == "paper" else row.route
    agrees(row, capacity, World(4, adp=2, ep=2, route=route), 3)


def test_all_ten_are_here() -> None:
    assert len(SKETCH) * 2 == 10
    assert sum(row.one + row.two for row in SKETCH.values()) == 4
