"""Calls that fail for want of a member, and are tried again or given up: who has not come to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.record import Kind
from tests.installed_rings import Rank, told
from verify.blame import Certainty, Class
from verify.hang.again import BRIEF_S, EVERY_S, settled
from verify.hang.diagnosis import diagnose_found
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.record.foreign import Group
    from verify.readers.found import Found

CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:57777"
LATE = "RuntimeError: Timed out waiting 2000ms for recv operation to complete"


def failing(rank: Rank, group: Group, times: int, why: str = CLOSED) -> None:
    for _ in range(times):
        call = rank.call(group, "barrier")
        rank.wait(call)
        rank.done(call, why)


def begun(out: Path, *ago_s: float) -> list[tuple[Rank, Group]]:
    """Two ranks that have met once."""
    ranks = [Rank(out, number, len(ago_s), seconds) for number, seconds in enumerate(ago_s)]
    made = [(rank, rank.group("world", *range(len(ago_s)))) for rank in ranks]
    for rank, group in made:
        rank.over(rank.call(group))
    return made


@pytest.mark.parametrize(
    ("times", "certainty", "said"),
    [(4, Certainty.CERTAIN, "failed on rank 0 at train.py:7 in step 4 times"), (1, Certainty.CONDITIONAL, "failed on")],
)
def test_who_left_is_what_the_retries_of_the_others_lack(
    times: int, certainty: Certainty, said: str, tmp_path: Path
) -> None:
    """Also while the one that tries again moves all the time; one that failed once may not need the call any more."""
    (one, group), (other, _) = begun(tmp_path, 0.2 if times > 1 else 60.0, 60.0)
    failing(one, group, times)
    other.recorder.close()
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.certainty, found.verdict.ranks) == (Class.MISSING, certainty, (1,))
    assert said in found.verdict.say
    assert "barrier (call 2 on world)" in found.verdict.say[:60].lower()
    assert "rank 1, which has left" in found.verdict.say
    assert any(CLOSED in line for line in found.verdict.chain)


def test_who_never_called_is_missing_though_nobody_waits_at_the_moment(tmp_path: Path) -> None:
    (one, group), _other = begun(tmp_path, 0.2, 60.0)
    failing(one, group, 3, LATE)
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CONDITIONAL, (1,))
    assert "rank 1 does not come after all" in found.condition


def test_who_raised_is_what_the_retries_of_the_others_lack(tmp_path: Path) -> None:
    (one, group), (other, _) = begun(tmp_path, 0.2, 60.0)
    failing(one, group, 3)
    other.text(Kind.EXCEPTION, "ValueError: bad batch")
    other.recorder.close()
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (1,))
    assert "ValueError: bad batch" in found.say


def test_all_that_have_not_come_are_named(tmp_path: Path) -> None:
    made = begun(tmp_path, 0.2, 0.2, 60.0, 60.0)
    for rank, group in made[:2]:
        failing(rank, group, 3, LATE)
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (2, 3))
    assert "failed on ranks 0 and 1" in found.say


def blamed(out: Path) -> tuple[int, tuple[int, ...]]:
    found = told(out)
    return found.code, found.verdict.ranks


def test_a_retry_that_succeeded_is_no_fault(tmp_path: Path) -> None:
    made = begun(tmp_path, 60.0, 60.0)
    failing(*made[0], 1, LATE)
    for rank, group in made:
        rank.over(rank.call(group, "barrier"))
    failing(*made[1], 1, LATE)
    assert blamed(tmp_path)[1] == ()


def test_who_moved_a_moment_ago_may_be_on_its_way_to_the_retry(tmp_path: Path) -> None:
    made = begun(tmp_path, 0.2, 0.2)
    failing(*made[0], 3, LATE)
    assert blamed(tmp_path) == (3, ())


@pytest.mark.parametrize("why", ["ValueError: device is on fire", "RuntimeError: timed out connecting to 10.0.0.7"])
def test_a_call_that_failed_by_itself_blames_no_absent_member(why: str, tmp_path: Path) -> None:
    made = begun(tmp_path, 60.0, 60.0)
    failing(*made[0], 3, why)
    assert blamed(tmp_path)[1] == ()


def test_a_job_that_ended_after_a_failure_is_no_hang(tmp_path: Path) -> None:
    made = begun(tmp_path, 60.0, 60.0)
    failing(*made[0], 3)
    for rank, _ in made:
        rank.recorder.close()
    found = told(tmp_path)
    assert (found.code, found.verdict.ranks) != (1, (1,))


def test_looks_are_bounded_by_what_they_take_not_by_how_many(tmp_path: Path) -> None:
    made = begun(tmp_path, 0.2, 0.2)
    failing(*made[0], 3, LATE)
    now = [0.0]
    looks: list[float] = []

    def read() -> Found:
        now[0] += 4.0  # as py-spy takes on a busy host
        looks.append(now[0])
        return found

    found = RecordReader(1e9).read(tmp_path)
    settled(found, read, diagnose_found, sleep=lambda _: None, clock=lambda: now[0], longest_s=BRIEF_S)
    assert len(looks) == 1 < BRIEF_S / EVERY_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "certainty"), [("retries", "certain"), ("retries_for_one_that_stays", "conditional")]
)
def test_real_retries_on_gloo(scene: str, certainty: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.test_hang_real import Job

    with Job(tmp_path, scene) as job:
        # The fourth of these calls, and the one who stays away has been silent for as long as counts.
        job.until(lambda: (ring := job.ring(0)) is not None and sum(e.kind is Kind.CALL_DONE for e in ring.events) > 6)
        job.still(1)
        for pids in (False, True):
            answer = job.hang(pids=pids)
            assert answer.verdict == (1, "missing", certainty, [1])
            assert "failed on rank 0" in answer.say
            assert "one after the other, for want of rank 1" in answer.say
