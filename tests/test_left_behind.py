"""What a policy starts in its rank, and how: no process of it outlives the rank, and its line is told."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import PolicyError, RankLost
from kernel.request import SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine
from rollout.ranks import launcher, orphans
from rollout.ranks import nursery as nurseries
from rollout.ranks.nursery import Nursery
from tests.commands import until
from tests.test_faults_cli import gone, lines, rollout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and child subreapers")

SLEEP = "'sleep', '3600'"
STARTS = {
    "subprocess": f"child = subprocess.Popen([{SLEEP}]).pid",
    "a session": f"child = subprocess.Popen([{SLEEP}], start_new_session=True).pid",
    "posix_spawn": f"child = os.posix_spawn('/bin/sleep', [{SLEEP}], {{}})",
    "multiprocessing": "child = work(multiprocessing.get_context('spawn'))",
    "a daemon": "os.system(f'setsid sh -c \"sleep 3600 & echo \\\\$! > {HERE}/daemon; wait\" &'); child = daemon()",
    "ctypes": "child = ctypes.PyDLL(None).fork() or time.sleep(3600)",
    "splits": "child = os.fork() or time.sleep(3600)",
    "splits in a library": "child = work(multiprocessing.get_context('fork'))",
}
"""Each sets `child`, the process that it leaves."""
POLICY = """
    import asyncio, ctypes, multiprocessing, os, subprocess, time
    from pathlib import Path
    from kernel.sched.fine import Fine

    HERE = os.path.dirname(os.path.abspath(__file__))

    def daemon():
        while not (text := Path(HERE, 'daemon').read_text() if Path(HERE, 'daemon').exists() else ''):
            time.sleep(0.01)
        return int(text)

    def work(context):
        process = context.Process(target=time.sleep, args=(3600,))
        process.start()
        return process.pid

    class Starts(Fine):
        done = False

        async def turn(self, gate):
            if gate.plan.round >= 3 and gate._rank.rank == 0 and not self.done:
                self.done = True
                START
                with open(f'{HERE}/children', 'a') as file:
                    file.write(f'{child}\\n')
            if os.path.exists(f'{HERE}/slow'):
                await asyncio.sleep(0.1)
            await super().turn(gate)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The file of a policy that starts a process, which is gone afterwards also where the test fails."""
    file = tmp_path / "starts.py"
    file.write_text(textwrap.dedent(POLICY).replace("START", STARTS[request.param]))
    yield file
    for child in all_started(file):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def all_started(file: Path) -> list[int]:
    """A run has one for its warm-up."""
    with suppress(OSError):
        return [int(each) for each in (file.parent / "children").read_text().splitlines()]
    return []


def started(file: Path) -> int:
    """The newest, 0 for none."""
    return next(reversed(all_started(file)), 0)


def line(file: Path, text: str) -> int:
    return next(at for at, each in enumerate(file.read_text().splitlines(), 1) if text in each)


async def run(engine: Engine) -> int:
    async with engine:
        await engine.generate([3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))
        return len(engine._launcher._ranks)  # type: ignore[union-attr]


EXEC = ("subprocess", "a session", "posix_spawn")


@pytest.mark.parametrize("policy", [*EXEC, "multiprocessing", "a daemon", "ctypes"], indirect=True)
async def test_what_a_policy_started_is_ended_with_its_rank_and_told(
    policy: Path, request: pytest.FixtureRequest, checkpoint: Path, nursery: Nursery
) -> None:
    engine = Engine(checkpoint, World(2, 1, 1), policy=f"{policy}:Starts", nursery=nursery)
    await run(engine)
    assert gone(started(policy))
    kind = request.node.callspec.params["policy"]
    if kind in EXEC:
        (said,) = engine.left
        assert said == f"process {started(policy)} (sleep 3600), started at {policy}:{line(policy, 'child = ')} in turn"
    elif kind == "multiprocessing":
        assert any(re.match(rf"process {started(policy)} \(.*\), started at {policy}:\d+ in work", each)
                   for each in engine.left)  # fmt: skip
    else:
        assert any(each.startswith(f"process {started(policy)} (") for each in engine.left)


@pytest.mark.parametrize("policy", ["splits", "splits in a library"], indirect=True)
async def test_a_policy_that_splits_its_rank_is_stopped_with_its_line(
    policy: Path, checkpoint: Path, nursery: Nursery
) -> None:
    says = rf"failed: (Starts\.turn|work) at {policy}:\d+: RuntimeError: a policy must not call os\.fork\(\) in a rank"
    with pytest.raises(PolicyError, match=says):
        await run(Engine(checkpoint, World(2, 1, 1), policy=f"{policy}:Starts", nursery=nursery))
    assert not started(policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [each for each in STARTS if not each.startswith("splits")], indirect=True)
async def test_whatever_ends_a_rank_what_it_started_ends_too(
    policy: Path, checkpoint: Path, nursery: Nursery
) -> None:
    async def lose() -> None:
        async with Engine(checkpoint, World(2, 1, 1), policy=f"{policy}:Starts", nursery=nursery) as engine:
            turn = asyncio.create_task(
                engine.generate([3, 4, 5], SamplingParams(max_tokens=3000, ignore_eos=True))
            )
            await asyncio.to_thread(until, lambda: started(policy))
            os.kill(engine._launcher._ranks[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            await turn

    with pytest.raises(RankLost, match="rank 0 was killed by signal 9"):
        await lose()
    assert gone(started(policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["subprocess"], indirect=True)
async def test_what_is_left_goes_also_where_the_nursery_is_killed(
    policy: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((nurseries, "END_S"), (launcher, "_GRACE_S"), (launcher, "_TELL_S")):
        monkeypatch.setattr(module, name, 0.5)
    with Nursery() as own:

        async def lose() -> None:
            async with Engine(checkpoint, World(2, 1, 1), policy=f"{policy}:Starts", nursery=own) as engine:
                await engine.generate([3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))
                os.kill(own._process.pid, signal.SIGSTOP)
                os.kill(engine._launcher._ranks[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
                await engine.generate([3, 4, 5], SamplingParams(max_tokens=3000, ignore_eos=True))

        with pytest.raises(RankLost, match="rank 0 has ended"):
            await lose()
        assert not gone(started(policy))
    assert own._process.returncode == -signal.SIGKILL
    until(lambda: gone(started(policy)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["subprocess", "a daemon"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None])
def test_however_the_command_ends_nothing_that_a_policy_started_stays(
    number: signal.Signals | None, policy: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    if number is not None:
        (tmp_path / "slow").touch()
    with rollout(out, "--policy", f"{policy}:Starts") as running:
        until(lambda: started(policy) and lines(out) >= 1)
        if number is not None:
            running.send_signal(number)
        # Who holds its standard error would keep this waiting.
        _, stderr = running.communicate(timeout=120)
    assert running.returncode == {None: 0, signal.SIGKILL: -9}.get(number, 130)
    until(lambda: all(gone(pid) for pid in all_started(policy)))
    if number is None:
        says = r"turnstile: a policy left process \d+ \(.*sleep 3600.*: ended with its rank\n"
        assert re.fullmatch(says, stderr)
    elif number != signal.SIGKILL:
        assert re.fullmatch(r"turnstile: interrupted: .*\n", stderr)


FORKED = """
import asyncio, os, signal, sys, time
from kernel.request import SamplingParams
from kernel.topology import World
from rollout.engine import Engine

