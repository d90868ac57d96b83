"""`[default1]:` before a line is a number within a host: its rank is told by other lines, assumed, or unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verify.blame import Class
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.readers.gather import gather
from verify.readers.lines import Numbers, numbers_of, of_hosts, rank_in

if TYPE_CHECKING:
    from pathlib import Path

STATUS = (
    "[default{0}]:[E810 10:00:00] [PG ID 0 PG GUID 0(default_pg) Rank {1}]  failure detected by watchdog at work"
    " sequence id: 5 PG status: last enqueued work: 5, last completed work: 4\n"
)
TRACE = (
    "[default{0}]:Traceback (most recent call last):\n"
    '[default{0}]:  File "/job/train.py", line 9, in main\n'
    "[default{0}]:KeyError: 'x'\n"
)


def told(folder: Path, **logs: str) -> Diagnosis:
    folder.mkdir()
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    return diagnose_found(gather([folder]))


@pytest.mark.parametrize("known", [False, True])
def test_a_number_within_a_host_is_no_rank_where_there_are_several_hosts(known: bool, tmp_path: Path) -> None:
    """Rank 3, of the second host, left; known: a line with its number tells that rank."""
    here = STATUS.format(0, 0) + STATUS.format(1, 1)
    there = STATUS.format(0, 2) + ("[default1]:[rank3]: step\n" if known else "") + TRACE.format(1)
    found = told(tmp_path / "job", host0=here, host1=there)
    if known:
        assert (found.verdict.cls, found.verdict.ranks) == (Class.EXCEPTION, (3,))
    else:
        assert found.verdict.ranks == ()
        assert (
            "host1.log: [default1]: tells a number within a host: lines that tell no global rank are not used"
            in found.unknown
        )


def test_in_the_only_log_it_is_assumed_and_said(tmp_path: Path) -> None:
    found = told(tmp_path / "job", all=STATUS.format(0, 0) + TRACE.format(1))
    assert (found.verdict.cls, found.verdict.ranks) == (Class.EXCEPTION, (1,))
    line = "all.log: [default1]: tells a number within a host: taken for rank 1, as it is where the job has one host"
    assert line in found.unknown


def test_the_only_log_of_a_job_of_more_ranks_is_that_of_one_of_its_hosts(tmp_path: Path) -> None:
    found = told(tmp_path / "job", host1=STATUS.format(0, 4) + TRACE.format(1))
    assert found.verdict.ranks == ()
    assert any("lines that tell no global rank are not used" in line for line in found.unknown)


def test_what_lines_of_one_number_tell(tmp_path: Path) -> None:
    log = tmp_path / "host1.log"
    log.write_text(STATUS.format(0, 4) + "[default1]:[rank5]: a\n[default2]:[rank6]: a\n[default2]:[rank7]: a\n")
    assert numbers_of(log) == Numbers({0: 4, 1: 5}, frozenset({2}))
    assert [rank_in(f"[default{number}]: x", log) for number in range(3)] == [4, 5, 2]
    with of_hosts([log]):
        assert [rank_in(f"[default{number}]: x", log) for number in range(3)] == [4, 5, None]
    assert rank_in("[default2]: x", log) == 2
    assert rank_in("[rank3]: x", log) == 3
