"""Real hangs of real processes on gloo, explained from outside: with a record, and from stacks alone.

With a record the class, the ranks and the exit code must be right. From stacks alone they must be where stacks suffice;
otherwise the answer is 3, with what is missing. Nobody is ever blamed falsely.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.record import Kind, read
from tests.commands import until
from tests.standing import main_of, stands
from verify.attach import program, runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.record import Recording

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="Linux is needed, for /proc"),
]
HOUSE = Path(__file__).resolve().parent.parent
LONG_S = 90.0
"""How long a command may take that takes a second or two on a quiet machine."""
SPY = pytest.mark.skipif(program("py-spy") is None, reason="py-spy, of the extra `test`, is not installed")


class Job:
    """Ranks in the middle of a scene of `stuck_program`; killed at the end."""

    def __init__(self, folder: Path, scene: str, size: int = 2, recorded: bool = True) -> None:
        self.run, self.size, self.recorded = folder / "run", size, recorded
        os.mkfifo(folder / "fifo")
        self.processes: list[subprocess.Popen[str]] = []
        arguments = [scene, str(folder / "store"), str(self.run) if recorded else "-", str(folder / "fifo")]
        try:
            for rank in range(size):
                env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(HOUSE / "tests" / "stuck_program.py"), *arguments], env=env, text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=HOUSE,
                    )
                )  # fmt: skip
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                assert process.stdout.readline() == f"rank {rank}: at the scene\n"
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def until(self, what: Callable[[], bool]) -> None:
        """Wait for an outcome."""
        until(what)

    def stands(self, rank: int, *wheres: str) -> bool:
        """Whether Linux keeps the main thread of a rank in one of some functions."""
        try:
            found = Path(f"/proc/{self.pids[rank]}/wchan").read_text()
        except OSError:
            return False
        return any(where in found for where in wheres)

    def ring(self, rank: int) -> Recording | None:
        try:
            return read(self.run / "record" / f"rank{rank}.ring")
        except UsageError:
            return None

    def waits(self, rank: int, *kinds: Kind) -> bool:
        """Whether a rank waits inside of a call by its record; without one, in a futex and with no processor time."""
        if not self.recorded:
            return self.stands(rank, "futex") and self._idle(rank)
        ring = self.ring(rank)
        return ring is not None and bool(ring.events) and ring.events[-1].kind in (kinds or (Kind.CALL_WAIT,))

    def _idle(self, rank: int) -> bool:
        """Whether its main thread sleeps, and no thread of it uses or waits for a processor for a moment."""

        def used() -> int:
            each = [task / "stat" for task in Path(f"/proc/{self.pids[rank]}/task").iterdir()]
            fields = [stat.read_text(errors="replace").rpartition(")")[2].split() for stat in each]
            # Under load, a thread that is about to call something may get no processor for a while.
            return -1 if any(one[0] == "R" for one in fields) else sum(int(one[11]) + int(one[12]) for one in fields)

        try:
            before = used()
            time.sleep(0.5)
            return before >= 0 and used() == before and stands(main_of(self.pids[rank]))
        except (OSError, ValueError, IndexError):
            return False

    def still(self, *ranks: int) -> None:
        """Wait until the newest event of some ranks is older than the time for which one counts as on its way."""

        def silent_s(rank: int) -> float:
            ring = self.ring(rank)
            return 0.0 if ring is None else (time.monotonic_ns() - ring.events[-1].time_ns) / 1e9

        for rank in ranks:
            self.until(lambda rank=rank: silent_s(rank) > 5.5)  # type: ignore[misc]

    def kill(self, rank: int) -> None:
        """Let a rank kill itself, with SIGKILL, where its scene has it do so."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()
        self.until(lambda: not runs(self.pids[rank]))

    def hang(self, *more: str, pids: bool = True) -> Answer:
        """What `turnstile hang` says of the pids, or of the record's directory."""
        command = [sys.executable, "-m", "turnstile", "hang", "--json", *more]
        command += [word for pid in self.pids for word in ("--pid", str(pid))] if pids else [str(self.run)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=HOUSE, timeout=LONG_S, check=False)
        assert ended.returncode in (0, 1, 3), ended.stderr
        return Answer(ended.returncode, json.loads(ended.stdout))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Answer:
    code: int
    told: dict[str, Any]

    @property
    def verdict(self) -> tuple[int, str, str, list[int]]:
        return self.code, self.told["class"], self.told["certainty"], self.told["ranks"]

    @property
    def say(self) -> str:
        return str(self.told["say"])


