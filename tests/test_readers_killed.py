"""A stuck job that somebody killed is the stuck job that it was; a rank that was killed first is what stopped it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernel.record import read_run
from tests.installed_rings import Rank, pair
from verify.hang.diagnosis import diagnose_found
from verify.readers.installed import of_rings
from verify.readers.installed_ring import Ring

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis

SECOND = 1_000_000_000


def after_death(out: Path, lived_s: Mapping[int, float], alive: frozenset[int] = frozenset()) -> Diagnosis:
    """The diagnosis of ranks that were killed so many seconds after their last event, but for those that are alive."""
    rings = {}
    for rank, recording in read_run(out).items():
        last = max((event.time_ns for event in recording.events), default=recording.monotonic_ns)
        rings[rank] = Ring(replace(recording, beat_ns=last + int(lived_s[rank] * SECOND)))
    found, _ = of_rings(rings, "run", running=lambda recording: recording.rank in alive)
    return diagnose_found(found)


def crossing(out: Path) -> list[Rank]:
    ranks = []
    for rank in (0, 1):
        mine = Rank(out, rank)
        groups = [mine.group(name, 0, 1) for name in ("a", "b")]
        for group in groups:
            mine.over(mine.call(group))
        mine.wait(mine.call(groups[rank], line=10 + rank))
        ranks.append(mine)
    return ranks


@pytest.mark.parametrize("apart_s", [0.0, 1.0])
def test_a_crossing_that_was_killed_is_a_crossing(apart_s: float, tmp_path: Path) -> None:
    crossing(tmp_path)
    found = after_death(tmp_path, {0: 30.0, 1: 30.0 + apart_s}).verdict
    assert (found.cls, sorted(found.ranks)) == ("cycle", [0, 1])


def test_a_rank_that_was_late_when_all_were_killed_is_missing_at_most(tmp_path: Path) -> None:
    (first, group), (second, other) = pair(tmp_path)
    second.over(second.call(other))
    first.over(first.call(group))
    first.wait(first.call(group))
    found = after_death(tmp_path, {0: 30.0, 1: 30.0}).verdict
    assert (found.cls, found.certainty, found.ranks) == ("missing", "conditional", (1,))


@pytest.mark.parametrize("survivors", [frozenset(), frozenset({0})])
def test_who_was_killed_first_stopped_the_others(survivors: frozenset[int], tmp_path: Path) -> None:
    (first, group), (second, other) = pair(tmp_path)
    second.over(second.call(other))
    first.over(first.call(group))
    first.wait(first.call(group))
    found = after_death(tmp_path, {0: 600.0, 1: 30.0}, survivors).verdict
    assert (found.cls, found.ranks) == ("exception", (1,))


def test_a_job_that_was_killed_while_nobody_waited_was_killed(tmp_path: Path) -> None:
    for rank, group in pair(tmp_path):
        rank.over(rank.call(group))
    found = after_death(tmp_path, {0: 1.0, 1: 1.0}).verdict
    assert found.certainty == "undecided"
    assert "left by being killed" in found.say
