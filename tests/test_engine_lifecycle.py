"""The engine's edges: opening, closing, ranks that die idle, values that cannot be used, ends of turns, exact draws."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kernel.errors import RankLost, TurnstileError, UsageError
from kernel.request import SamplingParams
from kernel.topology import World
from models.sampling import sample
from models.tiny import write_checkpoint
from rollout.engine import Engine
from tests.engines import Oracle

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.ranks.nursery import Nursery

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path)
    return path


async def test_turns_outside_of_the_engine_s_life_are_refused(checkpoint: Path, nursery: Nursery) -> None:
    engine = Engine(checkpoint, World(1), nursery=nursery)
    with pytest.raises(UsageError, match="not open"):
        engine.session().generate([3], SHORT)
    async with engine:
        session = engine.session()
        left = session.generate([3, 4], SamplingParams(max_tokens=2000, ignore_eos=True))
        await anext(aiter(left))
    assert (await left).finish_reason == "abort"
    with pytest.raises(UsageError, match="not open"):
        session.generate([3], SHORT)
    with pytest.raises(UsageError, match="opened once"):
        await engine.__aenter__()


async def test_a_rank_that_dies_while_all_are_idle_is_noticed(checkpoint: Path, nursery: Nursery) -> None:
    async def run() -> None:
        async with Engine(checkpoint, World(2, 2, 2), nursery=nursery) as engine:
            await engine.generate([3], SHORT)
            assert engine._launcher is not None
            os.kill(engine._launcher._ranks[1].process.pid, signal.SIGKILL)
            await engine._stopped.wait()
            with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
                await engine.generate([3], SHORT)

    with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
        await run()


async def test_a_stuck_rank_is_killed_at_the_exit_and_the_body_s_error_stays(
    checkpoint: Path, nursery: Nursery
) -> None:
    pids = []

    async def run(error: Exception | None) -> None:
        async with Engine(checkpoint, World(2, 2, 2), nursery=nursery, exit_s=1) as engine:
            await engine.generate([3], SHORT)
            assert engine._launcher is not None
            pids.append(engine._launcher._ranks[1].process.pid)
            os.kill(pids[-1], signal.SIGSTOP)
            if error is not None:
                raise error

    with pytest.raises(RankLost, match=r"rank (0, )?1 did not stop within 1 s"):
        await run(None)
    with pytest.raises(ValueError, match="my own"):
        await run(ValueError("my own"))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"prefill_tokens": 0}, {"rows": 0}, {"threads": 0}, {"kv_tokens": 0}, {"kv_tokens": 7}, {"block_size": 0},
        {"rows": 1.5}, {"device": "tpu"},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_that_cannot_be_used_are_refused(values: dict[str, Any], checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Engine(checkpoint, World(1), **values)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 2.5}, {"top_k": 2.5}, {"seed": "x"}, {"temperature": "hot"}, {"stop_token_ids": (1.5,)},
        {"top_p": 0}, {"temperature": 10**400}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"top_k": 2**70}, {"stop_token_ids": (2**70,)}, {"seed": 2**1024}, {"max_tokens": 10**5000},
        {"ignore_eos": "no"}, {"stop_token_ids": 3}, {"stop_token_ids": None}, {"stop_token_ids": "ab"},
    ],
    ids=lambda values: next(iter(values)),
)  # fmt: skip
def test_parameters_of_other_types_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))) as caught:
        SamplingParams(**values)
    assert len(str(caught.value)) < 200


async def test_bad_prompts_and_closed_sessions_leave_nothing_behind(checkpoint: Path, nursery: Nursery) -> None:
    async with Engine(checkpoint, World(2, 2, 2), nursery=nursery) as engine:
        session = engine.session()
        with pytest.raises(UsageError, match=r"token id=3\.5: must be a whole number"):
            session.generate([3.5], SHORT)  # type: ignore[list-item]
        done = await session.generate(np.array([3, 4, 5]), SHORT)  # type: ignore[arg-type]
        assert done.tokens == (await engine.generate([3, 4, 5], SHORT)).tokens
        for _ in range(4):
            await session.close()
        with pytest.raises(UsageError, match="was closed"):
            session.generate([3], SHORT)
        assert [engine.session().replica for _ in range(4)] == [0, 1, 0, 1]
        await asyncio.wait_for(engine.use_policy("normal"), 60)


async def test_stop_ids_and_the_checkpoint_s_own_end_a_turn(tmp_path: Path, nursery: Nursery) -> None:
    import json

    write_checkpoint(tmp_path)
    prompt = list(range(3, 20))
    async with Engine(tmp_path, World(2, 1, 1), nursery=nursery) as engine:
        free = (await engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))).tokens
        stop = next(token for at, token in enumerate(free) if at >= 4 and token not in free[:at])
        cut = free[: free.index(stop) + 1]
        for ignore in (False, True):
            params = SamplingParams(max_tokens=24, stop_token_ids=(stop,), ignore_eos=ignore)
            done = await engine.generate(prompt, params)
            assert (done.tokens, done.finish_reason) == (cut, "stop")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": stop}))
    async with Engine(tmp_path, World(2, 1, 1), nursery=nursery) as engine:
        done = await engine.generate(prompt, SamplingParams(max_tokens=24))
        assert (done.tokens, done.finish_reason) == (cut, "stop")
        assert (await engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))).tokens == free


async def test_draws_and_their_logprobs_are_those_of_the_oracle_s_distribution(
    checkpoint: Path, nursery: Nursery
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=40, seed=7, ignore_eos=True)
    prompt = list(range(3, 30))
    async with Engine(checkpoint, World(2, 2, 2), nursery=nursery) as engine:
        done = await engine.generate(prompt, params)
    with torch.inference_mode():
        logits = Oracle(checkpoint)._model(torch.tensor([[*prompt, *done.tokens]])).logits[0, len(prompt) - 1 : -1]
    positions = [len(prompt) + at for at in range(20)]
    tokens, logprobs = sample(logits.float(), [params] * 20, positions)
    assert tuple(tokens.tolist()) == done.tokens
    assert (logprobs - torch.tensor(done.logprobs)).abs().max() < 1e-4


async def test_a_cancelled_start_leaves_the_nursery_in_order(checkpoint: Path) -> None:
    from rollout.ranks.nursery import Nursery

    with Nursery() as fresh:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Engine(checkpoint, World(2, 1, 1), nursery=fresh).__aenter__(), 0.05)
        async with Engine(checkpoint, World(2, 1, 1), nursery=fresh) as engine:
            assert engine._launcher is not None
            for rank in engine._launcher._ranks:
                os.kill(rank.process.pid, 0)
            await engine.generate([3], SHORT)


async def test_a_stopped_nursery_is_told_of(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.ranks import nursery as module

    monkeypatch.setattr(module, "STOPPED_S", 0.5)
    with module.Nursery() as fresh:
        pid = fresh._process.pid
        os.kill(pid, signal.SIGSTOP)
        says = rf"process {pid}, which forks them .* gave no answer for \d+ s and was ended: it was stopped by SIGSTOP"
        with pytest.raises(UsageError, match=says):
            async with Engine(checkpoint, World(2, 1, 1), nursery=fresh):
                pass
        assert fresh._process.wait(60) == -signal.SIGKILL


async def test_turns_that_run_when_a_rank_fails_get_its_error(checkpoint: Path, nursery: Nursery) -> None:
    async def run() -> None:
        async with Engine(checkpoint, World(2, 2, 2), nursery=nursery) as engine:
            turn = engine.session().generate([3, 4], SamplingParams(max_tokens=3000, ignore_eos=True))
            await anext(aiter(turn))
            assert engine._launcher is not None
            os.kill(engine._launcher._ranks[0].process.pid, signal.SIGKILL)
            with pytest.raises(RankLost, match="rank 0 was killed by signal 9"):
                await turn

    with pytest.raises(TurnstileError, match="killed by signal 9"):
        await run()
