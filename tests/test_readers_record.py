"""Stuck runs of ours, diagnosed from their records: real processes on shared memory, and journals written by hand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.journal import Journal, groups
from kernel.program import Program
from kernel.record import Kind, Recorder, read, ring_path
from kernel.record.layout import ORPHANED
from kernel.request import Phase
from kernel.topology import Role, World
from tests.reading import read_or_line
from verify.blame import Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.record import READER, RecordReader, Ring, of_rings
from verify.waitgraph import diagnose_events

if TYPE_CHECKING:
    from kernel.program import Call
    from verify.blame import Verdict
    from verify.readers.found import Found

WORLD = World(2)
PROGRAMS = [Program(WORLD, phase, 2) for phase in Phase]
HOUSE = Path(__file__).resolve().parent.parent


def verdict(found: Found) -> Verdict:
    return diagnose_events(found.events, found.expected)


def calls(phase: Phase) -> list[Call]:
    return [call for call in Program(WORLD, phase, 2).calls if call.role is Role.TP]


class Run:
    """The journals of a run whose clock stands at the machine's."""

    def __init__(self, out: Path, size: int = 2) -> None:
        self.out, self.world = out, World(size)
        programs = [Program(self.world, phase, 2) for phase in Phase]
        self.journals = []
        self.calls = [call for call in programs[0].calls if call.role is Role.TP]
        for rank in range(size):
            # Written a minute ago, by the clock: silence of a process that is stuck.
            recorder = Recorder(
                ring_path(out, rank),
                rank=rank,
                groups=groups(programs, rank),
                meta={"size": size},
                clock=lambda: time.monotonic_ns() - 60_000_000_000,
            )
            self.journals.append(Journal(recorder))

    def found(self, **options: float) -> Found:
        return RecordReader(**options).read(self.out)


def submit(journal: Journal, label: str, phase: Phase, count: int = 1) -> list[Call]:
    chosen = calls(phase)[:count]
    journal.submitted(label, phase, chosen, 0, 1, 64)
    return chosen


def test_a_run_that_ended_well_is_silent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for journal in run.journals:
        journal.exchange("views", leaves=False)
        journal.exchange("views", leaves=True)
        for call in submit(journal, "D 0", Phase.D):
            journal.collective(Phase.D, call, 64, finished=False)
            journal.collective(Phase.D, call, 64, finished=True)
        journal.close()
    found = run.found()
    assert verdict(found).cls is Class.NONE
    assert found.unknown == ()
    assert (found.present, found.expected) == ({0, 1}, {0, 1})


def test_a_rank_that_never_enqueued_is_missing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for journal in run.journals:
        journal.exchange("views", leaves=False)
        journal.exchange("views", leaves=True)
    submit(run.journals[0], "D 0", Phase.D)
    run.journals[0].wait("D 0", leaves=False)
    told = verdict(run.found())
    assert (told.cls, told.ranks) == (Class.MISSING, (1,))
    assert "D.TP" in told.say


@pytest.mark.parametrize("ago_s", [0.0, 60.0])
def test_a_run_that_moved_a_moment_ago_has_no_device_that_stalls(ago_s: float, tmp_path: Path) -> None:
    """Rank 1 has finished what rank 0 has not, and calls nothing else: as in every round of a run that is well."""
    rings = {}
    for rank in (0, 1):
        recorder = Recorder(
            ring_path(tmp_path, rank), rank=rank, groups=groups(PROGRAMS, rank), meta={"size": 2},
            clock=lambda: time.monotonic_ns() - int(ago_s * 1e9),
        )  # fmt: skip
        journal = Journal(recorder)
        (call,) = submit(journal, "D 0", Phase.D)
        journal.collective(Phase.D, call, 64, finished=False)
        if rank == 1:
            journal.collective(Phase.D, call, 64, finished=True)
        recording = read(ring_path(tmp_path, rank))
        rings[rank] = Ring(recording, (0, 1), 5.0, lambda _: True)
        rings[rank].take(recording.events)
    found = diagnose_found(of_rings(rings, "run"))
    if ago_s:
        assert (found.code, found.verdict.cls, found.verdict.ranks) == (1, Class.DEVICE_STALL, (0,))
    else:
        assert (found.code, found.verdict.ranks) == (3, ())
        assert sum("look again" in line for line in found.unknown) == 2


