"""Real stuck ranks on shared memory, looked at from outside: by their record, by pid, and after a death."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import RankLost, UsageError
from kernel.journal import Journal, groups
from kernel.program import Program
from kernel.record import Kind, Recorder, read, read_run, ring_path
from kernel.request import Phase
from kernel.topology import Role, World
from tests.commands import until
from tests.installed_rings import Rank as InstalledRank
from tests.ranks import Me, Ranks
from verify.attach import attach, environment, program, rank_of, ring_paths
from verify.blame import Certainty, Class
from verify.events import Site
from verify.hang.diagnosis import diagnose_found
from verify.hang.stacks import At, places
from verify.hang.text import as_text
from verify.readers.found import Found, Stack
from verify.readers.record import RecordReader
from verify.waitgraph import diagnose_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.blame import Verdict

WORLD = World(2)


class Rank:
    """A rank's device, rendezvous and journal, as the engine has them."""

    def __init__(self, me: Me, out: str) -> None:
        import torch

        from kernel.comm.rendezvous import SharedRendezvous
        from kernel.comm.shm_collectives import SharedCollectives
        from kernel.device.cpu import CpuDevice

        programs = [Program(WORLD, phase, 2) for phase in Phase]
        self.journal = Journal(
            Recorder(ring_path(out, me.rank), rank=me.rank, groups=groups(programs, me.rank), meta={"size": 2})
        )
        shared = {phase: SharedCollectives(me.arena, phase, me.rank) for phase in Phase}
        self.device = CpuDevice(me.rank, shared, watch=self.journal.device)
        self.meeting = SharedRendezvous(me.arena, me.rank)
        self.rows = torch.ones(4)

    def submit(self, label: str, phase: Phase, count: int = 1, between: Callable[[], Any] = lambda: None) -> Any:
        """All-reduces of a phase, with code before the last one."""
        calls = [call for call in Program(WORLD, phase, 2).calls if call.role is Role.TP][:count]
        self.journal.submitted(label, phase, calls, 0, 1, 4)
        collectives = self.device.collectives(phase)

        def work() -> None:
            for number, call in enumerate(calls):
                if number == count - 1:
                    between()
                self.journal.collective(phase, call, 4, finished=False)
                collectives.all_reduce(Role.TP, self.rows)
                self.journal.collective(phase, call, 4, finished=True)

        return self.device.stream(phase).submit(work, label)

    async def wait(self, label: str, event: Any) -> None:
        self.journal.wait(label, leaves=False)
        await event.wait()
        self.journal.wait(label, leaves=True)

    async def exchange(self, tag: str) -> None:
        self.journal.exchange(tag, leaves=False)
        await self.meeting.exchange(tag, b"")
        self.journal.exchange(tag, leaves=True)


async def healthy(rank: Rank, me: Me, fifo: str) -> None:
    await rank.exchange("views")
    for number in range(3):
        await rank.wait(f"D {number}", rank.submit(f"D {number}", Phase.D, 2))
        await rank.exchange("end")


async def missing(rank: Rank, me: Me, fifo: str) -> None:
    """Rank 1 leaves out the second round and goes back to its inbox."""
    await healthy(rank, me, fifo)
    if me.rank == 0:
        await rank.wait("D 3", rank.submit("D 3", Phase.D, 2))
    rank.journal.wait("inbox", leaves=False)
    await asyncio.Event().wait()


async def cycle(rank: Rank, me: Me, fifo: str) -> None:
    """Rank 0 waits for its device before the rendezvous, rank 1 enqueues only after it."""
    await healthy(rank, me, fifo)
    if me.rank == 0:
        await rank.wait("D 3", rank.submit("D 3", Phase.D))
        await rank.exchange("pre-d")
    else:
        await rank.exchange("pre-d")
        await rank.wait("D 3", rank.submit("D 3", Phase.D))


async def outside(rank: Rank, me: Me, fifo: str) -> None:
    """Rank 1's model code reads a pipe that nobody writes, between two collectives of P."""

    def stall() -> None:
        if me.rank == 1:
            with open(fifo) as file:
                file.read()

    await healthy(rank, me, fifo)
    await rank.wait("P device", rank.submit("P e0 [0,2)", Phase.P, 2, stall))


async def scene(me: Me, which: str, out: str, fifo: str) -> None:
    rank = Rank(me, out)
    try:
        await globals()[which](rank, me, fifo)
    except RankLost as error:
        rank.journal.exception(error)
        raise
    finally:
        await rank.device.close()
        rank.journal.close()


