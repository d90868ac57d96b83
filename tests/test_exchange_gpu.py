"""The expert exchange on real GPUs: graphs that replay between P's segments, memory as computed, and a clean end."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernel.device.bounded import all_of
from kernel.exchange.sizes import GRANULE, exchange_bytes, footprint
from kernel.exchange.states import Place
from kernel.record import read_run
from kernel.request import Phase
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.device import DeviceOptions
from rollout.engine import Engine
from tests.engines import trajectories
from tests.exchanges import DEEP_EP, SKEWS, Case, Substrate, build, computed, drawn, prefill, stream_of, verdict
from tests.ranks import Me, Ranks
from tests.splits import dispatches, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or find_spec("deep_ep_cpp") is None, reason="needs two GPUs and deep_ep"
    ),
]


@pytest.fixture(scope="module", params=[DEEP_EP], ids=str)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    substrate: Substrate = request.param
    with Ranks(World(substrate.ranks, substrate.ranks, substrate.ranks), timeout_s=120) as ranks:
        ranks.run(build, substrate, str(tmp_path_factory.mktemp("store") / "file"))
        yield ranks


def capture(me: Me) -> None:
    """A graph of two layers over static inputs: experts are affine, so that every replay can be checked."""
    substrate: Substrate = me.keep["substrate"]
    shape, low = substrate.shape, me.keep["exchange"].low_latency
    kind = getattr(torch, substrate.dtype)
    rows = torch.zeros((shape.decode_rows, shape.hidden), dtype=kind, device="cuda")
    experts = torch.full((shape.decode_rows, shape.topk), -1, device="cuda")
    weights = torch.zeros((shape.decode_rows, shape.topk), dtype=kind, device="cuda")

    def body() -> list[Any]:
        out = []
        for layer in range(2):
            received = low.dispatch(Place(0, layer), rows, experts, weights)
            out.append(low.combine(Place(0, layer), computed(received, shape, me.rank)))
        return out

    with stream_of(me, Phase.D):
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with low.capture("two layers") as hold, torch.cuda.graph(graph, stream=me.keep["streams"][Phase.D]):
            out = body()
    me.keep["graph"] = (graph, hold, (rows, experts, weights), out)


async def replay_between(me: Me, seed: int, count: int) -> list[str]:
    """P's operations with replays of D's graph before, inside and behind them."""
    substrate: Substrate = me.keep["substrate"]
    shape, exchange = substrate.shape, me.keep["exchange"]
    graph, hold, inputs, out = me.keep["graph"]
    source, wrong = random.Random(seed), []

    def replay(number: int) -> None:
        sizes = tuple(source.randrange(shape.decode_rows + 1) for _ in range(shape.ranks))
        case = Case(sizes, source.choice(SKEWS), 1000 + number)
        with stream_of(me, Phase.D):
            for static, fresh in zip(inputs, drawn(case, substrate, me.rank), strict=True):
                static.fill_(-1) if static.dtype == torch.int64 else static.zero_()
                static[: fresh.shape[0]] = fresh.to("cuda")
            exchange.low_latency.replayed(hold)
            graph.replay()
            for layer in out:
                wrong.append(verdict(me, case, layer[: sizes[me.rank]]))

    for number in range(count):
        sizes = tuple(source.randrange(65) for _ in range(shape.ranks))
        case = Case(sizes, source.choice(SKEWS), number)
        rows, experts, weights = (each.to("cuda") for each in drawn(case, substrate, me.rank))
        torch.cuda.synchronize()
        with stream_of(me, Phase.P):
            pending = exchange.normal.notify(case.place, experts)
        replay(3 * number)
        await pending.event.wait()
        exchange.normal.permit(pending)
        with stream_of(me, Phase.P):
            received = exchange.normal.submit(pending, rows, weights)
        replay(3 * number + 1)
        with stream_of(me, Phase.P):
            wrong.append(
                verdict(me, case, exchange.normal.combine(case.place, computed(received, shape, me.rank)))
            )
        replay(3 * number + 2)
    return [each for each in wrong if each]


def test_graphs_replay_between_the_parts_of_a_prefill(ranks: Ranks) -> None:
    ranks.run(capture_once)
    assert ranks.run(replay_between, 5, 40) == [[], []]


def sizes(me: Me) -> tuple[int, int]:
    exchange = me.keep["exchange"]
    return exchange.normal.nbytes, exchange.low_latency.nbytes


def test_memory_is_what_the_formulas_say(ranks: Ranks) -> None:
    substrate: Substrate = DEEP_EP
    wanted = footprint(substrate.shape)
    assert ranks.run(sizes) == [(wanted.normal, wanted.low_latency)] * 2


def taken(me: Me) -> int:
    return int(me.keep["taken"])


def test_what_it_takes_of_a_gpu_is_what_the_kv_pool_leaves_it(ranks: Ranks) -> None:
    """NVSHMEM loads its kernels too, and keeps tables of its own: about as much as its own granule leaves unused."""
    shape = DEEP_EP.shape
    for each in ranks.run(taken):
        assert footprint(shape).total < each <= exchange_bytes("deepep", shape) + GRANULE // 2


def hints(me: Me, case: tuple[int, int, int, int, int]) -> tuple[int, int]:
    import deep_ep

    rows, hidden, size, experts, sms = case
    config = deep_ep.Config(sms, 6, 256, 6, 128)
    return (
        config.get_nvl_buffer_size_hint(2 * hidden, size),
        deep_ep.Buffer.get_low_latency_rdma_size_hint(rows, hidden, size, experts),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    return write_checkpoint(path, hidden=2048, layers=3, heads=4, kv_heads=2, head_dim=64, top_k=3, expert_width=64)


async def drawn_tokens(checkpoint: Path, policy: str, options: DeviceOptions) -> list[list[tuple[int, float]]]:
    """Tokens with their log-probabilities of a few turns, whose contexts grow."""
    world = World(2, 2, 2)
    engine = Engine(checkpoint, world, policy=policy, device=options, kv_tokens=8192, prefill_tokens=64, rows=8)
    assert engine.exchange.substrate == options.exchange
    async with engine:
        done = await trajectories(engine, count=6, turns=3, seed=2)
    turns = [turn.done for each in done for turn in each]
    return [list(zip(turn.tokens, turn.logprobs, strict=True)) for turn in turns]


@pytest.mark.parametrize("policy", ["normal", "fine:span=1"])
@pytest.mark.parametrize("graphs", [True, False])
async def test_a_model_over_deep_ep_draws_what_collectives_draw(policy: str, graphs: bool, checkpoint: Path) -> None:
    """In bfloat16, whose roundings may flip a draw and all behind it: what was drawn alike has like probabilities."""
    options = DeviceOptions("cuda", graphs=graphs, exchange="deepep")
    ours = await drawn_tokens(checkpoint, policy, options)
    plain = await drawn_tokens(checkpoint, policy, replace(options, exchange="none"))
    errors = []
    for one, other in zip(ours, plain, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a[0] != b[0]), len(one))
        errors += [abs(a[1] - b[1]) for a, b in zip(one[:same], other[:same], strict=True)]
    assert len(errors) > 20
    assert max(errors) < 0.2


async def test_multiplexing_changes_no_token(checkpoint: Path) -> None:
    options, found = DeviceOptions("cuda", exchange="deepep"), []
    for policy in ("normal", "fine:span=1", "global_enqueue"):
        turns = await drawn_tokens(checkpoint, policy, options)
        found.append([[token for token, _ in turn] for turn in turns])
    assert found[0] == found[1] == found[2]


async def test_nothing_is_left_for_after_the_warm_up(checkpoint: Path) -> None:
    assert await drawn_tokens(checkpoint, "fine:span=1", DeviceOptions("cuda", exchange="deepep", quiet=True))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("hidden", [2048, 2560, 7168])
@pytest.mark.parametrize(("rows", "experts"), [(32, 512), (64, 64), (128, 288), (4, 8)])
def test_formulas_are_deep_eps_hints(ranks: Ranks, size: int, hidden: int, rows: int, experts: int) -> None:
    from kernel.exchange.shape import Shape

    for sms in (12, 20):
        wanted = footprint(Shape(size, experts, hidden, 4, 64, rows), num_sms=sms)
        assert ranks.run(hints, (rows, hidden, size, experts, sms)) == [(wanted.normal, wanted.low_latency)] * 2


def capture_once(me: Me) -> None:
    if "graph" not in me.keep:
        capture(me)


async def ended(me: Me) -> list[str]:
    """Everything goes in order: a graph keeps D's buffer, the buffers keep the runtime."""
    from tests.exchanges import raised

    exchange = me.keep["exchange"]
    graph, hold, _, _ = me.keep["graph"]
    told = [raised(exchange.close), await prefill(me, Case((3, 4), "even", 1))]
    torch.cuda.synchronize()
    graph.reset()
    exchange.low_latency.dropped(hold)
    # As devices close what they own: on a thread that has chosen no GPU.
    assert all_of([("close", exchange.close)], 20) == []
    exchange.close()
    return [*told, raised(exchange.low_latency.dispatch, Place(), *[None] * 3)]


def test_a_graph_keeps_the_buffer_and_everything_ends_in_order(ranks: Ranks) -> None:
    ranks.run(capture_once)
    assert ranks.run(ended) == [["StillHeld", "", "AttributeError"]] * 2


@pytest.mark.parametrize("exchange", ["deepep", "nccl"])
async def test_the_record_holds_the_rows_of_each_dispatch(exchange: str, checkpoint: Path, tmp_path: Path) -> None:
    """Under its number, in wide segments too; a row goes to one rank, or to both."""
    options, world = DeviceOptions("cuda", exchange=exchange), World(2, 2, 2)
    engine = Engine(
        checkpoint, world, policy="fine:span=2", device=options, kv_tokens=8192, prefill_tokens=64, rows=8, out=tmp_path
    )
    async with engine:
        await trajectories(engine, count=6, turns=2, seed=4)
    came: dict[tuple[str, int], int] = {}
    rows: dict[tuple[str, int], int] = {}
    for recording in read_run(tmp_path).values():
        rows = dispatches(recording)
        assert sorted(told(recording)) == sorted(rows) != []
        for key, each in recording.sizes.items():
            came[key] = came.get(key, 0) + sum(each)
    assert all(rows[key] <= came[key] <= 2 * rows[key] for key in rows)
