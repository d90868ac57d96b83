"""Faults that must stop a run at once, with one line that names rank, round and field; and unusable input."""

from __future__ import annotations

import asyncio
import textwrap
from typing import TYPE_CHECKING

import pytest

from kernel.errors import Divergence, OrderViolation, PolicyError, ProtocolError, RankLost, TurnstileError, UsageError
from kernel.request import SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine
from rollout.ranks import worker
from tests.commands import rollout
from tests.failing_policies import POLICIES
from verify.blame import Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.record import READER

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.ranks.nursery import Nursery

WORLD = World(2, 1, 1)

@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path)
    (path / "policies.py").write_text(textwrap.dedent(POLICIES))
    return path


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("LocalPlan", Divergence, r"differs in span at round \d+: rank 0: \d+, rank 1: \d+"),
        ("LocalMemory", Divergence, r"differs in memory at round \d+"),
        ("EarlyRelease", OrderViolation, r"rank \d round \d+ field order: D collective AR\[TP\]"),
        ("NoLaunch", ProtocolError, r"without launching the planned D iteration, round \d+ \(rank \d"),
        ("Twice", ProtocolError, r"a second D launch in one round, round \d+ \(rank \d"),
        ("Broken", PolicyError, r"policy broken failed: Broken\.turn at \S+policies\.py:\d+: ZeroDivisionError: in my"),
        ("NoSpan", PolicyError, r"failed: NoSpan\.span \(\S+policies\.py:\d+\) returned None: it must .* \(round \d"),
        ("SpanZero", PolicyError, r"failed: SpanZero\.span \(\S+:\d+\) returned 0: it must return a whole number"),
        ("NoPlan", PolicyError, r"failed: NoPlan\.plan \(\S+:\d+\) returned NoneType: it must be \(Plan, Memory"),
        ("PlanOfText", PolicyError, r"PlanOfText\.plan \(\S+:\d+\) returned a span of 'a': .* \(rank \d"),
        ("PlanOfRows", PolicyError, r"PlanOfRows\.plan \(\S+:\d+\) returned what cannot be carried out: TypeError: "),
        ("PlanOfBucket", PolicyError, r"PlanOfBucket\.plan \(\S+:\d+\) returned a bucket of 1000000000 rows for \d"),
        ("PlanOfRound", PolicyError, r"PlanOfRound\.plan \(\S+:\d+\) returned round \d+: it must be the round that"),
        ("Leaves", PolicyError, r"policy leaves failed: Leaves\.turn at \S+policies\.py:\d+: SystemExit: 0 \(rank \d"),
        ("LeavesLater", PolicyError, r"failed: LeavesLater\.turn\.<locals>\.leave at \S+:\d+: SystemExit: 0 \(rank \d"),
        ("LeavesPlan", PolicyError, r"failed: LeavesPlan\.decode_now at \S+:\d+: SystemExit: bye \(rank \d, round \d"),
        ("Interrupts", PolicyError, r"policy interrupts failed: Interrupts\.turn at \S+:\d+: KeyboardInterrupt \(rank"),
        ("Bases", PolicyError, r"policy bases failed: Bases\.turn at \S+policies\.py:\d+: Odd: hm \(rank \d"),
        ("Mutes", PolicyError, r"policy mutes failed: Mutes\.turn at \S+policies\.py:\d+: Mute \(rank \d"),
        ("MutesPlan", PolicyError, r"failed: MutesPlan\.decode_now at \S+policies\.py:\d+: Mute \(rank \d, round"),
        ("Halves", PolicyError, r"failed: Halves\.turn at \S+policies\.py:\d+: ValueError: half \\ud800z+\.\. \(rank"),
        ("BasesPlan", PolicyError, r"failed: BasesPlan\.decode_now at \S+policies\.py:\d+: Odd: plan \(rank \d, round"),
        ("InterruptsLater", PolicyError, r"InterruptsLater\.turn\.<locals>\.end at \S+:\d+: KeyboardInterrupt \(rank"),
        ("Drops", PolicyError, r"policy drops failed: fails at \S+policies\.py:\d+: ValueError: in my task \(rank \d"),
        ("Calls", PolicyError, r"policy calls failed: Calls\.failing at \S+:\d+: ValueError: in my callback \(rank \d"),
        ("Stops", PolicyError, r"failed: Stops\.turn \(\S+:\d+\): RuntimeError: Event loop stopped before .* \(rank"),
        ("CancelsAll", PolicyError, r"failed: CancelsAll\.turn \(\S+:\d+\) may have cancelled tasks .* \(rank \d"),
        ("Cancels", PolicyError, r"policy cancels failed: Cancels\.turn at \S+:\d+: CancelledError \(rank \d"),
        ("Plain", PolicyError, r"failed: Plain\.turn \(\S+policies\.py:\d+\): TypeError: .* 'await' expression"),
        ("Yields", PolicyError, r"failed: Yields\.turn \(\S+policies\.py:\d+\): TypeError: .* 'await' expression"),
        ("Releases", PolicyError, r"failed: Releases\.turn at \S+policies\.py:\d+: TypeError: '<' not supported"),
        ("Library", PolicyError, r"failed: Library\.turn at \S+policies\.py:\d+: JSONDecodeError: Expecting prop"),
        ("Dies", RankLost, r"rank \d was killed by signal 9"),
    ],
)
async def test_a_policy_that_breaks_the_rules_stops_the_run(
    policy: str, error: type[TurnstileError], text: str, checkpoint: Path, nursery: Nursery
) -> None:
    async def run() -> None:
        async with Engine(
            checkpoint, WORLD, policy=f"{checkpoint / 'policies.py'}:{policy}", nursery=nursery
        ) as engine:
            first, second = engine.session(), engine.session()
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            # Long enough to decode still when the other's prefill arrives, however slow this process is.
            async for _ in first.generate([3, 4, 5], SamplingParams(max_tokens=3000, ignore_eos=True)):
                await second.generate([6] * 40, params)

    with pytest.raises(error, match=text) as caught:
        await run()
    assert "\n" not in str(caught.value)


