"""Real ranks with an expert exchange: the same tokens as without it and as transformers', under every policy."""

from __future__ import annotations

import random
from dataclasses import replace
from shutil import which
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from kernel.record import Kind
from kernel.record.reader import read_run
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout import cli
from rollout.engine import Engine
from tests.engines import TOLERANCE, Oracle, trajectories

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.ranks.nursery import Nursery

SPLIT = [
    World(2, 2, 2, exchange="split"),
    pytest.param(World(2, 2, 2, cut="sublayer", exchange="split"), marks=pytest.mark.slow),
    pytest.param(World(1, exchange="split"), marks=pytest.mark.slow),
    pytest.param(World(4, 4, 4, exchange="split"), marks=pytest.mark.slow),
    pytest.param(World(4, 2, 4, exchange="split"), marks=pytest.mark.slow),
]
POLICIES = ["normal", "fine", "global_enqueue", "global_complete", "fine:span=3", "adaptive", "unordered", "lean"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, layers=4, heads=4, kv_heads=2)
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.mark.parametrize("world", SPLIT, ids=str)
async def test_tokens_and_logprobs_are_those_without_and_of_transformers(
    world: World, checkpoint: Path, oracle: Oracle, nursery: Nursery
) -> None:
    found = []
    for exchange, policies in (("split", POLICIES), ("none", POLICIES[:2])):
        engine = Engine(
            checkpoint,
            replace(world, exchange=exchange),
            policy=policies[0],
            kv_tokens=4096,
            prefill_tokens=48,
            rows=8,
            nursery=nursery,
        )
        assert engine.world.splits == (exchange == "split")
        async with engine:
            for number, policy in enumerate(policies):
                await engine.use_policy(policy)
                done = await trajectories(engine, count=5, turns=3, seed=number)
                for trajectory in done:
                    oracle.check(trajectory)
                if number < 2:
                    found.append([turn.done for each in done for turn in each])
    for ours, plain in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert ours.tokens == plain.tokens
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE)


@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
async def test_compiled_kernels_leave_experts_to_the_exchange(
    checkpoint: Path, oracle: Oracle, nursery: Nursery
) -> None:
    world = World(2, 2, 2, exchange="split")
    async with Engine(checkpoint, world, compiled=True, prefill_tokens=48, rows=8, nursery=nursery) as engine:
        for trajectory in await trajectories(engine, count=4, turns=2, seed=3):
            oracle.check(trajectory)
        await engine.update_weights(checkpoint)
        for trajectory in await trajectories(engine, count=4, turns=2, seed=4):
            oracle.check(trajectory)


async def test_one_replica_works_while_the_other_idles(checkpoint: Path, nursery: Nursery) -> None:
    """Idle ranks take part with zero rows in every notification and in every low-latency operation."""
    async with Engine(checkpoint, World(2, 2, 2, exchange="split"), rows=8, nursery=nursery) as engine:
        prompt = random.Random(5).choices(range(3, 256), k=70)
        alone = await engine.generate(prompt)
        both = await trajectories(engine, count=2, turns=1, seed=9)
        again = await engine.generate(prompt)
        assert alone.tokens == again.tokens
        assert all(turn.done.tokens for each in both for turn in each)


async def test_the_record_tells_notifications_from_data(checkpoint: Path, nursery: Nursery, tmp_path: Path) -> None:
    """A boundary stands behind each notification; the next segment's data comes behind its permit."""
    world = World(2, 2, 2, exchange="split")
    async with Engine(checkpoint, world, prefill_tokens=48, rows=8, nursery=nursery, out=tmp_path) as engine:
        await trajectories(engine, count=4, turns=2, seed=3)
    came: dict[int, list[tuple[int, ...]]] = {}
    rows: dict[int, int] = {}
    for recording in read_run(tmp_path).values():
        done = {"notify": 0, "dispatch": 0, "combine": 0}
        start = permit = published = 0
        for event in recording.events:
            if event.kind is Kind.PERMIT:
                start, permit = event.a, event.b
            elif event.kind is Kind.BOUNDARY:
                published = event.a
            elif event.kind in (Kind.START, Kind.FINISH) and event.phase == "P" and event.text in done:
                layer = int(event.site.split()[-1].rstrip(")"))
                if event.kind is Kind.FINISH:
                    done[event.text] += 1
                    # The boundary behind a notification is published when the counts are there, never before.
                    assert event.text != "notify" or published <= layer
                elif event.text == "dispatch":
                    assert layer + 1 < permit, "data before the permit"
                    assert published >= start
                    sizes = recording.sizes[event.group, event.seq]
                    assert len(sizes) == 2
                    came.setdefault(event.seq, []).append(sizes)
                    rows[event.seq] = event.a
        assert done["notify"] == done["dispatch"] == done["combine"] > 0
        assert done["notify"] % 4 == 0
    for number, columns in came.items():  # what each rank was to get of each: a row travels to one rank, or to both
        assert len(columns) == 2
        assert rows[number] <= sum(map(sum, columns)) <= 2 * rows[number]


@pytest.mark.parametrize(
    ("exchange", "world", "words"),
    [
        ("shm", World(2, 1, 2), "choose --adp above 1"),
        ("shm", World(2, 2, 1), "choose --ep 2, not 1"),
        ("nccl", World(2, 2, 2), "choose shm or gloo with --device cpu"),
        ("gloo", World(2, 2, 2), "choose shm, or start them with torchrun"),
        ("deepep", World(2, 2, 2), "it moves GPU tensors"),
    ],
)
def test_exchanges_that_cannot_be_are_refused_before_ranks_start(
    exchange: str, world: World, words: str, checkpoint: Path
) -> None:
    from rollout.device import DeviceOptions

    with pytest.raises(UsageError, match=words):
        Engine(checkpoint, world, device=DeviceOptions(exchange=exchange))


def test_a_model_with_layers_without_experts_is_refused(tmp_path: Path) -> None:
    from rollout.device import DeviceOptions

    write_checkpoint(tmp_path, layers=3, dense_layers=(1,))
    with pytest.raises(UsageError, match="layers without experts"):
        Engine(tmp_path, World(2, 2, 2), device=DeviceOptions(exchange="shm"))
    assert Engine(tmp_path, World(2, 2, 2)).exchange.substrate == "none"


def test_the_command_refuses_before_it_makes_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    wanted = ["rollout", "--world", "2", "--adp", "2", "--ep", "2", "--exchange", "deepep", "--out", str(out)]
    assert cli.main(wanted) == 2
    assert "--exchange deepep: it moves GPU tensors" in capsys.readouterr().err
    assert not out.exists()
