"""Decode through graphs, with graphs that run again what they captured: the same tokens as the plain model, always."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernel.comm.exchange.latency import LatencyOverWire
from kernel.errors import ModelError, StillHeld, UsageError
from kernel.request import Phase, Row, SamplingParams
from kernel.topology import World
from models import qwen3_moe
from models.cuda.drawn import Drawn
from models.cuda.graphs import GraphedDecode
from models.tiny import write_checkpoint
from tests.graph_device import FakeDevice, step_maker
from tests.tiny import Context, FakeCollectives, Meeting, Oracle, Team, together

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.step import Step

BLOCKS, SLOTS = 96, 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


class GraphedTeam(Team):
    """A `Team` whose models decode through fake graphs."""

    def __init__(self, path: Path, world: World, buckets: Sequence[int], **options: Any) -> None:
        super().__init__(path, world, blocks=BLOCKS, slots=SLOTS)
        self._collectives: list[Any] = [None] * world.size
        self.devices = [FakeDevice() for _ in range(world.size)]
        self.models = [
            GraphedDecode(
                qwen3_moe.load(path, world, rank, blocks=BLOCKS, block_size=4, slots=SLOTS, staged=True),
                self.devices[rank],
                buckets,
                partial(self._make, rank),
                **options,
            )
            for rank in range(world.size)
        ]
        self.all(lambda rank: self.models[rank].warm((1, 7)))

    def _make(self, rank: int, phase: Phase, sizes: tuple[int, ...], live: int) -> Step:
        collectives = self._collectives[rank]
        exchange = self.exchange(rank, collectives)
        return step_maker(self.world, self.models[0].layers, rank, collectives, exchange)(phase, sizes, live)

    def all(self, work: Any) -> None:
        """Run `work(rank)` on all ranks, with collectives between them."""
        meetings = {(role, group): Meeting(group) for role, groups in self.world.groups.items() for group in groups}
        for rank in range(self.world.size):
            self._collectives[rank] = FakeCollectives(rank, meetings, self.world)
        together([partial(work, rank) for rank in range(self.world.size)], meetings.values())

    def driver(self, phase: Phase, rank: int, rows: Any, sizes: Any = (), collectives: Any = None) -> Any:
        self._collectives[rank] = collectives
        return super().driver(phase, rank, rows, sizes, collectives)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(203), k=length)


def params(rng: random.Random) -> SamplingParams:
    if rng.random() < 0.5:
        return SamplingParams()
    return SamplingParams(
        temperature=rng.choice((0.3, 1.0, 1.7)),
        top_k=rng.choice((0, 0, 7)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
        seed=rng.randrange(-5, 2**64),
    )


def play(team: Team, seed: int, counts: Sequence[int]) -> list[Context]:
    """A schedule that follows from the seed: prompts of several lengths, decoded in changing company."""
    rng = random.Random(seed)
    contexts = []
    for number in range(7):
        home = rng.randrange(team.world.adp)
        contexts.append(team.admit(home, prompt(seed + number, rng.randint(1, 9)), 40, params(rng)))
    team.prefill(contexts[:4], sorted({2, 5}))
    team.prefill(contexts[4:])
    for count in counts:
        chosen = rng.sample(contexts, count)
        largest = max(sum(one.replica == home for one in chosen) for home in range(team.world.adp))
        a = team.world.atp
        team.decode(chosen, bucket=next(size for size in (2, 4, 8, 16) if size >= largest and size % a == 0))
    return contexts


WORLDS = [
    World(1),
    World(2, 2, 2),
    World(4, 2, 2, "cross"),
    World(2, 1, 1),
    World(2, 2, 2, exchange="split"),
    World(4, 2, 4, exchange="split"),
]


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_padded_buckets_draw_what_the_plain_model_draws(world: World, seed: int, path: Path) -> None:
    counts = [random.Random(seed + 50).randint(1, 7) for _ in range(9)]
    plain, graphed = Team(path, world, blocks=BLOCKS), GraphedTeam(path, world, (2, 4, 8))
    expected, found = play(plain, seed, counts), play(graphed, seed, counts)
    for one, other in zip(expected, found, strict=True):
        assert one.tokens == other.tokens
        assert [s.logprob for s in one.drawn] == pytest.approx([s.logprob for s in other.drawn], abs=2e-4)
    for model in graphed.models:
        assert (model.replays, model.misses) == (len(counts), 0)
    for device in graphed.devices:
        assert sum(graph.replays for graph in device.graphs) >= len(counts)
    assert graphed.models[0].layers == plain.models[0].layers


def test_rows_of_padding_are_sent_to_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take experts' time on other ranks; and a graph keeps the exchange's buffer until it is gone."""
    team = GraphedTeam(path, World(2, 2, 2, exchange="split"), (4,))
    sent: list[tuple[int, int]] = []
    real = LatencyOverWire.dispatch

    def dispatch(self: Any, place: Any, rows: Any, experts: Any, weights: Any) -> Any:
        sent.append((rows.shape[0], int((experts >= 0).any(1).sum())))
        return real(self, place, rows, experts, weights)

    monkeypatch.setattr(LatencyOverWire, "dispatch", dispatch)
    contexts = [team.admit(0, prompt(n, 3), 20) for n in range(3)]
    team.prefill(contexts)
    team.decode(contexts, bucket=4)
    assert set(sent) == {(4, 3), (4, 0)}, "bucket and live rows of the busy and of the idle replica"
    low = team.exchange(0, None).low_latency
    with pytest.raises(StillHeld, match="D of 4 rows"):
        low.close()
    for graph in team.devices[0].graphs:
        for tell in graph.ended:
            tell()
    low.close()


