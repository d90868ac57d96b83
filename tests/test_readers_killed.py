"""A stuck job that somebody killed is the stuck job that it was; a rank that was killed first is what stopped it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from kernel.journal import Journal, groups
from kernel.program import Program
from kernel.record import Kind as RecordKind
from kernel.record import Recorder, read_run, ring_path
from kernel.record.foreign import OVER
from kernel.request import Phase
from kernel.topology import Role, World
from tests.installed_rings import Rank, pair
from verify.blame import Certainty, Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.installed import of_rings
from verify.readers.installed_ring import Ring
from verify.readers.record import Ring as OwnRing
from verify.readers.record import of_rings as own_rings

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


@pytest.mark.parametrize("ended", [False, True])
def test_a_helper_that_had_ended_is_no_thread_that_might_have_called(ended: bool, tmp_path: Path) -> None:
    """Each rank has had a thread that made a call, as of a checkpoint."""
    for rank in crossing(tmp_path):
        call = rank.thread(1, "saver").call(rank.group("saves", 0, 1))
        rank.over(call)
        if ended:
            rank.text(RecordKind.MARK, OVER)
    found = after_death(tmp_path, {0: 30.0, 1: 30.0}).verdict
    assert (found.certainty is Certainty.UNDECIDED) is not ended
    assert (found.cls, sorted(found.ranks)) == ("cycle", [0, 1] if ended else [])


@pytest.mark.parametrize("waits", [False, True])
def test_the_calls_of_a_thread_that_had_ended_are_its_main_threads(waits: bool, tmp_path: Path) -> None:
    """The saver of rank 1 has ended, and its next one has not come: no thread that has left is to blame."""
    (first, group), (second, other) = pair(tmp_path)
    for rank, both in ((first, group), (second, other)):
        rank.thread(1, "saver").over(rank.call(both))
        rank.text(RecordKind.MARK, OVER)
        rank.thread(0)
    if waits:  # a call that the saver has left open, and nobody waits for
        second.thread(1).call(second.group("own", 0, 1))
        second.thread(0)
    first.wait(first.call(group))
    found = after_death(tmp_path, {0: 30.0, 1: 30.0}).verdict
    assert (found.cls, found.certainty, found.ranks) == ("missing", "conditional", (1,))
    assert "has left" not in found.say
    assert "saver" not in found.say


# -- runs of ours, whose ranks do not write down the time --------------------------------------------------------------


def of_ours(out: Path, gone: Mapping[int, float], raised: Mapping[int, str] = MappingProxyType({})) -> Diagnosis:
    """A rendezvous crosses device work, rank 0 in the latter. gone: ranks that were killed, and how many seconds before
    now each wrote its newest event; the others left by what they raised, 10 s before now.
    """
    world, rings = World(2), {}
    programs = [Program(world, phase, 2) for phase in Phase]
    for rank in (0, 1):
        now = [time.monotonic_ns() - 100 * SECOND]
        recorder = Recorder(
            ring_path(out, rank), rank=rank, groups=groups(programs, rank), meta={"size": 2},
            clock=lambda now=now: now[0],
        )  # fmt: skip
        journal = Journal(recorder)
        now[0] += int((100 - gone.get(rank, 60.0)) * SECOND)
        if rank == 0:
            journal.submitted("D 0", Phase.D, [c for c in programs[1].calls if c.role is Role.TP][:1], 0, 1, 64)
            journal.wait("D 0", leaves=False)
        else:
            journal.exchange("pre-d", leaves=False)
        if rank in raised:
            now[0] += 50 * SECOND
            recorder.event(RecordKind.EXCEPTION, b=recorder.site(raised[rank]))
    for rank, recording in read_run(out).items():
        ring = OwnRing(recording, (0, 1), 5.0, lambda recording: recording.rank not in gone)
        ring.take(recording.events)
        rings[rank] = ring
    return diagnose_found(own_rings(rings, "run"))


@pytest.mark.parametrize("apart_s", [0.0, 40.0])
def test_a_run_of_ours_that_was_killed_in_a_ring_is_a_ring(apart_s: float, tmp_path: Path) -> None:
    """When each died nothing tells, but that all of them did: the newest event of one may be old."""
    found = of_ours(tmp_path, {0: 20.0 + apart_s, 1: 20.0})
    assert (found.verdict.cls, found.verdict.ranks) == (Class.CYCLE, (0, 1))
    assert sum("after the job had stopped" in line for line in found.unknown) == 2


def test_a_rank_of_ours_that_was_killed_while_the_other_lives_is_what_stopped_it(tmp_path: Path) -> None:
    found = of_ours(tmp_path, {1: 20.0}).verdict
    assert (found.cls, found.ranks) != (Class.CYCLE, (0, 1))
    assert found.ranks == (1,)


@pytest.mark.parametrize("killed_s", [20.0, 5.0])
def test_who_raised_something_of_its_own_comes_before_who_was_killed(killed_s: float, tmp_path: Path) -> None:
    found = of_ours(tmp_path, {1: killed_s}, {0: "ValueError: bad batch"})
    assert (found.verdict.cls, found.verdict.ranks) == (Class.EXCEPTION, (0,))
    assert any("after the job had stopped" in line for line in found.unknown) is (killed_s == 5.0)
