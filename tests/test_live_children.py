"""Child processes of a rank: those that may work for it, and those that have ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands import until
from tests.installed_rings import pair
from tests.test_hang_moving import COLLECTIVE, LINE, main, told
from tests.test_live_threads import process
from tests.test_live_timed import REAL
from verify.blame import Class
from verify.events import Site
from verify.live.children import children_of
from verify.live.idle import sample
from verify.live.outside import Outside
from verify.live.threads import Moves, moves

if TYPE_CHECKING:
    from verify.live.children import Children

pytestmark = REAL


def settled(pid: int, living: int, ended: int) -> Children:
    def now() -> Children | None:
        found = children_of(pid)
        return found if (len(found.living), len(found.ended)) == (living, ended) else None

    found: Children = until(now)
    return found


STAY = "threading.Event().wait()"


def forks(*ends: str) -> str:
    """A program that forks children that end so, and waits for an event."""
    each = "".join(f"if not os.fork():\n    import signal\n    {end}\n" for end in ends)
    return each + STAY


@pytest.mark.parametrize(
    ("end", "how"),
    [("os._exit(3)", "exit code 3"), ("os._exit(0)", "exit code 0"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_child_that_has_ended_does_not_work_for_its_parent(end: str, how: str) -> None:
    with process(forks(end)) as pid:
        found = settled(pid, 0, 1)
        (child,) = found.ended
        assert found.lines == [f"its child pid {child} (python{_version(child)}) has exited ({how})"]
        seen = until(lambda: (now := moves(pid)) is not None and now.locked and now)
        assert isinstance(seen, Moves)
        assert seen.others == ()
        assert seen.closed
        assert seen.children == tuple(found.lines)
        assert until(lambda: (one := sample(pid)) is not None and one.still)


def _version(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("python")


def test_a_child_that_lives_is_named_beside_one_that_has_ended() -> None:
    with process(forks("os._exit(3)", "time.sleep(600)", "time.sleep(600)")) as pid:
        found = settled(pid, 2, 1)
        ended, living = found.lines
        assert "has exited (exit code 3)" in ended
        assert living.startswith(f"its child processes: pids {min(found.living)} (")
        assert living.endswith(f"py-spy dump --pid {min(found.living)} shows what it does")
        seen = until(lambda: moves(pid))
        assert isinstance(seen, Moves)
        assert any(f"pids {min(found.living)} (" in other for other in seen.others)
        assert not seen.closed


def test_one_that_its_parent_has_asked_about_is_none() -> None:
    with process("subprocess.run(['true'])\n" + STAY) as pid:
        assert settled(pid, 0, 0).lines == []


def test_the_report_names_the_child_of_a_rank_that_keeps_others(tmp_path: Path) -> None:
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    line = "its child pid 71 (python) has exited (exit code 3)"
    itself = Outside("pid 7 (x) does not write to a pipe, which \0 reads", frozenset({7}))
    now = Moves(locked=False, pid=7, outside=itself, children=(line,))
    stack = main(1, Site("/lib/python3.11/multiprocessing/connection.py", 1, "Connection._recv"), LINE)
    found = told(tmp_path, main(0, COLLECTIVE, LINE), stack, now={0: Moves(children=("its child x",)), 1: now})
    assert (found.verdict.cls, found.verdict.ranks) == (Class.OUTSIDE, (1,))
    assert f"rank 1: {line}" in found.verdict.chain
    assert not any("rank 0: its child" in each for each in found.verdict.chain)
    assert found.verdict.fix.startswith("Look at why its child ended")
