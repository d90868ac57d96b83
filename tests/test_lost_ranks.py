"""A rank that is stopped, killed or crashes, in every phase: the others end, and are told which one, and doing what."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import HangFound, RankLost, UsageError
from kernel.request import SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine
from rollout.ranks import last_words
from rollout.ranks.launcher import Launcher
from rollout.ranks.pulse import Pulse
from rollout.stall import Stall, Stalled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.ranks.nursery import Child, Nursery

TIMEOUT_S = 6.0
"""For a rank to answer: of the tests, not the default. Nothing here asserts how long anything took."""
WORLD = World(2, 2, 2)
VICTIM = 1
PHASES = {
    "idle": r" while it waited for work$",
    "D": r" with D \d+ in flight",
    "P": r" with P e\d+ \[\d+,\d+\)",
    "exchange": r", in exchange \d+ \((post-d|pre-d|end)\)$",
}
HOW = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL, "crashed": signal.SIGSEGV}
POLICIES = """
    import asyncio
    import os
    import time

    from kernel.sched.fine import Fine
    from kernel.sched.policy import Guarantees

    class Keeps(Fine):
        \"\"\"Never releases P.\"\"\"

        guarantees = Guarantees(deadlock_free=False)

        async def turn(self, gate):
            if not gate.p_active:
                return await super().turn(gate)
            await gate.reached()
            await gate.rendezvous("pre-d")
            if gate.d_ready:
                gate.launch_decode()
            await gate.rendezvous("post-d")

    class Foreign(Fine):
        \"\"\"Awaits what nobody sets.\"\"\"

        async def turn(self, gate):
            if gate.plan.round >= 20:
                await asyncio.Event().wait()
            await super().turn(gate)

    class OneAwaits(Fine):
        \"\"\"Rank 1 alone awaits it.\"\"\"

        async def turn(self, gate):
            if gate.plan.round >= 20 and gate._rank.rank == 1:
                await asyncio.Event().wait()
            await super().turn(gate)

    class Admits(Fine):
        \"\"\"Never admits a request.\"\"\"

        def prefill_now(self, now):
            return False

    class Blocks(Fine):
        \"\"\"Rank 1 blocks its loop.\"\"\"

        async def turn(self, gate):
            if gate.plan.round >= 20 and gate._rank.rank == 1:
                time.sleep(3600)
            await super().turn(gate)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path)
    (path / "policies.py").write_text(textwrap.dedent(POLICIES))
    return path


def state(pid: int) -> str:
    """As /proc has it, "" for a process that is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def memory_files() -> set[str]:
    """Shared memory of worlds that this process holds."""
    gc.collect()
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "memfd:turnstile" in os.readlink(link):
                found.add(str(link.stat().st_ino))
    return found


async def until(true: Any, timeout_s: float = 60.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)
    return found


async def stop_in(pid: int, record: str, phase: str) -> str:
    """Stop the process at a moment when its record shows it in the phase; the clause that says so."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: state(pid) == "T")
        clause = last_words.of(record, VICTIM)
        if re.search(PHASES[phase], clause):
            return clause
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.003)
    raise AssertionError(f"it was never in {phase}: {clause!r}")