def test_a_launch_that_the_exchange_forbids_does_not_happen(path: Path) -> None:
    team = GraphedTeam(path, World(2, 2, 2, exchange="split"), (4,))
    context = team.admit(0, prompt(1, 3), 20)
    team.prefill([context])
    model, low = team.models[0], team.exchange(0, None).low_latency
    bucket = model._buckets[4]
    before = [graph.replays for graph in team.devices[0].graphs]
    low.dropped(bucket.hold)
    row = Row(context.slot, None, len(context.tokens) - 1, context.blocks, context.params)
    step = team._make(0, Phase.D, (4, 4), 1)
    with team.devices[0].scope(Phase.D), pytest.raises(StillHeld, match="after it was dropped"):
        model.forward(step, [row]).send(None)
    assert [graph.replays for graph in team.devices[0].graphs] == before
    assert model.replays == 0


def test_greedy_text_is_that_of_transformers(path: Path, oracle: Oracle) -> None:
    team = GraphedTeam(path, World(1), (4,))
    contexts = [team.admit(0, prompt(n, 3 + n), 40) for n in range(3)]
    team.prefill(contexts)
    for _ in range(20):
        team.decode(contexts, bucket=4)
    for context in contexts:
        oracle.check(context)
    assert team.models[0].replays == 20


def test_rows_of_padding_touch_scratch_memory_alone(path: Path) -> None:
    team = GraphedTeam(path, World(1), (8,))
    inner = team.models[0]._model
    before = inner.pool.storage.clone(), inner.slots.clone()
    context = team.admit(0, prompt(0, 5), 20)
    team.prefill([context])
    team.decode([context], bucket=8)
    changed = (inner.pool.storage != before[0]).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert set(changed) <= {*context.blocks, BLOCKS}
    assert (inner.slots != before[1]).nonzero().flatten().tolist() in ([context.slot], [context.slot, SLOTS])
    assert inner.pool.storage.shape[1] == BLOCKS + 1
    assert inner.slots.shape == (SLOTS + 1,)


def test_what_no_graph_fits_runs_without(path: Path, oracle: Oracle) -> None:
    team = GraphedTeam(path, World(1), (2, 4), depth=2)
    model = team.models[0]
    contexts = [team.admit(0, prompt(n, 4), 30) for n in range(5)]
    team.prefill(contexts)
    team.decode(contexts, bucket=5)
    assert (model.replays, model.misses) == (0, 1), "no bucket of 5 rows"
    for _ in range(4):
        team.decode(contexts[:3], bucket=4)
    # Two blocks of four tokens hold positions 0 .. 7.
    assert (model.replays, model.misses) == (3, 2)
    quiet = [Row(one.slot, None, len(one.tokens) - 1, one.blocks, None) for one in contexts[3:]]
    assert team.forward(Phase.D, [quiet], bucket=2) == [[None, None]]
    given = [Row(one.slot, (one.tokens[-1],), len(one.tokens) - 1, one.blocks, one.params) for one in contexts[3:]]
    team.keep(contexts[3:], team.forward(Phase.D, [given], bucket=2)[0])
    assert (model.replays, model.misses) == (3, 4)
    team.decode(contexts[3:], bucket=2)
    assert (model.replays, model.misses) == (4, 4)
    for context in contexts:
        oracle.check(context)


def test_an_idle_replica_replays_for_the_others(path: Path) -> None:
    team = GraphedTeam(path, World(2, 2, 2), (2,))
    context = team.admit(0, prompt(0, 5), 20)
    team.prefill([context])
    team.decode([context], bucket=2)
    assert [model.replays for model in team.models] == [1, 1]
    assert team.forward(Phase.D, [[], []], bucket=2) == [[], []]