async def test_a_task_that_a_policy_holds_and_does_not_look_at_fails_when_its_time_is_over(
    checkpoint: Path, nursery: Nursery
) -> None:
    def spec(name: str) -> str:
        return f"{checkpoint / 'policies.py'}:{name}"

    params = SamplingParams(max_tokens=6, ignore_eos=True)
    says = r"policy holds failed: fails at \S+policies\.py:\d+: ValueError: in my task \(rank \d, round \d"
    with pytest.raises(PolicyError, match=says):
        async with Engine(checkpoint, WORLD, policy=spec("Holds"), nursery=nursery) as engine:
            assert len((await engine.generate([3, 4, 5], params)).tokens) == 6

    async def swap() -> None:
        async with Engine(checkpoint, WORLD, policy=spec("Holds"), nursery=nursery) as engine:
            await engine.generate([3, 4, 5], params)
            await engine.use_policy("fine")

    with pytest.raises(PolicyError, match=says):
        await swap()
    async with Engine(checkpoint, WORLD, policy=spec("LooksAfter"), nursery=nursery) as engine:
        assert len((await engine.generate([3, 4, 5], params)).tokens) == 6
        await engine.use_policy("fine")
        assert len((await engine.generate([3, 4, 5], params)).tokens) == 6


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["Drops", "Calls", "Holds"])
def test_what_a_policy_s_own_task_raises_is_one_line_of_the_command(
    policy: str, checkpoint: Path, tmp_path: Path
) -> None:
    small = ("--world", "2", "--adp", "1", "--ep", "1", "--fraction", "0.02", "--turns", "2", "--length-scale", "0.02")
    with rollout(tmp_path / "o", "--policy", f"{checkpoint / 'policies.py'}:{policy}", *small) as run:
        stdout, stderr = run.communicate(timeout=300)
    assert (run.returncode, stdout, stderr.count("\n")) == (1, "", 1), stderr
    assert "ValueError: in my " in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "line", "hook"),
    [("Spins", "pass", "turn"), ("Sleeps", "time.sleep", "turn"), ("SpinsInC", "sum(", "decode_now")],
)
async def test_a_policy_that_holds_its_rank_s_loop_is_told_with_its_line(
    policy: str, line: str, hook: str, checkpoint: Path, nursery: Nursery
) -> None:
    file = checkpoint / "policies.py"
    text = file.read_text().splitlines()
    begins = text.index(f"class {policy}(Fine):")
    numbers = [at for at, each in enumerate(text, 1) if line in each and begins < at < begins + 8]
    with pytest.raises(RankLost, match=rf"rank 0 stands at {file}:(\d+) in {hook}") as caught:
        async with Engine(checkpoint, WORLD, policy=f"{file}:{policy}", nursery=nursery, rank_timeout_s=4.0) as engine:
            await engine.generate([3, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True))
    said = str(caught.value)
    assert "\n" not in said
    # A loop has two lines.
    assert int(said.partition(f"{file}:")[2].partition(" ")[0]) in {*numbers, *(number - 1 for number in numbers)}


