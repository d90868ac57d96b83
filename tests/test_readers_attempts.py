"""Logs of a job that torchrun has started again: what an earlier attempt wrote is not told of the present one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.blame import Certainty, Class
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.readers.attempts import attempt_in
from verify.readers.gather import gather

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

API = "torch/distributed/elastic/multiprocessing/api.py"
STOPS = (
    f"W1130 21:47:03.376000 17627 {API}:1028] Sending process 17744 closing signal SIGTERM",
    f"E1130 21:47:03.573000 17627 {API}:1002] failed (exitcode: 1) local_rank: 1 (pid: 17745) of binary: /bin/python",
)
GIVES_UP = (
    "Traceback (most recent call last):",
    '  File "/x/torch/distributed/run.py", line 1032, in <module>',
    "    main()",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "====",
    "Root Cause (first observed failure):",
    "[0]:",
    "  rank      : 1 (local_rank: 1)",
    "  exitcode  : 1 (pid: 10542) ",
)
BOOM = (
    "[default1]:[rank1]: Traceback (most recent call last):",
    '[default1]:[rank1]:   File "/x/train.py", line 10, in <module>',
    "[default1]:[rank1]: ValueError: boom",
)
CRASH = ("[rank1]: Fatal Python error: Segmentation fault", "[rank1]: ", '[rank1]:   File "/x/train.py", line 3 in f')
TIMEOUT = (
    "[rank0]:[E810 18:10:01 PG.cpp:1] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, "
    "OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600001 milliseconds",
)
FAULTS = (BOOM, CRASH, TIMEOUT)
QUIET = ("[rank0]: step 4", "[rank1]: loading")


def judged(folder: Path, lines: Sequence[str], name: str = "job.log") -> Diagnosis:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
    return diagnose_found(gather([folder / name]))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_earlier_attempt_is_not_told_of_the_present_one(fault: tuple[str, ...], tmp_path: Path) -> None:
    found = judged(tmp_path, [*fault, *STOPS, *QUIET])
    assert (found.verdict.certainty, found.verdict.ranks) == (Certainty.UNDECIDED, ())
    (line,) = [each for each in found.unknown if "torchrun" in each]
    assert f"(line {len(fault) + 2})" in line
    assert "boom" not in str(found.to_dict())


def test_the_last_attempt_is_the_one_that_counts_where_torchrun_gives_up(tmp_path: Path) -> None:
    found = judged(tmp_path, [*CRASH, *STOPS, *QUIET, *BOOM, *STOPS, *GIVES_UP])
    assert "ValueError: boom" in found.verdict.condition + found.verdict.say
    assert "Segmentation" not in str(found.to_dict())
    assert attempt_in("log", tmp_path / "job.log").begins == len(CRASH) + len(STOPS) + 1


@pytest.mark.parametrize("fault", [BOOM, CRASH])
def test_whether_workers_were_started_again_may_not_be_known(fault: tuple[str, ...], tmp_path: Path) -> None:
    others = ("[rank0]: RuntimeError: Connection closed by peer",)
    found = judged(tmp_path, [*fault, "[rank0]: Traceback (most recent call last):", *others, *STOPS])
    told = [line for line in found.unknown if "whether it has started them again is not in it" in line]
    assert len(told) == 1
    if fault is BOOM:
        assert (found.verdict.cls, found.verdict.certainty) == (Class.EXCEPTION, Certainty.CONDITIONAL)
        assert "did not go on after that" in found.verdict.condition


def test_logs_of_an_earlier_attempt_are_left_out(tmp_path: Path) -> None:
    for attempt, lines in enumerate((BOOM, TIMEOUT)):
        for rank in (0, 1):
            log = tmp_path / "run_x" / f"attempt_{attempt}" / str(rank) / "stderr.log"
            log.parent.mkdir(parents=True)
            log.write_text("\n".join(lines) if rank == 1 - attempt else "hello\n")
    logs = sorted(tmp_path.rglob("stderr.log"))
    found = diagnose_found(gather(logs))
    assert "boom" not in str(found.to_dict())
    assert any(line == "run_x: 2 logs of attempts before attempt_1: left out" for line in found.unknown)
    assert "all_reduce" in str(found.to_dict())


Piece = tuple[str, ...]


@given(faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=4), ends=st.booleans(), works=st.booleans())
def test_the_present_attempt_begins_after_the_last_stop_that_was_followed_by_work(
    faults: list[Piece], ends: bool, works: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against the pieces that the log was made of."""
    pieces: list[tuple[str, Piece]] = []
    for fault in faults:
        pieces += [("work", (*QUIET, *fault)), ("stop", STOPS)]
    pieces += [("end", GIVES_UP)] if ends else [("work", QUIET)] if works else []
    starts = [1]
    for _, piece in pieces:
        starts.append(starts[-1] + len(piece))
    attempts = [start for start, (kind, _) in zip(starts, pieces, strict=False) if kind == "work"]
    path = tmp_path_factory.mktemp("log") / "job.log"
    path.write_text("".join(line + "\n" for _, piece in pieces for line in piece))
    found = attempt_in("log", path)
    assert found.begins == attempts[-1]
    assert found.silent is (not ends and not works)
    assert all(early < late for early, late in pairwise(attempts))


def test_a_prefix_of_torch_goes_before_the_one_of_torchrun(tmp_path: Path) -> None:
    """`default1` is the rank within a host."""
    lines = [line.replace("[rank1]", "[rank9]") for line in BOOM]
    found = judged(tmp_path, lines)
    assert "rank 9" in str(found.to_dict())
    assert "rank 1 " not in str(found.to_dict())