async def work(engine: Engine) -> None:
    """More of everything than the test lasts."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True)

    async def one(number: int) -> None:
        while True:
            session = engine.session()
            await session.generate([3 + number] * 60, params if number < 2 else SamplingParams(max_tokens=2))
            await session.close()

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(one(number))


def ranks_of(engine: Engine) -> list[int]:
    """Process numbers."""
    assert isinstance(engine._launcher, Launcher)
    return [each.process.pid for each in engine._launcher._ranks]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("phase", PHASES)
async def test_the_others_end_and_the_lost_rank_and_its_phase_are_named(
    phase: str, how: str, checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    before = memory_files()
    pids: list[int] = []
    clause = ""
    engine = Engine(checkpoint, WORLD, out=tmp_path, nursery=nursery, rank_timeout_s=TIMEOUT_S, prefill_tokens=32)

    async def lose() -> None:
        nonlocal clause
        async with engine:
            pids.extend(ranks_of(engine))
            busy = asyncio.create_task(work(engine)) if phase != "idle" else None
            clause = await stop_in(pids[VICTIM], str(tmp_path), phase)
            if how != "stopped":
                os.kill(pids[VICTIM], HOW[how])
                with suppress(ProcessLookupError):  # gone, and reaped, already
                    os.kill(pids[VICTIM], signal.SIGCONT)
            await until(lambda: engine._error)
            if busy is not None:
                with pytest.raises(ExceptionGroup) as group:
                    await busy
                assert all(each is engine._error for each in group.value.exceptions)

    with pytest.raises(RankLost) as caught:
        await lose()
    said = str(caught.value)
    end = {
        "stopped": f"rank {VICTIM}, stopped by SIGSTOP or a debugger, has not answered for {TIMEOUT_S:g} s",
        "killed": f"rank {VICTIM} was killed by signal 9",
        "crashed": f"rank {VICTIM} was killed by signal 11",
    }[how]
    assert said == end + clause
    assert not any(state(pid) for pid in pids), "no process is left"
    assert memory_files() == before, "and no shared memory"


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
async def test_a_rank_is_lost_while_it_starts(
    how: str, checkpoint: Path, tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pids = memory_files(), []
    spawn = nursery.spawn

    async def stopped(fds: Sequence[int]) -> Child:
        child = await spawn(fds)  # it has not been told yet what to start
        pids.append(child.pid)
        if len(pids) == VICTIM + 1:
            os.kill(child.pid, signal.SIGSTOP)
        return child

    monkeypatch.setattr(nursery, "spawn", stopped)
    engine = Engine(checkpoint, WORLD, out=tmp_path, nursery=nursery, rank_timeout_s=TIMEOUT_S)
    opening = asyncio.create_task(engine.__aenter__())
    await until(lambda: len(pids) == WORLD.size and state(pids[VICTIM]) == "T")
    assert not opening.done()
    if how != "stopped":
        os.kill(pids[VICTIM], HOW[how])
        with suppress(ProcessLookupError):
            os.kill(pids[VICTIM], signal.SIGCONT)
    with pytest.raises(RankLost, match=rf"^rank {VICTIM}\b.* while it started$"):
        await opening
    assert not any(state(pid) for pid in pids)
    assert memory_files() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "cls", "ranks", "say"),
    [
        ("Keeps", "starvation", [], r"All ranks go from round to round \(now \d+\), and nothing comes of it"),
        ("Foreign", "outside", [], r"All ranks wait at \S+policies\.py:28 in turn, and none of them for another"),
        ("Admits", "starvation", [], "All ranks wait for work while turns are waiting: the plan admits none of them"),
        ("OneAwaits", "missing", [1], "for rank 1, which has not called it"),
        ("Blocks", "missing", [1], "for rank 1, which has not called it"),
    ],
)
async def test_a_run_without_progress_is_reported(
    policy: str, cls: str, ranks: list[int], say: str, checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    spec = f"{checkpoint / 'policies.py'}:{policy}"

    async def stall() -> None:
        async with Engine(
            checkpoint, WORLD, policy=spec, out=tmp_path, nursery=nursery, stall_timeout_s=6, rank_timeout_s=0
        ) as engine:
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            await asyncio.gather(*(engine.generate([3 + n] * 60, params) for n in range(3)))

    with pytest.raises(Stalled) as caught:
        await stall()
    error = caught.value
    head = rf"no progress for 6 s under {re.escape(spec)}, with [123] turns? in flight"
    assert re.fullmatch(rf"{head}: the run was ended", str(error))
    assert isinstance(error, HangFound)
    lines = error.report.splitlines()
    assert re.fullmatch(rf"stalled   {head}", lines[0])
    for rank in range(2):
        at = next(n for n, line in enumerate(lines) if line.startswith(f"rank {rank}    "))
        events = [line for line in lines[at + 1 : at + 9] if re.match(r" +\d+\.\d{3} s ago  round \d+  \w+", line)]
        assert len(events) == 6
    if policy == "OneAwaits":
        assert any(re.match(r" +waits at \S+policies\.py:36 in turn", line) for line in lines)
    assert sum(line.startswith("verdict ") for line in lines) == 1
    assert error.diagnosis is not None
    assert (error.diagnosis["class"], error.diagnosis["ranks"]) == (cls, ranks)
    assert re.search(say, error.diagnosis["say"])


@pytest.mark.slow
async def test_nothing_stalls_while_it_is_paused_idle_or_slow(
    checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    # Of a busy machine a rank may have to wait a second for its turn.
    async with Engine(checkpoint, WORLD, nursery=nursery, stall_timeout_s=4, rank_timeout_s=0) as engine:
        await engine.generate([3, 4], SamplingParams(max_tokens=3))
        await asyncio.sleep(5)  # nothing to do
        turn = engine.session().generate([3, 4], SamplingParams(max_tokens=1500, ignore_eos=True))
        await anext(aiter(turn))
        await engine.pause()
        await asyncio.sleep(5)
        assert not turn.ended
        await engine.resume()
        assert len((await turn).tokens) == 1500


async def test_a_stopped_rank_is_no_loss_where_none_is_asked_for(checkpoint: Path, nursery: Nursery) -> None:
    async with Engine(checkpoint, WORLD, nursery=nursery, rank_timeout_s=0, stall_timeout_s=0) as engine:
        pid = ranks_of(engine)[VICTIM]
        os.kill(pid, signal.SIGSTOP)
        try:
            turn = asyncio.create_task(engine.generate([3, 4], SamplingParams(max_tokens=3, ignore_eos=True)))
            await asyncio.sleep(0.7)
            assert not turn.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert len((await turn).tokens) == 3


@pytest.mark.parametrize("setting", ["rank_timeout_s", "stall_timeout_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_timeouts_that_are_none_are_refused(setting: str, value: float, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=f"{setting}=.*: must be a number of seconds, 0 for never"):
        Engine(checkpoint, WORLD, **{setting: value})  # type: ignore[arg-type]


# -- in virtual time --------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rank_is_late_once_and_at_the_timeout() -> None:
    clock = Clock()
    pulse = Pulse(10.0, clock)
    for rank in range(3):
        pulse.expect(rank)
    told: list[tuple[float, list[int]]] = []
    while clock.now < 60:
        clock.now += pulse.every_s
        if clock.now <= 20 or clock.now == 30:
            pulse.hear(1, {"beat": 1, "at": ""})
        if clock.now == 50:
            pulse.hear(1, {"beat": 1, "at": ""})  # one that is lost stays so
        assert pulse.hear(0, {"beat": 2, "at": " with D 3 in flight"})
        if clock.now == 25:
            pulse.forget(2)
        if late := pulse.late():
            told.append((clock.now, late))
    assert told == [(10.0, [2]), (40.0, [1])]
    assert pulse.at[0] == " with D 3 in flight"
    assert pulse.moved[0] == 2


def test_ranks_that_fell_silent_together_are_told_together() -> None:
    clock = Clock()
    pulse = Pulse(10.0, clock)
    for rank in range(4):
        pulse.expect(rank)
    told = []
    while clock.now < 20:
        clock.now += pulse.every_s
        for rank, last_s in enumerate((99, 5, 6, 9)):
            if clock.now <= last_s:
                pulse.hear(rank, {"beat": 0, "at": ""})
        if late := pulse.late():
            told.append((clock.now, late))
    assert told == [(15.0, [1, 2]), (19.0, [3])]


def test_nobody_is_late_because_the_launcher_slept() -> None:
    clock = Clock()
    pulse = Pulse(10.0, clock)
    pulse.expect(0)
    for _ in range(5):
        clock.now += pulse.every_s
        assert not pulse.late()
    clock.now += 1000
    assert not pulse.late()
    for _ in range(9):
        clock.now += pulse.every_s
        assert not pulse.late()
    clock.now += pulse.every_s
    assert pulse.late() == [0]


def test_a_rank_that_said_that_it_is_away_has_longer() -> None:
    clock = Clock()
    pulse = Pulse(1.0, clock)
    pulse.expect(0)
    pulse.hear(0, {"beat": 0, "at": "", "away": "loading weights"})
    for _ in range(1000):
        clock.now += pulse.every_s
        assert not pulse.late()
    pulse.hear(0, {"beat": 0, "at": ""})
    told = []
    for _ in range(10):
        clock.now += pulse.every_s
        told += pulse.late()
    assert told == [0]


def test_progress_is_due_only_while_it_is_owed() -> None:
    clock = Clock()
    stall = Stall(8.0, clock)
    script = [(0, True), (0, True), (1, True), (1, False), (1, True), (1, True), (1, True), (1, True), (1, True)]
    found = []
    for progress, owed in script:
        clock.now += 2.0
        found.append(stall.look(progress, owed))
    assert found == [False] * 7 + [True, True]
    clock.now += 100  # the launcher itself was stopped
    assert not stall.look(1, True)
    assert not Stall(0.0, clock).look(1, True)