def stuck_at(out: Path, kind: Kind, text: str, rank: int) -> bool:
    """Whether a rank's newest event of a kind has a text that begins so."""
    try:
        events = [event for event in read(ring_path(out, rank)).events if event.kind is kind]
    except UsageError:
        return False
    return bool(events) and (events[-1].text or events[-1].site).startswith(text)


class Scene:
    """Ranks in the middle of a scene; killed at the end."""

    def __init__(self, tmp_path: Path, which: str, *marks: tuple[Kind, str, int]) -> None:
        self.out, self.fifo = tmp_path / "run", tmp_path / "fifo"
        os.mkfifo(self.fifo)
        self.ranks = Ranks(WORLD, uvloop=False)
        try:
            self.ranks.start(scene, which, str(self.out), str(self.fifo))
            end = time.monotonic() + 240
            while not all(stuck_at(self.out, *mark) for mark in marks):
                assert time.monotonic() < end, "the ranks did not get there"
                time.sleep(0.02)
            # The last mark may be written a moment before the rank stands still: its device has work to begin.
            until(self.still)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.ranks.processes]

    def still(self) -> bool:
        """Whether no rank has recorded anything for a second."""
        newest = (ring.events[-1].time_ns for ring in read_run(self.out).values() if ring.events)
        return time.monotonic_ns() - max(newest, default=0) > 10**9

    def found(self, patience_s: float = 0.0) -> Found:
        return RecordReader(patience_s).read(self.out)

    def close(self) -> None:
        for process in self.ranks.processes:
            process.kill()
        self.ranks.close()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def verdict(found: Found) -> Verdict:
    return diagnose_events(found.events, found.expected)


def test_a_missing_rank(tmp_path: Path) -> None:
    marks = (Kind.HOST_WAIT_ENTER, "D 3", 0), (Kind.START, "AR", 0), (Kind.HOST_WAIT_ENTER, "inbox", 1)
    with Scene(tmp_path, "missing", *marks) as stuck:
        found = stuck.found()
        told = verdict(found)
        assert (told.cls, told.ranks) == (Class.MISSING, (1,))
        assert any("waits for something to do" in line for line in found.unknown)
        # The same from outside, by pid, with rank and size from the ring.
        attached = attach(stuck.pids, patience_s=0.0, spy=None)
        assert verdict(attached) == told
        assert (attached.present, attached.expected) == ({0, 1}, {0, 1})
        assert {stack.pid for stack in attached.stacks} == set(stuck.pids)
        assert {stack.rank for stack in attached.stacks} == {0, 1}
        # Looking has stopped nobody.
        assert all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "SRD" for pid in stuck.pids)


def test_a_cycle_of_device_and_rendezvous(tmp_path: Path) -> None:
    with Scene(tmp_path, "cycle", (Kind.HOST_WAIT_ENTER, "D 3", 0), (Kind.EXCHANGE_ENTER, "pre-d", 1)) as stuck:
        told = verdict(stuck.found())
        assert (told.cls, told.ranks) == (Class.CYCLE, (0, 1))
        assert "rendezvous" in told.say


def test_code_that_reads_a_file_between_collectives(tmp_path: Path) -> None:
    marks = (Kind.HOST_WAIT_ENTER, "P device", 0), (Kind.HOST_WAIT_ENTER, "P device", 1), (Kind.FINISH, "AR", 1)
    with Scene(tmp_path, "outside", *marks) as stuck:
        told = verdict(stuck.found())
        assert (told.cls, told.ranks) == (Class.OUTSIDE, (1,))
        assert "P e0 [0,2)" in told.say


def test_a_rank_that_was_killed(tmp_path: Path) -> None:
    with Scene(tmp_path, "cycle", (Kind.HOST_WAIT_ENTER, "D 3", 0), (Kind.EXCHANGE_ENTER, "pre-d", 1)) as stuck:
        stuck.ranks.kill(1)
        stuck.ranks.processes[1].wait()
        found = stuck.found()
        assert any(f"process {stuck.pids[1]} is gone" in line for line in found.unknown)
        told = verdict(found)
        assert (told.cls, told.ranks) == (Class.MISSING, (1,))


def test_a_run_that_ended_well(tmp_path: Path) -> None:
    with Ranks(WORLD, uvloop=False) as ranks:
        ranks.run(scene, "healthy", str(tmp_path), "")
        found = RecordReader().read(tmp_path)
    assert verdict(found).cls is Class.NONE
    assert found.unknown == ()


