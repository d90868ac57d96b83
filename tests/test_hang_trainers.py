"""Jobs whose calls are made by other threads than the main one, which only waits for them: what stacks tell of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fr_dumps import Recorder, save
from verify.blame import Certainty, Class
from verify.events import Site
from verify.hang.diagnosis import diagnose_found
from verify.hang.stacks import At, places
from verify.readers.found import Found, Stack
from verify.readers.gather import gather, merge

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
ALL_REDUCE = Site(LIBRARY, 1, "all_reduce")
JOIN = Site("threading.py", 1149, "Thread._wait_for_tstate_lock")
SELECT = Site("selectors.py", 468, "EpollSelector.select")
POOL = (Site("concurrent/futures/thread.py", 58, "_WorkItem.run"), Site("threading.py", 982, "Thread.run"))
PIPE = Site("[kernel]", 0, "wait_for_partner")


def thread(rank: int, name: str, *frames: Site, awake: bool = False) -> Stack:
    return Stack(rank, name, frames, awake=awake)


def main(rank: int, wait: Site = JOIN) -> Stack:
    return thread(rank, "MainThread", wait, Site("train.py", 40, "<module>"))


def trains(line: int) -> tuple[Site, Site]:
    return Site("train.py", line, "step"), Site("train.py", 30, "train")


def told(*stacks: Stack) -> Found:
    return Found("stacks", expected=frozenset(stack.rank or 0 for stack in stacks), stacks=stacks)


@pytest.mark.parametrize("wait", [JOIN, SELECT, Site("concurrent/futures/_base.py", 451, "Future.result")])
def test_a_thread_in_a_call_is_a_member_that_waits(wait: Site) -> None:
    """Rank 0's trainer is in all_reduce, rank 1's in open of a pipe, and both main threads wait for them."""
    found = diagnose_found(
        told(
            main(0, wait), thread(0, "trainer", ALL_REDUCE, *trains(9)),
            main(1, wait), thread(1, "trainer", PIPE, *trains(7)),
        )
    )  # fmt: skip
    assert (found.verdict.cls, found.verdict.ranks) == (Class.OUTSIDE, (1,))
    assert found.verdict.certainty is Certainty.CONDITIONAL
    assert "Rank 0 waits in all_reduce at train.py:9" in found.verdict.say
    assert "rank 1 (thread trainer) is blocked in a read of a pipe at train.py:7" in found.verdict.say
    assert "no call is open" not in found.verdict.say


def test_threads_in_calls_at_different_lines_are_said_to_be_in_them() -> None:
    found = diagnose_found(
        told(
            main(0), thread(0, "trainer", ALL_REDUCE, *trains(9)), main(1), thread(1, "trainer", ALL_REDUCE, *trains(8))
        )
    )
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "rank 0 stands in all_reduce at train.py:9" in found.verdict.say
    assert "rank 1 stands in all_reduce at train.py:8" in found.verdict.say


def test_a_loop_that_gives_its_thread_nothing_to_call_is_where_its_rank_stands() -> None:
    """As `asyncio.to_thread(dist.all_reduce, x)`, which rank 1 never comes to: its pool's thread waits for work."""
    idle = thread(1, "asyncio_0", Site("concurrent/futures/thread.py", 81, "_worker"), Site("threading.py", 1, "run"))
    where = places([main(0, SELECT), thread(0, "asyncio_0", ALL_REDUCE, *POOL), main(1, SELECT), idle])
    assert (where[0].at, where[0].thread) == (At.COLLECTIVE, "asyncio_0")
    assert (where[1].at, where[1].thread, where[1].what) == (At.OUTSIDE, "", "EpollSelector.select")


def test_a_main_thread_that_does_something_itself_is_where_its_rank_stands() -> None:
    """A checkpoint's thread may be in a barrier of its own meanwhile."""
    saver = thread(0, "saver", Site(LIBRARY, 1, "barrier"), Site("save.py", 3, "save"))
    reads = thread(0, "MainThread", PIPE, Site("train.py", 5, "load"))
    assert places([reads, saver])[0].what == "a read of a pipe"
    calls = thread(0, "MainThread", ALL_REDUCE, Site("train.py", 5, "load"))
    assert (places([calls, saver])[0].what, places([calls, saver])[0].thread) == ("all_reduce", "")


def test_a_rank_whose_record_tells_of_threads_has_its_main_thread_where_that_stands() -> None:
    stacks = [main(0), thread(0, "trainer", ALL_REDUCE, *trains(9))]
    assert places(stacks, told=frozenset({0}))[0].at is At.OUTSIDE
    assert places(stacks)[0].at is At.COLLECTIVE
    assert places(stacks, lively=frozenset({0}))[0].at is At.RUNNING


def test_a_thread_that_ran_meanwhile_is_not_blocked() -> None:
    where = places(
        [main(0), thread(0, "trainer", ALL_REDUCE, *trains(9)), main(1), thread(1, "t", PIPE, *trains(7), awake=True)]
    )
    assert where[1].at is At.RUNNING


def test_dumps_of_calls_that_other_threads_make_are_no_ranks_that_are_missing(tmp_path: Path) -> None:
    """A crossing: by their main threads both ranks would be outside of calls."""
    ranks = [Recorder(rank, {"0": ("a", (0, 1)), "1": ("b", (0, 1))}) for rank in (0, 1)]
    for number, rank in enumerate(ranks):
        for group in ("0", "1"):
            rank.call(group)
        rank.call(str(number), state="scheduled")
    stacks = told(
        *(stack for rank in (0, 1) for stack in (main(rank), thread(rank, "trainer", ALL_REDUCE, *trains(9 + rank))))
    )
    found = diagnose_found(merge([gather([save(tmp_path / "job", ranks)]), stacks])).verdict
    assert (found.cls, found.ranks) == (Class.CYCLE, (0, 1))
