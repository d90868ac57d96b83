"""Ends: a forked child's is its own and not in its parent's record, and a record may end before its program does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from kernel.record import Kind, read_run
from kernel.record.foreign import UNINSTALLED
from tests.installed_rings import Rank, pair, told
from tests.users import HOUSE
from verify.blame import Certainty, Class

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
    import os, sys, threading
    from turnstile import record

    record.install(sys.argv[1])

    def end(how):
        if how == "hook":
            try:
                raise ValueError("helper failed")
            except ValueError as error:
                sys.excepthook(type(error), error, error.__traceback__)
                os._exit(1)
        elif how == "exit":
            sys.exit(3)
        elif how == "thread":
            thread = threading.Thread(target=lambda: 1 // 0)
            thread.start()
            thread.join()
            os._exit(0)
        raise ValueError("helper failed")

    child = os.fork()
    if not child:
        end(sys.argv[2])
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("how", ["hook", "exit", "thread", "raise"])
def test_the_end_of_a_forked_child_is_not_in_its_parent_s_record(how: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HOUSE), "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), how], env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = read_run(tmp_path)[0].events
    assert not [event for event in events if event.kind in (Kind.EXCEPTION, Kind.DECISION)]
    assert not [event for event in events if event.text == UNINSTALLED]


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_whose_program_ended_its_record_may_have_made_the_call(ends: bool, tmp_path: Path) -> None:
    (zero, world), (one, same) = pair(tmp_path)
    for rank, group in ((zero, world), (one, same)):
        rank.over(rank.call(group))
    zero.wait(zero.call(world))
    _leave(one, ends)
    found = told(tmp_path).verdict
    if ends:
        assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CERTAIN, (1,))
    else:
        assert found.certainty is Certainty.UNDECIDED
        assert found.ranks == ()


def _leave(rank: Rank, ends: bool) -> None:
    if not ends:
        rank.recorder.event(Kind.MARK, epoch=0, b=rank.recorder.site(UNINSTALLED))
    rank.recorder.close()


@pytest.mark.parametrize("thread", [0, 1])
def test_top_takes_a_rank_for_failed_only_by_its_main_thread(thread: int, tmp_path: Path) -> None:
    from verify.top.follow import Follower

    (zero, _), (_, _) = pair(tmp_path)
    zero.thread(thread)
    zero.recorder.event(Kind.EXCEPTION, epoch=thread, b=zero.recorder.site("ValueError: x"))
    row = Follower(tmp_path).look().rows[0]
    assert (row.status == "failed", row.exception) == ((True, "ValueError: x") if thread == 0 else (False, ""))