async def main():
    async with Engine(sys.argv[1], World(2, 2, 2)) as engine:
        await engine.session().generate([3, 4], SamplingParams(max_tokens=2))
        worker = os.fork()
        if not worker:
            time.sleep(3600)
        ranks = [each.process.pid for each in engine._launcher._ranks]
        print(worker, engine._launcher._own._process.pid, *ranks, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed_though_its_workers_live(checkpoint: Path) -> None:
    """What the launcher has forked, a pool of reward workers say, holds its ends of the ranks' sockets open."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKED, str(checkpoint)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        worker, *ranks = map(int, process.stdout.readline().split())
        assert process.wait() == -signal.SIGKILL
        try:
            assert not gone(worker)
            until(lambda: all(map(gone, ranks)))
        finally:
            os.kill(worker, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()


def test_a_process_and_what_comes_of_it_is_found_and_ended() -> None:
    shell = subprocess.Popen(["sh", "-c", "(sleep 3600 & sleep 3600 & wait) & wait"], start_new_session=True)
    try:
        until(lambda: len(orphans.below([shell.pid], orphans.processes())) == 3)
        seen = orphans.processes()
        found = orphans.below([shell.pid], seen)
        assert orphans.of_sessions([shell.pid], seen) == found
        assert {seen[pid].session for pid in found} == {shell.pid}
        orphans.end(lambda seen: orphans.below([shell.pid], seen))
        assert all(gone(pid) for pid in found)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_what_left_its_session_waits_for_the_last_rank() -> None:
    me, Seen = os.getpid(), orphans.Seen
    seen: dict[int, Any] = {
        11: Seen(me, 11, "S"),  # a rank that lives
        21: Seen(me, 10, "S"), 22: Seen(me, 11, "S"), 23: Seen(me, 23, "S"), 24: Seen(21, 24, "S"),
        30: Seen(1, 10, "S"),  # another one's
    }  # fmt: skip
    assert orphans.adopted({11}, {10}, seen) == {21, 24}
    del seen[11]
    assert orphans.adopted((), {11}, seen) == {21, 22, 23, 24}