def test_graphs_can_be_off(path: Path, oracle: Oracle) -> None:
    team = GraphedTeam(path, World(1), (4,), enabled=False)
    context = team.admit(0, prompt(3, 5), 20)
    team.prefill([context])
    team.decode([context], bucket=4)
    assert (team.models[0].replays, team.devices[0].graphs) == (0, [])
    oracle.check(context)


def test_reload_keeps_the_addresses_that_graphs_read(path: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, seed=1)
    team = GraphedTeam(path, World(1), (2,))
    inner = team.models[0]._model
    before = [tensor.data_ptr() for tensor in inner.weights.tensors()]
    team.models[0].reload(str(other))
    assert [tensor.data_ptr() for tensor in inner.weights.tensors()] == before
    context = team.admit(0, prompt(3, 5), 20)
    team.prefill([context])
    for _ in range(5):
        team.decode([context], bucket=2)
    assert team.models[0].replays == 5
    Oracle(other).check(context)


def test_results_are_lazy_and_in_order(path: Path) -> None:
    """Several iterations may be in flight before the first is read."""
    team = GraphedTeam(path, World(1), (2,))
    context = team.admit(0, prompt(1, 6), 40)
    team.prefill([context])
    waiting = []
    for step in range(12):
        row = Row(context.slot, None, len(context.tokens) - 1 + step, context.blocks, context.params)
        driver = team.driver(Phase.D, 0, [row], [2])
        assert driver.advance(1 << 30)
        waiting.append(driver.result)
    assert all(isinstance(result, Drawn) for result in waiting)
    late = [sampled.token for result in reversed(waiting) for sampled in result][::-1]
    plain = Team(path, World(1), blocks=BLOCKS)
    same = plain.admit(0, prompt(1, 6), 40)
    plain.prefill([same])
    for _ in range(12):
        plain.decode([same])
    assert context.tokens + late == same.tokens


def test_a_model_on_the_host_has_no_graphs(path: Path) -> None:
    model = qwen3_moe.load(path, World(1), 0, blocks=8, block_size=4, slots=2)
    with pytest.raises(UsageError, match="need a model on a device"):
        GraphedDecode(model, FakeDevice(), (2,), step_maker(World(1), 4))


def test_a_replayed_step_is_a_finished_one() -> None:
    make = step_maker(World(2, 2, 2), 3)
    step = make(Phase.D, (4, 4), 1)
    assert step.bucket == 4
    with pytest.raises(ModelError, match="ended before"):
        step.finished()
    step.replayed()
    step.finished()
    with pytest.raises(ModelError, match="replays its program after"):
        step.replayed()


def test_the_staged_model_is_the_plain_one(path: Path, oracle: Oracle) -> None:
    """Inputs as on a device, without graphs: prompts in parts, rows that bring their token, rows that draw none."""
    team = Team(path, World(1))
    team.models = [qwen3_moe.load(path, World(1), 0, blocks=96, block_size=4, slots=16, staged=True)]
    contexts = [team.admit(0, prompt(n, 4 + 5 * n), 30) for n in range(3)]
    team.prefill(contexts, (3, 9))
    for round_ in range(4):
        rows = [
            Row(one.slot, None if (n + round_) % 2 else (one.tokens[-1],), len(one.tokens) - 1, one.blocks, one.params)
            for n, one in enumerate(contexts)
        ]
        team.keep(contexts, team.forward(Phase.D, [rows])[0])
    mixed = [
        Row(one.slot, None, len(one.tokens) - 1, one.blocks, one.params if n < 2 else None)
        for n, one in enumerate(contexts)
    ]
    results = team.forward(Phase.D, [mixed])[0]
    assert [result is None for result in results] == [False, False, True]
    team.keep(contexts, results)
    for context in contexts:
        oracle.check(context)
    assert team.forward(Phase.D, [[]], bucket=2) == [[]]
    with pytest.raises(IndexError):
        team.prefill([team.admit(0, prompt(0, 9), 8)])


def test_tensors_of_a_graph_stay(path: Path) -> None:
    """What a graph reads lies where it lay: nothing is allocated anew by filling in other rows."""
    team = GraphedTeam(path, World(1), (4,))
    inputs = team.models[0]._buckets[4].inputs
    where = {name: tensor.data_ptr() for name, tensor in inputs._tensors.items()}
    context = team.admit(0, prompt(0, 5), 30, SamplingParams(temperature=1.0, seed=7))
    team.prefill([context])
    with torch.inference_mode():
        team.decode([context], bucket=4)
    assert {name: tensor.data_ptr() for name, tensor in inputs._tensors.items()} == where
    assert inputs._tensors["seed"].tolist() == [7, 0, 0, 0]
    assert inputs._tensors["greedy"].tolist() == [False, True, True, True]
    assert inputs._tensors["slots"].tolist() == [context.slot, SLOTS, SLOTS, SLOTS]
