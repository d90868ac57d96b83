"""What the ranks of a run that failed say of each other in their records."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from kernel.errors import RankLost
from kernel.journal import Journal, groups
from kernel.program import Program
from kernel.record import Recorder, ring_path
from kernel.request import Phase
from kernel.topology import Role, World
from verify.blame import Certainty, Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.record import READER
from verify.readers.told import ended, silent

if TYPE_CHECKING:
    from pathlib import Path

    from verify.blame import Verdict

SIZE = 3
WORLD = World(SIZE)
PROGRAMS = [Program(WORLD, phase, 2) for phase in Phase]
CALLS = [call for call in PROGRAMS[0].calls if call.role is Role.TP]
MINUTE_NS = 60_000_000_000


class Run:
    """Ranks that have all begun D's first collective, a minute ago; `now` goes on by hand."""

    def __init__(self, out: Path) -> None:
        self.out, self.now = out, time.monotonic_ns() - MINUTE_NS
        self.journals = []
        for rank in range(SIZE):
            recorder = Recorder(
                ring_path(out, rank), rank=rank, groups=groups(PROGRAMS, rank), meta={"size": SIZE}, clock=self.clock
            )
            self.journals.append(Journal(recorder))
        for journal in self.journals:
            journal.submitted("D 0", Phase.D, CALLS[:2], 0, 1, 64)
            journal.device(Phase.D, "D 0", "start")
            journal.collective(Phase.D, CALLS[0], 64, finished=False)

    def clock(self) -> int:
        self.now += 1000
        return self.now

    def lost(self, why: str, witnesses: tuple[int, ...] = (0, 2)) -> Verdict:
        """The verdict when these ranks have given up for this reason."""
        for rank in witnesses:
            said = f"rank {rank} in step 1 of TP[0, 1, 2] of D was given up: {why}"
            self.journals[rank].exception(RankLost(said))
            self.journals[rank].close()
        return diagnose_found(READER.read(self.out)).verdict


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("rank 1 was killed by signal 9", "SIGKILL, as rank 0 was told"),
        ("rank 1 was killed by signal 11", "SIGSEGV, as rank 0 was told"),
        ("rank 1 exited with code 3", "exit code 3, as rank 0 was told"),
    ],
)
def test_a_rank_that_was_killed_in_a_call_that_all_are_in(why: str, said: str, goes_on: bool, tmp_path: Path) -> None:
    """Its peers may have finished the call, and wait in the next one: then its device does not stall, it is gone."""
    run = Run(tmp_path)
    if goes_on:
        for rank in (0, 2):
            run.journals[rank].collective(Phase.D, CALLS[0], 64, finished=True)
            run.journals[rank].collective(Phase.D, CALLS[1], 64, finished=False)
    verdict = run.lost(why)
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (1,))
    assert said in verdict.say
    assert "dmesg" in verdict.fix


def test_a_rank_that_raised_in_a_call_that_all_are_in(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.journals[1].exception(ValueError("no such expert"))
    verdict = run.lost("rank 1 failed: no such expert")
    assert (verdict.cls, verdict.ranks) == (Class.EXCEPTION, (1,))
    assert "no such expert" in verdict.say


@pytest.mark.parametrize("seconds", [1, 20])
def test_a_rank_that_was_killed_since_its_job_stood_still_is_not_the_cause(seconds: int, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.journals[0].exchange("pre-d", leaves=False)
    for rank in (1, 2):
        run.journals[rank].exchange("post-d", leaves=False)
    run.now += seconds * 1_000_000_000
    verdict = run.lost("rank 1 was killed by signal 9")
    if seconds == 1:
        assert (verdict.cls, verdict.ranks) == (Class.EXCEPTION, (1,))
        return
    assert (verdict.cls, verdict.ranks) == (Class.MISMATCH, (0,))
    found = READER.read(tmp_path)
    assert any("rank 1: SIGKILL when nothing had moved for 20 s" in line for line in found.unknown)


@pytest.mark.parametrize(
    ("why", "what"),
    [
        ("rank 1, stopped by SIGSTOP or a debugger, has not answered for 5 s", "in a stop by SIGSTOP or a debugger"),
        ("rank 1 has not answered for 5 s; rank 1 stands at a/mine.py:7 in Mine.span", "at a/mine.py:7 in Mine.span"),
        ("rank 1, whose loop is held by code that computes, has not answered for 5 s", "code that computes and holds"),
        ("rank 1 at 10.0.0.2 has not answered for 5 s (stopped, or the host or the link to it is down)", "its loop"),
    ],
)
def test_a_rank_that_had_fallen_silent_is_where_it_was(why: str, what: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.now += 5_000_000_000
    verdict = run.lost(why)
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.OUTSIDE, Certainty.CERTAIN, (1,))
    assert what in verdict.say


def test_what_launchers_say() -> None:
    """The words are theirs: what they say today has to be understood."""
    from rollout.ranks.pulse import Pulse

    lost = f"RankLost: rank 0 was given up: {Pulse(5.0).why([1, 3], ' at 10.0.0.2')}"
    assert silent(lost).keys() == {1, 3}
    assert ended(f"RankLost: rank 1 was killed by signal {int(signal.SIGKILL)}") == {1: "SIGKILL"}
    for text in (
        "ValueError: rank 1 was killed by signal 9",
        "RankLost: rank 0 was given up: no progress for 8 s under fine, with 13 turns in flight: the run was ended",
    ):
        assert not ended(text)
        assert not silent(text)