async def test_a_killed_rank_s_record_says_what_it_was_doing(
    checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    policy = f"{checkpoint / 'policies.py'}:Dies"
    says = r"rank \d was killed by signal 9 with (P e0 \[\d,\d\)|nothing of P or D) in flight"
    with pytest.raises(RankLost, match=says):
        async with Engine(checkpoint, WORLD, policy=policy, out=tmp_path, nursery=nursery) as engine:
            await engine.generate([3] * 40, SamplingParams(max_tokens=30))


async def test_a_killed_rank_is_the_one_that_its_run_s_record_blames(
    checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    policy = f"{checkpoint / 'policies.py'}:OneDies"
    with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
        async with Engine(checkpoint, WORLD, policy=policy, out=tmp_path, nursery=nursery) as engine:
            await engine.generate([3] * 40, SamplingParams(max_tokens=30, ignore_eos=True))
    verdict = diagnose_found(READER.read(tmp_path)).verdict
    assert (verdict.cls, verdict.ranks) == (Class.EXCEPTION, (1,))
    assert "SIGKILL, as rank 0 was told" in verdict.say


async def test_requests_that_cannot_be_served_are_refused_and_the_rest_goes_on(
    checkpoint: Path, nursery: Nursery
) -> None:
    async with Engine(checkpoint, World(1), kv_tokens=64, nursery=nursery) as engine:
        session = engine.session()
        for prompt, params, text in (
            ([], SamplingParams(), "empty prompt"),
            ([3, 256], SamplingParams(max_tokens=2), "token id 256: the vocabulary has ids 0 to 255"),
            (
                [3] * 50,
                SamplingParams(max_tokens=15),
                r"does not fit the 64 tokens of the KV pool \(raise --kv-tokens\)",
            ),
        ):
            with pytest.raises(UsageError, match=text):
                session.generate(prompt, params)
        turn = session.generate([3, 4], SamplingParams(max_tokens=40, ignore_eos=True))
        with pytest.raises(UsageError, match="its last turn has not ended"):
            session.generate([3], SamplingParams())
        assert len((await turn).tokens) == 40


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("fin", "did you mean fine"),
        ("fine:span=0", "a span is at least 1"),
        ("fine:spam=2", "has no option 'spam': it has span"),
        ("normal:span=2", "takes no options"),
        ("nowhere.py:Policy", "there is no such file"),
        ("{0}:Nothing", "has no class 'Nothing'"),
    ],
)
def test_unknown_policies_are_refused_before_anything_starts(policy: str, text: str, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=text):
        Engine(checkpoint, WORLD, policy=policy.format(checkpoint / "policies.py"))


def test_a_policy_file_that_fails_is_named_with_its_line(checkpoint: Path, tmp_path: Path) -> None:
    for text, line in (("x = 1\ny = 1 / 0\n", 2), ("x = 1\n\ndef (:\n", 3), ("import nowhere\n", 1)):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(UsageError, match=rf"bad\.py:{line}: "):
            Engine(checkpoint, WORLD, policy=f"{tmp_path / 'bad.py'}:Policy")