def test_a_run_whose_rank_was_lost_blames_that_rank(tmp_path: Path) -> None:
    """Everybody else raises RankLost, which is a consequence."""
    with Scene(tmp_path, "cycle", (Kind.HOST_WAIT_ENTER, "D 3", 0), (Kind.EXCHANGE_ENTER, "pre-d", 1)) as stuck:
        stuck.ranks.kill(1)
        outcomes = stuck.ranks.finish(30)
        assert all(isinstance(outcome, RankLost) for outcome in outcomes)
        told = verdict(stuck.found())
        assert (told.cls, told.ranks) == (Class.MISSING, (1,))


# -- any process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger(tmp_path: Path) -> Any:
    """A process that is none of ours, with torchrun's environment."""
    code = "import sys, time; print('up', flush=True); time.sleep(600)"
    environment = {**os.environ, "RANK": "3", "WORLD_SIZE": "8"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_any_process_shows_its_threads(stranger: int) -> None:
    found = attach([stranger], spy=None)
    assert (found.present, found.expected) == (frozenset(), frozenset(range(8)))
    (stack,) = found.stacks
    assert (stack.rank, stack.thread, stack.pid) == (3, "MainThread", stranger)
    assert stack.frames[0].function
    assert any("install py-spy" in line for line in found.unknown)
    assert found.events == ()


def spy(tmp_path: Path, script: str) -> str:
    path = tmp_path / "spy"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(0o755)
    return str(path)


SAYS = """
import json, sys
assert sys.argv[1:4] == ["dump", "--nonblocking", "--json"]
frame = {"name": "step", "filename": "train.py", "line": 7}
print(json.dumps([{"pid": int(sys.argv[-1]), "thread_name": "MainThread", "owns_gil": True, "frames": [frame]}]))
"""


def test_lines_of_python_come_from_py_spy(stranger: int, tmp_path: Path) -> None:
    found = attach([stranger], spy=spy(tmp_path, SAYS))
    (stack,) = found.stacks
    assert (stack.rank, stack.holds_gil, str(stack.frames[-1])) == (3, True, "train.py:7 in step")
    # Where Linux keeps the thread comes below the frames of Python, which end at a call into C.
    assert all((frame.file, frame.line) == ("[kernel]", 0) for frame in stack.frames[:-1])
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('Error: Permission Denied: Try running again with sudo')", "may not read it"),
        ("print('[{]')", "damaged JSON"),
        ("print('[]')", "no thread"),
    ],
)
def test_a_py_spy_that_fails_leaves_what_linux_says(script: str, said: str, stranger: int, tmp_path: Path) -> None:
    found = attach([stranger], spy=spy(tmp_path, script))
    assert len(found.stacks) == 1
    assert found.stacks[0].frames[0].file == "[kernel]"
    assert any(said in line and "\n" not in line for line in found.unknown)


MISSES = """
import pathlib, sys
count = pathlib.Path(__file__).with_name("count")
said = count.read_text() if count.exists() else ""
count.write_text(said + "x")
if len(said) {when}:
    sys.exit("Error: Failed to get stack trace for thread 71")
""" + SAYS.replace("{", "{{").replace("}", "}}")


@pytest.mark.parametrize("when", ["< 3", "> 0"], ids=["at first", "at the second look"])
def test_a_py_spy_that_misses_is_asked_again(when: str, stranger: int, tmp_path: Path) -> None:
    found = attach([stranger], spy=spy(tmp_path, MISSES.format(when=when)))
    assert [str(stack.frames[-1]) for stack in found.stacks] == ["train.py:7 in step"]
    assert found.unknown == ()


def test_a_py_spy_that_never_reads_is_said_with_what_to_do(stranger: int, tmp_path: Path) -> None:
    found = attach([stranger], spy=spy(tmp_path, MISSES.format(when=">= 0")))
    (line,) = found.unknown
    assert line.startswith(f"pid {stranger}: no lines of Python: py-spy failed 4 times (Failed to get stack trace")
    assert line.endswith(f"or add the text of `py-spy dump --native --pid {stranger}`")
    assert len((tmp_path / "count").read_text()) == 8  # each look


def test_where_linux_keeps_a_thread_is_no_line_of_a_program() -> None:
    """Rank 1, of which no Python could be read, waits for a file while rank 0 is in a call."""
    call = Site("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce")
    stuck = Stack(1, "MainThread", (Site("[kernel]", 0, "pipe_read"),))
    waits = Stack(0, "MainThread", (call, Site("train.py", 7, "step")))
    found = diagnose_found(Found("stacks", expected=frozenset({0, 1}), stacks=(waits, stuck)))
    told = as_text(found)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.OUTSIDE, (1,))
    assert "a read of a pipe at a line that could not be read" in found.verdict.say
    assert "[kernel]" not in told
    assert ":0" not in told