def both(job: Job) -> None:
    """All ranks wait in a call."""
    for rank in range(job.size):
        job.until(lambda rank=rank: job.waits(rank))  # type: ignore[misc]


def first(job: Job) -> None:
    """All ranks but the last one do."""
    for rank in range(job.size - 1):
        job.until(lambda rank=rank: job.waits(rank))  # type: ignore[misc]


# -- with a record -----------------------------------------------------------------------------------------------------


def test_a_crossing_with_host_waits(tmp_path: Path) -> None:
    with Job(tmp_path, "crossing") as job:
        both(job)
        answer = job.hang()
        assert answer.verdict == (1, "cycle", "certain", [0, 1])
        assert "on P#1" in answer.say
        assert "on D#2" in answer.say
        assert "stuck_program.py:50 in crossing" in answer.say


def test_both_receive_first(tmp_path: Path) -> None:
    with Job(tmp_path, "pairs") as job:
        both(job)
        answer = job.hang()
        assert answer.verdict == (1, "cycle", "certain", [0, 1])
        assert "transfer 1 from rank 1 to rank 0" in answer.say


def test_a_missing_member_that_computes(tmp_path: Path) -> None:
    with Job(tmp_path, "missing", 3) as job:
        first(job)
        answer = job.hang()
        # It may yet come: nothing in the evidence tells never from not yet.
        assert answer.verdict == (1, "missing", "conditional", [2])
        assert "all_reduce (call 4 on default_pg)" in answer.say
        # For a moment it may wait for the interpreter lock.
        job.until(lambda: any("its main thread runs" in line for line in job.hang().told["chain"]))


def test_a_rank_that_died(tmp_path: Path) -> None:
    with Job(tmp_path, "died") as job:
        job.until(lambda: job.waits(0, Kind.HOST_WAIT_ENTER))
        job.kill(1)
        for answer in (job.hang(), job.hang(pids=False)):
            assert answer.verdict == (1, "exception", "conditional", [1])
            assert "key of the store" in answer.say
            assert "rank 1, which left by being killed" in answer.say
            assert any("is gone and has not said why" in line for line in answer.told["unknown"])


def test_a_rank_that_died_and_whose_peer_gave_up(tmp_path: Path) -> None:
    """Everybody has ended: the record is all that is left. The exception of rank 0 is a consequence."""
    with Job(tmp_path, "died_in_a_call") as job:
        job.until(lambda: job.waits(0))
        job.kill(1)
        job.until(lambda: not runs(job.pids[0]))
        answer = job.hang(pids=False)
        assert answer.verdict == (1, "exception", "certain", [1])
        assert any("rank 0: left because of another one: RuntimeError" in line for line in answer.told["unknown"])


@SPY
def test_a_rank_that_reads_a_file(tmp_path: Path) -> None:
    with Job(tmp_path, "reads", 3) as job:
        first(job)
        job.until(lambda: job.stands(2, "pipe", "partner"))
        answer = job.hang()
        assert answer.verdict == (1, "outside", "conditional", [2])
        assert "in a read of a pipe at" in answer.say
        assert "stuck_program.py:89 in reads" in answer.say


def test_a_rank_that_returns_early_and_ends(tmp_path: Path) -> None:
    with Job(tmp_path, "returns") as job:
        job.until(lambda: not runs(job.pids[1]) and not runs(job.pids[0]))
        answer = job.hang(pids=False)
        assert answer.verdict == (1, "missing", "certain", [1])
        assert "which has left" in answer.say


def test_a_rank_that_returns_early_and_lives(tmp_path: Path) -> None:
    with Job(tmp_path, "returns_alive") as job:
        first(job)
        job.until(lambda: job.stands(1, "nanosleep"))
        answer = job.hang()
        assert answer.code == 1
        assert answer.told["class"] in ("missing", "outside")
        # A sleep ends by itself: only if it does not come then.
        assert (answer.told["certainty"], answer.told["ranks"]) == ("conditional", [1])
        assert "its wait ends by the clock, in " in answer.say
        assert any("it decided last: skips the step: no tokens" in line for line in answer.told["chain"])