def test_a_crossing_of_a_rendezvous_and_device_work_is_a_cycle(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, second = run.journals
    submit(first, "D 0", Phase.D)
    first.wait("D 0", leaves=False)
    second.exchange("pre-d", leaves=False)
    told = verdict(run.found())
    assert (told.cls, told.ranks) == (Class.CYCLE, (0, 1))
    assert "rendezvous" in told.say
    assert "waits on the host for" in told.say


def test_a_host_waits_for_its_submission_and_not_for_later_ones(tmp_path: Path) -> None:
    """Rank 1 has D 0 alone; that rank 0 has D 1 behind it is no reason to blame rank 1."""
    run = Run(tmp_path)
    for journal in run.journals:
        submit(journal, "D 0", Phase.D)
    submit(run.journals[0], "D 1", Phase.D)
    for journal in run.journals:
        journal.wait("D 0", leaves=False)
    found = run.found()
    waits = [event for event in found.events if event.streams]
    assert [event.streams for event in waits] == [("D 0",), ("D 0",)]
    assert verdict(found).cls is Class.BELOW


def test_a_routed_call_stands_in_both_queues(tmp_path: Path) -> None:
    """P's routed all-reduce waits behind P on one rank; D, behind it on the other, never starts: a cycle over both."""
    run = Run(tmp_path)
    world = World(2, route="all")
    routed = [call for call in Program(world, Phase.P, 2).calls if call.routed]
    assert routed
    first, second = run.journals
    first.submitted("P e0 [0,1)", Phase.P, routed[:1], 0, 1, 64)
    submit(first, "D 0", Phase.D)
    submit(second, "D 0", Phase.D)
    second.submitted("P e0 [0,1)", Phase.P, routed[:1], 0, 1, 64)
    found = run.found()
    queues = next(event.queues for event in found.events if event.stream == "D" and "P" in event.also)
    assert queues == ("D", "P", "P e0 [0,1)")
    told = verdict(found)
    assert (told.cls, told.ranks) == (Class.CYCLE, (0, 1))
    assert "on stream D" in told.say


@pytest.mark.parametrize("late", [0, 1])
def test_code_between_collectives_is_outside(tmp_path: Path, late: int) -> None:
    run = Run(tmp_path)
    for rank, journal in enumerate(run.journals):
        one, two = submit(journal, "P e0 [0,2)", Phase.P, 2)
        journal.device(Phase.P, "P e0 [0,2)", "start")
        for finished in (False, True):
            journal.collective(Phase.P, one, 64, finished)
        if rank != late:
            journal.collective(Phase.P, two, 64, finished=False)
        journal.wait("P device", leaves=False)
    told = verdict(run.found())
    assert (told.cls, told.ranks) == (Class.OUTSIDE, (late,))
    assert "P e0 [0,2), between its collectives" in told.say
    # The same rings a moment after they were written: the late rank may be computing, which is no fault of its own.
    fresh = run.found(patience_s=3600.0)
    assert verdict(fresh).ranks == ()
    assert any("look again" in line for line in fresh.unknown)


def test_an_exception_comes_first_and_its_consequences_do_not(tmp_path: Path) -> None:
    run = Run(tmp_path, size=3)
    for rank, journal in enumerate(run.journals):
        if rank == 1:
            journal.exception(ValueError("no such expert"))
        else:
            # Rank 0 needs rank 2 as well, which is in something else: its end is a consequence all the same.
            if rank == 0:
                journal.exchange("end", leaves=False)
            else:
                journal.submitted("D 0", Phase.D, run.calls[:1], 0, 1, 64)
            journal.exception(_rank_lost())
        journal.close()
    told = verdict(run.found())
    assert (told.cls, told.ranks) == (Class.EXCEPTION, (1,))
    assert "no such expert" in told.say


def _rank_lost() -> Exception:
    from kernel.errors import RankLost

    return RankLost("rank 1 ended")


def test_different_rendezvous_are_a_mismatch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for journal, tag in zip(run.journals, ("pre-d", "post-d"), strict=True):
        journal.exchange(tag, leaves=False)
    told = verdict(run.found())
    assert (told.cls, told.ranks) == (Class.MISMATCH, ())
    assert "[pre-d] on rank 0" in told.say


def test_idle_ranks_are_no_fault(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for journal in run.journals:
        journal.exchange("views", leaves=False)
        journal.exchange("views", leaves=True)
        journal.wait("inbox", leaves=False)
    assert verdict(run.found()).cls is Class.NONE


def test_a_missing_ring_is_said_and_nobody_is_blamed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.journals[0].exchange("views", leaves=False)
    ring_path(tmp_path, 1).unlink()
    found = run.found()
    assert any("no ring of rank 1" in line for line in found.unknown)
    told = verdict(found)
    assert (told.ranks, told.certainty.value) == ((), "undecided")


def test_a_wrapped_ring_keeps_a_stuck_call_whose_enqueue_is_lost(tmp_path: Path) -> None:
    """Its START is still there; calls enqueued before it stay behind it."""
    for rank in range(2):
        recorder = Recorder(
            ring_path(tmp_path, rank), rank=rank, groups=groups(PROGRAMS, rank), capacity=12, clock=lambda: 5
        )
        journal = Journal(recorder)
        (call,) = submit(journal, "P e0 [0,1)", Phase.P)
        journal.submitted("P e0 [1,2)", Phase.P, calls(Phase.P)[1:2], 1, 2, 64)
        for number in range(9):
            journal.mark(f"{number}")
        if rank == 0:
            journal.collective(Phase.P, call, 64, finished=False)
    found = READER.read(tmp_path)
    mine = [event for event in found.events if event.rank == 0 and event.calls]
    assert [event.sequence for event in mine] == [0, 1]
    assert any("overwritten" in line for line in found.unknown)


def test_truncated_rings_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for journal in run.journals:
        journal.exchange("views", leaves=False)
    ring_path(tmp_path, 1).chmod(0o600)
    os.truncate(ring_path(tmp_path, 1), ring_path(tmp_path, 1).stat().st_size // 2)
    assert any("cut off" in line for line in run.found().unknown)


def test_only_the_record_is_recognised(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    ring = ring_path(run.out, 0)
    assert READER.recognises(run.out, b"")
    assert READER.recognises(run.out / "record", b"")
    assert READER.recognises(ring, ring.read_bytes()[:4096])
    assert not READER.recognises(tmp_path, b"")
    assert not READER.recognises(tmp_path / "x.log", b"TURN")
    with pytest.raises(UsageError, match="no rank<k>"):
        READER.read(tmp_path)


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    run = Run(tmp_path_factory.mktemp("fuzz"))
    for journal in run.journals:
        for call in submit(journal, "D 0", Phase.D):
            journal.collective(Phase.D, call, 64, finished=False)
        journal.exchange("ü", leaves=False)
    path = ring_path(run.out, 0)
    return path, path.read_bytes()[: 1 << 20]


@given(data=st.data())
def test_damaged_rings_give_a_line_or_a_finding(data: st.DataObject, rings: tuple[Path, bytes]) -> None:
    path, whole = rings
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, 600) | st.integers(0, len(whole) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    found = read_or_line(READER, path)
    if found is not None:
        diagnose_events(found.events, sorted(found.expected)[:64])


@pytest.mark.parametrize("all_", [True, False])
def test_a_run_whose_launcher_was_killed_says_so(tmp_path: Path, all_: bool) -> None:
    """Wherever the ranks stood; and nothing is said of a launcher that only one of them has lost."""
    run = Run(tmp_path)
    run.journals[0].exchange("pre-d", leaves=False)
    for rank, journal in enumerate(run.journals):
        recorder = journal._recorder
        why = ORPHANED if all_ or rank else "rank 1 has ended"
        text = f"RankLost: rank {rank} in exchange 1 (pre-d) was given up: {why}"
        recorder.event(Kind.EXCEPTION, b=recorder.site(text))
        recorder.close()
    found = diagnose_found(READER.read(tmp_path))
    assert ("The launcher of this run ended without a word" in found.verdict.say) is all_
    if all_:
        assert (found.code, found.verdict.cls, found.verdict.ranks) == (1, Class.EXCEPTION, ())
        assert "--resume" in found.verdict.fix