@pytest.mark.skipif(program("py-spy") is None, reason="py-spy, of the extra `test`, is not installed")
def test_py_spy_itself(stranger: int) -> None:
    found = attach([stranger])
    assert found.stacks
    assert any("may not read it" in line for line in found.unknown) or found.stacks[0].frames[-1].line > 0


def test_pids_of_no_process(stranger: int) -> None:
    with pytest.raises(UsageError, match=r"^pid 999999999: no such process"):
        attach([999999999])
    assert rank_of(stranger) == 3
    assert environment(999999999) == {}
    assert ring_paths(stranger) == []


TWICE = """
import json, pathlib, sys
count = pathlib.Path(__file__).with_name("count")
line = {lines}[count.exists()]
count.touch()
frames = [{{"name": "step", "filename": __file__ + ".py", "line": line}}]
print(json.dumps([{{"pid": int(sys.argv[-1]), "thread_name": "MainThread", "owns_gil": False, "frames": frames}}]))
"""


@pytest.mark.parametrize(("lines", "at"), [([2, 2], At.OUTSIDE), ([1, 2], At.RUNNING)])
def test_a_sleep_keeps_a_thread_that_stands_in_it_twice(
    lines: list[int], at: At, stranger: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.attach.APART_S", 0.05)
    monkeypatch.setattr("verify.attach._switches", lambda _: ())  # the interpreter may still be on its way to the sleep
    tool = spy(tmp_path, TWICE.format(lines=lines))
    Path(f"{tool}.py").write_text("x = f()\ntime.sleep(0.1)\n")
    found = attach([stranger], spy=tool)
    assert [stack.awake for stack in found.stacks] == [at is At.RUNNING]
    place = places(found.stacks)[3]
    assert (place.at, place.site.line) == (at, 2)


def test_a_thread_that_linux_saw_run_is_not_blocked(
    stranger: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that sleeps is at the same line whenever one looks."""
    counts = iter([("switches: 1",), ("switches: 2",)])
    monkeypatch.setattr("verify.attach.APART_S", 0.05)
    monkeypatch.setattr("verify.attach._switches", lambda _: next(counts))
    found = attach([stranger], spy=spy(tmp_path, SAYS))
    assert [stack.awake for stack in found.stacks] == [True]


def test_a_record_that_moved_since_beats_the_stack(tmp_path: Path) -> None:
    """Rank 1 works with others at 10 Hz, and sleeps whenever one looks; rank 0 waits for it in a barrier."""
    out = tmp_path / "run"
    ranks = [InstalledRank(out, rank, ago_s=60.0 * (rank == 0)) for rank in (0, 1)]
    groups_ = [rank.group("world", 0, 1) for rank in ranks]
    ranks[0].wait(ranks[0].call(groups_[0]))
    ranks[1].text(Kind.DECISION, "a step of its own")
    found = RecordReader().read(out)
    sleeps = Stack(1, "MainThread", (Site("[kernel]", 0, "hrtimer_nanosleep"), Site("train.py", 9, "step")))
    told = diagnose_found(replace(found, stacks=(sleeps,)))
    assert (told.code, told.verdict.certainty, told.verdict.ranks) == (3, Certainty.UNDECIDED, ())
    assert "moved a moment ago" in told.verdict.say


def test_a_frame_of_torch_is_a_collective_that_the_record_does_not_show() -> None:
    def at(*frames: tuple[str, str]) -> At:
        stack = Stack(0, "MainThread", (*(Site(file, 9, name) for file, name in frames), Site("train.py", 7, "main")))
        return places([stack])[0].at

    torch = "/usr/lib/python3/site-packages/torch/"
    inside = (torch + "distributed/utils.py", "_verify_param_shape_across_processes")
    assert at(inside, (torch + "nn/parallel/distributed.py", "__init__")) is At.COLLECTIVE
    assert at((torch + "nn/parallel/distributed.py", "_ddp_init_helper")) is At.COLLECTIVE
    assert at((torch + "utils/data/dataloader.py", "_try_get_data")) is At.OUTSIDE
    assert at((torch + "distributed/checkpoint/filesystem.py", "_write_item")) is At.OUTSIDE