@pytest.mark.parametrize("scene", ["other_operation", "other_size"])
def test_calls_that_differ(tmp_path: Path, scene: str) -> None:
    with Job(tmp_path, scene) as job:
        if scene == "other_operation":
            both(job)
        else:  # gloo throws, and both processes end
            job.until(lambda: not any(map(runs, job.pids)))
        answer = job.hang(pids=scene == "other_operation")
        assert answer.verdict == (1, "mismatch", "certain", [])
        sides = ("all_gather", "broadcast") if scene == "other_operation" else ("[4] Float", "[8] Float")
        assert all(side in answer.say for side in sides)


def test_a_rank_that_holds_the_interpreter_lock(tmp_path: Path) -> None:
    with Job(tmp_path, "holds_gil") as job:
        first(job)
        job.until(lambda: job.stands(1, "nanosleep"))
        ring = job.ring(1)
        assert ring is not None

        def silent() -> bool:
            """Whether its own thread has not come to run, as it would four times a second."""
            beat = getattr(job.ring(1), "beat_ns", None)
            return beat is not None and time.monotonic_ns() - beat > 3.2e9

        job.until(silent)
        answer = job.hang()
        assert answer.verdict == (1, "outside", "conditional", [1])
        assert "interpreter lock" in answer.say
        assert any("no Python has run in its process" in line for line in answer.told["chain"])


def futex(job: Job, *ranks: int) -> None:
    """Their main threads wait for another thread, or in a call of gloo, and have for longer than the patience."""
    for rank in ranks:
        job.until(lambda rank=rank: job.stands(rank, "futex") and job._idle(rank))  # type: ignore[misc]


def test_main_threads_that_wait_for_helpers_of_each_other_are_no_cycle(tmp_path: Path) -> None:
    """Calls of different threads have no order: a helper that has called nothing yet is in no record."""
    with Job(tmp_path, "crosses_a_helper") as job:
        both(job)
        for answer in (job.hang(pids=False), job.hang()):
            assert (answer.code, answer.told["ranks"]) == (3, [])
            assert "a thread that waits for the clock, in " in answer.say
            assert "the call that is missing" in answer.say


def test_threads_that_wait_for_each_other_by_a_lock_are_a_cycle(tmp_path: Path) -> None:
    """Every thread of both processes is blocked, though only one of each is in a call."""
    with Job(tmp_path, "crosses_under_a_lock") as job:
        futex(job, 0, 1)
        job.still(0, 1)
        for answer in (job.hang(pids=False), job.hang()):
            assert answer.verdict == (1, "cycle", "certain", [0, 1])
            assert "(thread Thread-1 (call)) waits" in answer.say


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("tcp", "a file or a socket (recvfrom)"),
        ("signal", "a signal (rt_sigtimedwait)"),
        ("lock", "a lock on a file (flock)"),
        ("named", "the clock, in "),
    ],
)
def test_a_rank_whose_helper_waits_for_another_process_may_come(tmp_path: Path, kind: str, said: str) -> None:
    """As `serves_with_a_pool`, but that what the helper waits for may come."""
    with Job(tmp_path, f"serves_{kind}") as job:
        first(job)
        futex(job, 1)
        answer = job.hang()
        assert answer.verdict == (1, "missing", "conditional", [1])
        assert f"it has a thread that waits for {said}" in answer.say


def test_a_request_may_bring_the_call_that_a_ring_lacks(tmp_path: Path) -> None:
    with Job(tmp_path, "crosses_a_request") as job:
        futex(job, 0, 1)
        job.still(0, 1)
        for answer in (job.hang(pids=False), job.hang()):
            assert (answer.code, answer.told["class"], answer.told["ranks"]) == (3, "cycle", [])
            assert any("a thread that waits for a file or a socket (recvfrom)" in line for line in answer.told["chain"])


@SPY
def test_a_crossing_through_futures_is_seen_in_stacks(tmp_path: Path) -> None:
    with Job(tmp_path, "crosses_by_futures") as job:
        futex(job, 0, 1)
        answer = job.hang()
        assert answer.verdict == (1, "cycle", "certain", [0, 1])


def test_groups_that_are_created_with_other_members(tmp_path: Path) -> None:
    with Job(tmp_path, "makes_other_members", 3) as job:
        both(job)
        job.still(0, 1, 2)
        for answer in (job.hang(pids=False), job.hang()):
            assert answer.verdict == (1, "mismatch", "certain", [0])
            assert any("in makes_other_members" in line for line in answer.told["chain"])
            assert "new_group" in answer.told["fix"]