async def test_sessions_pause_flush_and_abort(checkpoint: Path, nursery: Nursery) -> None:
    async with Engine(checkpoint, WORLD, kv_tokens=1024, nursery=nursery) as engine:
        session = engine.session()
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        turn = session.generate([3, 4, 5, 6], params)
        count = 0
        async for _ in turn:
            count += 1
            if count == 5:
                await engine.pause()
                other = engine.session().generate([7, 8], SamplingParams(max_tokens=3, ignore_eos=True))
                await engine.resume()
            if count == 20:
                turn.abort()
        done = await turn
        assert done.finish_reason == "abort"
        assert 20 <= len(done.tokens) == count < 200
        assert len((await other).tokens) == 3
        again = await session.generate([3, 4, 5, 6, *done.tokens, 9], SamplingParams(max_tokens=2, ignore_eos=True))
        assert again.cached_tokens == 4 + len(done.tokens) - 1
        await engine.flush()
        prompt = [3, 4, 5, 6, *done.tokens, 9, *again.tokens, 9]
        flushed = await session.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        assert flushed.cached_tokens == 0
        await session.close()


async def test_sampling_is_reproducible_whatever_it_is_batched_with(checkpoint: Path, nursery: Nursery) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, top_k=50, seed=11, ignore_eos=True)
    async with Engine(checkpoint, World(2, 2, 2), nursery=nursery) as engine:
        alone = await engine.generate(list(range(3, 30)), params)
        crowd = [
            engine.generate([3 + n] * 20, SamplingParams(max_tokens=20, temperature=1.0, seed=n)) for n in range(6)
        ]
        import asyncio

        among, *_ = await asyncio.gather(engine.generate(list(range(3, 30)), params), *crowd)
        assert among.tokens == alone.tokens
        other = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, top_k=50, seed=12, ignore_eos=True)
        assert (await engine.generate(list(range(3, 30)), other)).tokens != alone.tokens


async def test_weights_are_updated_in_place_while_turns_are_in_flight(
    checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    write_checkpoint(tmp_path / "new", seed=5)
    prompt, params = list(range(3, 30)), SamplingParams(max_tokens=60, ignore_eos=True)
    async with Engine(tmp_path / "new", WORLD, nursery=nursery) as engine:
        new = await engine.generate(prompt, params)
    async with Engine(checkpoint, WORLD, nursery=nursery) as engine:
        old = await engine.generate(prompt, params)
        session = engine.session()
        turn = session.generate(prompt, params)
        count = 0
        async for _ in turn:
            count += 1
            if count == 10:
                await engine.update_weights(tmp_path / "new")
        done = await turn
        assert done.tokens[:10] == old.tokens[:10]
        assert len(done.tokens) == 60
        assert done.tokens != old.tokens
        assert (await engine.generate(prompt, params)).tokens == new.tokens
        write_checkpoint(tmp_path / "wide", hidden=128)
        with pytest.raises(UsageError, match="its config differs"):
            await engine.update_weights(tmp_path / "wide")


@pytest.mark.parametrize("how", ["cut", "lacking", "nan"])
async def test_weights_that_cannot_be_used_are_refused_and_the_old_ones_stay(
    how: str, checkpoint: Path, tmp_path: Path, nursery: Nursery
) -> None:
    from safetensors.torch import load_file, save_file

    file = write_checkpoint(tmp_path / "new", seed=5) / "model.safetensors"
    tensors = load_file(file)
    if how == "lacking":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"][1] = float("nan")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        save_file(tensors, file, metadata={"format": "pt"})
    prompt, params = list(range(3, 30)), SamplingParams(max_tokens=20, ignore_eos=True)
    async with Engine(checkpoint, WORLD, nursery=nursery) as engine:
        old = await engine.generate(prompt, params)
        turn = engine.session().generate(prompt, params)
        with pytest.raises(UsageError, match=r"copy the checkpoint again|missing model\.norm|that are none"):
            await engine.update_weights(tmp_path / "new")
        assert (await turn).tokens == old.tokens
        assert (await engine.generate(prompt, params)).tokens == old.tokens


def test_a_loop_that_is_stopped_again_and_again_lets_its_tasks_end() -> None:
    uvloop = pytest.importorskip("uvloop")
    said: list[str] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()

        async def task() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(3):
                    loop.stop()
                    await asyncio.sleep(0.01)
                said.append("why")

        running = loop.create_task(task())
        runner.run(asyncio.sleep(0))
        worker._let_end(loop)
        assert (said, running.cancelled()) == (["why"], True)
