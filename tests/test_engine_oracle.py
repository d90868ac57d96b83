"""Real ranks against transformers: every world, every policy, several turns with prefix reuse, chunked prefill."""

from __future__ import annotations

from shutil import which
from typing import TYPE_CHECKING

import pytest

from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine
from tests.engines import Oracle, trajectories

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.ranks.nursery import Nursery

WORLDS = [
    World(1),
    World(2, 2, 2),
    World(2, 1, 1),
    World(2, 2, 1),
    World(2, 2, 1, cut="sublayer"),
    World(4, 2, 4, "cross"),
    World(4, 2, 2, "flat"),
]
MORE_WORLDS = [
    World(4, 2, 4, "flat"),
    World(4, 4, 4),
    World(4, 1, 1),
    World(4, 2, 2, "cross"),
    World(4, 2, 1, "flat"),
    World(4, 2, 1, "cross", "all"),
]
POLICIES = ["normal", "global_complete", "global_enqueue", "fine", "fine:span=3", "lean", "adaptive", "unordered"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, layers=4, heads=4, kv_heads=2)
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.mark.parametrize(
    "world", [*WORLDS, *(pytest.param(world, marks=pytest.mark.slow) for world in MORE_WORLDS)], ids=str
)
async def test_tokens_and_logprobs_are_those_of_transformers(
    world: World, checkpoint: Path, oracle: Oracle, nursery: Nursery
) -> None:
    drawn = set()
    async with Engine(
        checkpoint, world, policy=POLICIES[0], kv_tokens=4096, prefill_tokens=48, rows=8, nursery=nursery
    ) as engine:
        for number, policy in enumerate(POLICIES):
            await engine.use_policy(policy)
            for trajectory in await trajectories(engine, count=5, turns=3, seed=number):
                oracle.check(trajectory)
                length = 0
                for turn in trajectory:
                    # All of the last turn's context but its last token, whose KV nothing has written.
                    assert turn.done.cached_tokens == max(0, length - 1)
                    length = len(turn.prompt) + len(turn.done.tokens)
                    drawn.update(turn.done.tokens)
    assert len(drawn) >= 20, "outputs that repeat one token prove little"


async def test_reuse_and_chunking_change_nothing(checkpoint: Path, nursery: Nursery) -> None:
    found = []
    for prefill_tokens, reuse in ((512, True), (512, False), (7, True), (1, False)):
        async with Engine(checkpoint, World(2, 2, 2), prefill_tokens=prefill_tokens, rows=8, nursery=nursery) as engine:
            done = await trajectories(engine, count=3, turns=3, seed=1, reuse=reuse)
            found.append([[turn.done.tokens for turn in each] for each in done])
            assert any(turn.done.cached_tokens for each in done for turn in each) is reuse
    assert all(each == found[0] for each in found)


async def test_a_pool_of_little_more_than_the_largest_trajectory(
    checkpoint: Path, oracle: Oracle, nursery: Nursery
) -> None:
    async with Engine(
        checkpoint, World(2, 2, 2), kv_tokens=208, prefill_tokens=32, block_size=8, rows=8, nursery=nursery
    ) as engine:
        for trajectory in await trajectories(engine, count=8, turns=3, seed=5):
            oracle.check(trajectory)


@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("world", [World(1), World(2, 2, 2), World(4, 2, 2, "flat")], ids=str)
async def test_compiled_kernels_under_every_policy(
    world: World, checkpoint: Path, oracle: Oracle, nursery: Nursery
) -> None:
    async with Engine(
        checkpoint, world, compiled=True, kv_tokens=4096, prefill_tokens=48, rows=8, nursery=nursery
    ) as engine:
        for number, policy in enumerate(POLICIES[:6]):
            await engine.use_policy(policy)
            for trajectory in await trajectories(engine, count=5, turns=3, seed=number):
                oracle.check(trajectory)
        await engine.update_weights(checkpoint)
        for trajectory in await trajectories(engine, count=3, turns=2, seed=11):
            oracle.check(trajectory)
