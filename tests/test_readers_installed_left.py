"""Installed records of ranks that have left: by a return, an exception, an exit code, a signal."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.record import Kind
from kernel.record.foreign import LEAVES, Group
from tests.installed_rings import KEPT, Rank, pair, told
from verify.blame import Certainty, Class

if TYPE_CHECKING:
    from verify.hang.diagnosis import Diagnosis


def lost(out: Path, leave: Any) -> Diagnosis:
    """Rank 0 waits in a call that rank 1 has not made when it left."""
    one, other = Rank(out, 0), Rank(out, 1)
    for rank in (one, other):
        group = rank.group("world", 0, 1)
        rank.over(rank.call(group))
    one.wait(one.call(Group(1, "world", (0, 1), "gloo", 0, True)))
    leave(other)
    return told(out)


def test_a_rank_that_returned_is_missing(tmp_path: Path) -> None:
    found = lost(tmp_path, lambda rank: rank.recorder.close()).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CERTAIN, (1,))
    assert "instead of returning early" in found.fix


def test_a_rank_that_left_by_an_exit_code_says_so(tmp_path: Path) -> None:
    def leave(rank: Rank) -> None:
        rank.text(Kind.DECISION, f"{LEAVES}fatal: config 7 missing")
        rank.recorder.close()

    found = lost(tmp_path, leave).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (1,))
    assert "rank 1, which left by SystemExit: fatal: config 7 missing at train.py:7" in found.say


def test_an_exit_that_somebody_caught_is_none(tmp_path: Path) -> None:
    def leave(rank: Rank) -> None:
        rank.text(Kind.DECISION, f"{LEAVES}1")
        rank.over(rank.call(rank.group("alone", 1)))
        rank.recorder.close()

    assert lost(tmp_path, leave).verdict.cls is Class.MISSING


@pytest.mark.parametrize(
    ("how", "reaped", "said"),
    [
        ("os.kill(os.getpid(), 9)", False, "being killed by SIGKILL (by hand, or by the OOM killer)"),
        ("os._exit(3)", False, "os._exit with exit code 3"),
        ("os._exit(3)", True, "being killed, or by os._exit: its record was not closed"),
    ],
)
def test_a_rank_that_is_gone_did_not_return(tmp_path: Path, how: str, reaped: bool, said: str) -> None:
    """Until its parent asks, Linux keeps how a process ended."""

    def leave(rank: Rank) -> None:
        code = (
            "import os, pathlib, sys, tests.installed_rings as it;"
            "rank = it.Rank(pathlib.Path(sys.argv[1]), 1, ago_s=0);"
            f"rank.over(rank.call(rank.group('world', 0, 1))); {how}"
        )
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent)
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        children.append(process)

    children: list[subprocess.Popen[bytes]] = []
    try:
        found = lost(tmp_path, leave).verdict
    finally:
        for child in children:
            child.wait()
    assert (found.cls, found.ranks) == (Class.EXCEPTION, (1,))
    assert f"rank 1, which left by {said}" in found.say
    assert found.fix.startswith("Look at why that rank left")


def test_a_rank_that_raised_comes_before_those_that_were_killed_after_it(tmp_path: Path) -> None:
    ranks = pair(tmp_path, size=3)
    ranks[0][0].text(Kind.EXCEPTION, "ValueError: bad batch")
    ranks[1][0].wait(ranks[1][0].call(ranks[1][1]))
    del ranks[2]  # its ring is of no process any more
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.EXCEPTION, (0,))


def test_a_rank_that_is_gone_is_named_though_nobody_waits_for_it(tmp_path: Path) -> None:
    ranks = pair(tmp_path)
    for rank, group in ranks:
        rank.over(rank.call(group))
    del ranks[1], rank  # its ring is of no process any more
    KEPT.clear()  # nor are those that other tests gave the same name
    gc.collect()
    found = told(tmp_path)
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "no call is open that waits for rank 1, which left by being killed, or by os._exit" in found.verdict.say