def test_groups_that_are_created_in_another_order(tmp_path: Path) -> None:
    with Job(tmp_path, "makes_another_order", 3) as job:
        both(job)
        job.still(0, 1, 2)
        answer = job.hang(pids=False)
        assert answer.verdict == (1, "mismatch", "certain", [1])
        assert any("in makes_another_order" in line for line in answer.told["chain"])


def test_tags_that_differ(tmp_path: Path) -> None:
    with Job(tmp_path, "tags_differ") as job:
        both(job)
        answer = job.hang()
        assert answer.verdict == (1, "mismatch", "certain", [])
        assert "rank 0 sends with tag 1" in answer.say
        assert "rank 1 receives with tag 2" in answer.say


def test_who_died_comes_before_who_stays_away_for_that(tmp_path: Path) -> None:
    with Job(tmp_path, "dies_beside", 3) as job:
        job.until(lambda: job.waits(0))
        job.until(lambda: job.waits(2))
        job.kill(1)
        job.until(lambda: job.stands(2, "nanosleep"))
        job.still(2)
        answer = job.hang(pids=False)
        assert answer.verdict == (1, "exception", "conditional", [1])
        assert "failed on rank 2" in answer.say


def test_a_job_that_waits_for_work_is_not_stuck(tmp_path: Path) -> None:
    with Job(tmp_path, "ends") as job:
        for rank in (0, 1):
            job.until(lambda rank=rank: job.stands(rank, "nanosleep"))  # type: ignore[misc]
        answer = job.hang()
        assert answer.code in (0, 3)
        assert answer.told["ranks"] == []


# -- from stacks alone -------------------------------------------------------------------------------------------------


@SPY
def test_stacks_of_a_rank_that_reads_a_file(tmp_path: Path) -> None:
    with Job(tmp_path, "reads", 3, recorded=False) as job:
        first(job)
        job.until(lambda: job.stands(2, "pipe", "partner"))
        answer = job.hang()
        assert answer.verdict == (1, "outside", "conditional", [2])
        assert "a read of a pipe" in answer.say
        assert "Ranks 0 and 1 wait in all_reduce" in answer.say


@SPY
@pytest.mark.parametrize("recorded", [True, False])
def test_a_rank_that_enters_a_lock(tmp_path: Path, recorded: bool) -> None:
    with Job(tmp_path, "enters_a_lock", recorded=recorded) as job:
        if recorded:
            first(job)
        futex(job, 1)
        answer = job.hang()
        assert answer.verdict == (1, "missing", "certain" if recorded else "conditional", [1])
        assert "in a lock, guard at" in answer.say


@SPY
def test_stacks_of_a_rank_that_holds_the_interpreter_lock(tmp_path: Path) -> None:
    with Job(tmp_path, "holds_gil", recorded=False) as job:
        first(job)
        job.until(lambda: job.stands(1, "nanosleep"))
        answer = job.hang()
        assert answer.verdict == (1, "outside", "conditional", [1])
        assert "with the interpreter lock held" in answer.say


@SPY
def test_stacks_beside_a_rank_that_died(tmp_path: Path) -> None:
    with Job(tmp_path, "died", recorded=False) as job:
        job.kill(1)
        job.until(lambda: job.stands(0, "nanosleep", "poll", "recv", "futex", "wait"))
        answer = job.hang()
        assert answer.verdict == (1, "missing", "conditional", [1])
        assert any("gone, taken for rank 1" in line for line in answer.told["unknown"])


@SPY
@pytest.mark.parametrize(
    ("scene", "size", "said"),
    [
        ("crossing", 2, "ranks 0 and 1 stand in all_reduce"),
        ("other_operation", 2, "rank 0 stands in all_gather"),
        ("pairs", 2, "ranks 0 and 1 stand in recv"),
        ("missing", 3, "rank 2 stands at"),
    ],
)
def test_stacks_that_do_not_suffice(tmp_path: Path, scene: str, size: int, said: str) -> None:
    with Job(tmp_path, scene, size, recorded=False) as job:
        (both if scene != "missing" else first)(job)
        answer = job.hang()
        assert (answer.code, answer.told["ranks"]) == (3, [])
        assert said in answer.say
        assert "turnstile.record.install" in answer.say


@SPY
def test_stacks_of_a_job_that_waits_for_work(tmp_path: Path) -> None:
    with Job(tmp_path, "ends", recorded=False) as job:
        for rank in (0, 1):
            job.until(lambda rank=rank: job.stands(rank, "nanosleep"))  # type: ignore[misc]
        answer = job.hang()
        assert (answer.code, answer.told["ranks"]) == (3, [])
