"""Models on one GPU: in float32 the CPU's tokens; graphs, FlashInfer, experts against plain ways; no hidden waits."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

import models
from kernel.request import Phase, Row, SamplingParams
from kernel.topology import World
from models import experts
from models.attention.pool import KVPool
from models.attention.reference import Batch, attend
from models.cuda.drawn import Drawn
from models.cuda.experts_fp8 import Fp8Experts
from models.cuda.graphs import GraphedDecode
from models.cuda.staging import Ring
from models.tiny import write_checkpoint
from tests.graph_device import FakeDevice, step_maker
from tests.no_waits import no_waits
from tests.tiny import Context, Team

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed")
DEVICE = "cuda:0"
SIZES: dict[str, Any] = {"blocks": 256, "block_size": 16, "slots": 32}
WIDE: dict[str, Any] = {"head_dim": 128, "heads": 8, "kv_heads": 2, "hidden": 256, "expert_width": 128, "layers": 3}


class Gpu:
    """As much of `kernel.device.cuda.CudaDevice` as decode graphs need, without communicators."""

    def __init__(self) -> None:
        least, greatest = torch.cuda.Stream.priority_range()
        self.streams = {Phase.P: torch.cuda.Stream(priority=least), Phase.D: torch.cuda.Stream(priority=greatest)}
        self._pool = torch.cuda.graph_pool_handle()

    def graph(self, phase: Phase) -> Any:
        from kernel.device.cuda_graph import CudaGraph

        return CudaGraph(self.streams[phase], self._pool)

    @contextmanager
    def scope(self, phase: Phase) -> Generator[None]:
        with torch.inference_mode(), torch.cuda.stream(self.streams[phase]):
            yield


class GpuTeam(Team):
    """A `Team` of one rank on the GPU; each phase on its own stream, as the kernel runs them."""

    def __init__(self, path: Path, buckets: Sequence[int] = (), device: Any = None, **options: Any) -> None:
        super().__init__(path, World(1), blocks=SIZES["blocks"], slots=SIZES["slots"], block_size=SIZES["block_size"])
        self.gpu = device or Gpu()
        model: Any = models.load(path, World(1), 0, device=DEVICE, **SIZES, **options)
        if buckets:
            model = GraphedDecode(model, self.gpu, buckets, step_maker(World(1), model.layers))
            model.warm((16, 64))
        self.models = [model]
        torch.cuda.synchronize()

    def driver(self, phase: Phase, rank: int, rows: Any, sizes: Any = (), collectives: Any = None) -> Any:
        driver = super().driver(phase, rank, rows, sizes, collectives)
        if isinstance(self.gpu, Gpu):
            driver._scope = partial(self.gpu.scope, phase)
        return driver

    def forward(self, *args: Any, **named: Any) -> Any:
        results = super().forward(*args, **named)
        torch.cuda.synchronize()
        return results


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(203), k=length)


def play(team: Team, steps: int, bucket: int = 0, greedy: bool = False) -> list[Context]:
    """Prompts of several lengths, prefilled in parts, greedy and drawn, decoded in changing company."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=2**63 + 7),
        SamplingParams(),
    ]
    contexts = [
        team.admit(0, prompt(n, 5 + 13 * n), 96, SamplingParams() if greedy else one) for n, one in enumerate(params)
    ]
    team.prefill(contexts, (3, 21))
    for step in range(steps):
        live = contexts[step % 3 :]
        team.decode(live, bucket=bucket or len(live))
    return contexts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.mark.parametrize("bucket", [0, 4], ids=["eager", "graphs"])
def test_float32_is_the_cpus(bucket: int, tiny: Path) -> None:
    cpu, gpu = Team(tiny, World(1), blocks=256, slots=32, block_size=16), GpuTeam(tiny, (bucket,) if bucket else ())
    for one, other in zip(play(cpu, 30, bucket), play(gpu, 30, bucket), strict=True):
        assert one.tokens == other.tokens
        assert [s.logprob for s in one.drawn] == pytest.approx([s.logprob for s in other.drawn], abs=1e-3)
    if bucket:
        assert (gpu.models[0].replays, gpu.models[0].misses) == (30, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "bfloat16", "attention": "flashinfer"}, marks=needs_flashinfer),
    ],
    ids=["float32", "bfloat16", "flashinfer"],
)
def test_a_replay_draws_what_its_body_draws_eagerly(options: dict[str, Any], wide: Path) -> None:
    """The same kernels on the same inputs, captured or enqueued one by one, give the same numbers."""
    outcomes = []
    for device in (Gpu(), FakeDevice()):
        team = GpuTeam(wide, (2, 4, 8), device, **options)
        outcomes.append([(one.tokens, [s.logprob for s in one.drawn]) for one in play(team, 40, bucket=8)])
        assert team.models[0].replays == 40
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("attention", ["reference", pytest.param("flashinfer", marks=needs_flashinfer)])
def test_bfloat16_is_close_to_float32(attention: str, wide: Path) -> None:
    """Teacher-forced: the mean log-probability error of drawn tokens, where rounding may flip single routes."""
    team = GpuTeam(wide, (4,), dtype="bfloat16", attention=attention)
    exact = Team(wide, World(1), blocks=256, slots=32, block_size=16)
    errors = []
    for context in play(team, 24, bucket=4, greedy=True):
        start = len(context.tokens) - len(context.drawn)
        for at in range(start, len(context.tokens), 5):
            exact._next_block, exact._next_slot = [1], [0]
            again = exact.admit(0, context.tokens[:at], at + 4)
            exact.prefill([again])
            errors.append(abs(again.drawn[0].logprob - context.drawn[at - start].logprob))
    assert sum(errors) / len(errors) < 0.15


@needs_flashinfer
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flashinfer_is_the_reference_layer_by_layer(kv_heads: int) -> None:
    """Prefill and decode plans over a pool of noise against the reference in float32: within bfloat16's rounding."""
    from models.attention.flashinfer import FlashAttention, spread

    heads, dim, size = 8 * kv_heads, 128, 16
    device = torch.device(DEVICE)
    pool = KVPool(2, 400, kv_heads, size, dim, torch.bfloat16, DEVICE)
    pool.storage.normal_()
    exact = KVPool(2, 400, kv_heads, size, dim, torch.float32, DEVICE)
    exact.storage.copy_(pool.storage)
    flash, ring = FlashAttention(pool, heads, device), Ring(device)
    flash.reserve(8)
    rng, blocks = random.Random(0), list(range(399))
    rng.shuffle(blocks)

    def rows(contexts: list[tuple[int, int]]) -> list[Row]:
        found = []
        for start, fed in contexts:
            need = (start + fed - 1) // size + 1
            found.append(Row(0, (0,) * fed, start, tuple(rng.sample(blocks, need)), None))
        return found

    def check(found: torch.Tensor, q: torch.Tensor, mine: list[Row], layer: int) -> None:
        batch = Batch(mine, exact)
        # Contexts that begin here are read from the pool too: what is fed lies there already.
        own = torch.cat(
            [
                exact.storage[layer][list(row.blocks)]
                .permute(0, 3, 1, 2, 4)
                .flatten(0, 1)
                .flatten(1, 2)[row.start : row.start + row.fed]
                for row in mine
            ]
        )
        expected = attend(q.float(), own, exact, layer, batch)
        worst = ((found.float() - expected).abs() / (1 + expected.abs())).max().item()
        assert worst < 2e-2, f"layer {layer} is off by {worst}"

    prefills = ([(0, 1)], [(0, 300), (40, 17), (512, 1)], [(1500, 4), (0, 33)], [(15, 1), (16, 1), (700, 1)])
    large = ([(0, 2200)], [(700, 800), (0, 1500), (3, 10)], [(100, 1100), (33, 1112)], [(3000, 2500)])
    for contexts in (*prefills, *large):
        mine, parcel = rows(contexts), ring.take()
        flash.stage(parcel, mine)
        parcel.ship()
        plan = flash.plan(Phase.P, parcel, [row.fed for row in mine])
        parcel.close()
        for layer in range(2):
            q = torch.randn(sum(row.fed for row in mine), heads, dim, device=device).bfloat16()
            check(plan.attend(layer, q), q, mine, layer)

    kv, pages, last = (torch.zeros(n, dtype=torch.int32, device=device) for n in (9, 400, 8))
    decode = flash.graph(kv, pages, last)
    for _ in range(5):
        mine, parcel = rows([(rng.randrange(900), 1) for _ in range(8)]), ring.take()
        if sum(len(row.blocks) for row in mine) > 400:
            continue
        for name, values in spread(mine, size).items():
            parcel.put(name, values, "int32")
        arrived = parcel.ship()
        for buffer, name in ((kv, "kv"), (pages, "pages"), (last, "last")):
            buffer[: arrived[name].shape[0]].copy_(arrived[name])
        decode.plan(parcel)
        parcel.close()
        for layer in range(2):
            q = torch.randn(8, heads, dim, device=device).bfloat16()
            check(decode.attend(layer, q), q, mine, layer)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", [1, 64, 700])
def test_grouped_experts_are_the_dense_ones(parts: int, rows: int) -> None:
    total, hidden, width, each = 16, 512, 256, 16 // parts

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    up, down = noise(total, 2 * width, hidden) / hidden**0.5, noise(total, width, hidden) / width**0.5
    x, router = noise(rows, hidden), noise(hidden, total) / hidden**0.5
    weights, chosen = experts.route(x, router, 4, True)
    found: dict[str, torch.Tensor] = {}
    for first in range(0, total, each):
        mine = slice(first, first + each)
        held = experts.Experts(up[mine], down[mine], first, total)
        exact = experts.Experts(up[mine].float(), down[mine].float(), first, total)
        small = Fp8Experts(up[mine], down[mine], first, total)
        for name, result in (
            ("dense", held.dense(x, weights, chosen)),
            ("permuted", held.permuted(x, weights, chosen)),
            ("chosen", held(x, weights, chosen)),
            ("fp8", small(x, weights, chosen)),
            ("exact", exact.dense(x.float(), weights.float(), chosen)),
        ):
            found[name] = found.get(name, torch.zeros(())).to(DEVICE) + result.float()
    for name, tolerance in (("dense", 0.02), ("permuted", 0.02), ("chosen", 0.02), ("fp8", 0.1)):
        error = (found[name] - found["exact"]).norm() / found["exact"].norm()
        assert error < tolerance, f"{name} is off by {error}"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "bfloat16", "attention": "flashinfer"}, marks=needs_flashinfer),
        pytest.param({"dtype": "bfloat16", "attention": "flashinfer", "quantization": "fp8"}, marks=needs_flashinfer),
    ],
    ids=["float32", "bfloat16", "flashinfer", "fp8"],
)
def test_nothing_waits_for_the_device(options: dict[str, Any], wide: Path) -> None:
    """After warm-up, P segments and D launches enqueue without a synchronising call or a device allocation."""
    team = GpuTeam(wide, (4,), **options)
    play(team, 8, bucket=4)
    team._next_block, team._next_slot = [1], [0]
    coming = team.admit(0, prompt(1, 60), 80, SamplingParams(temperature=1.0, top_p=0.9, seed=1))
    running = [team.admit(0, prompt(n, 9), 64, SamplingParams(temperature=0.5 * (n % 2), seed=n)) for n in range(4)]
    team.prefill(running)
    before = torch.cuda.memory_stats(DEVICE)
    results = []
    with no_waits():
        rows = [Row(coming.slot, tuple(coming.tokens), 0, coming.blocks, coming.params)]
        prefill = team.driver(Phase.P, 0, rows)
        for boundary in range(1, team.models[0].layers + 1):
            prefill.advance(boundary)
            fed = [Row(one.slot, None, len(one.tokens) - 1 + boundary - 1, one.blocks, one.params) for one in running]
            decode = team.driver(Phase.D, 0, fed, [4])
            assert decode.advance(1 << 30)
            results.append(decode.result)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats(DEVICE)
    assert prefill.finished
    assert after["num_device_alloc"] == before["num_device_alloc"]
    assert after["num_sync_all_streams"] == before["num_sync_all_streams"]
    assert all(isinstance(result, Drawn) for result in (prefill.result, *results))
    source = getattr(team.models[0], "_model").source  # noqa: B009
    assert source.outbox.grown == 0
    assert all(ring.grown == 0 for ring in source.rings.values())
    assert len(list(prefill.result)) == 1
    assert [len(list(result)) for result in results] == [4] * len(results)


def test_a_long_run_of_launches_without_a_look(wide: Path) -> None:
    """The host may be two iterations ahead of the device, as the kernel's lag allows: buffers take turns."""
    eager, ahead = (GpuTeam(wide, (4,), dtype="bfloat16") for _ in range(2))
    contexts = [[team.admit(0, prompt(n, 7), 96) for n in range(3)] for team in (eager, ahead)]
    for team, mine in zip((eager, ahead), contexts, strict=True):
        team.prefill(mine)
    for _ in range(40):
        eager.decode(contexts[0], bucket=4)
    flying: list[Any] = []
    for step in range(40):
        rows = [Row(one.slot, None, 7 + step, one.blocks, one.params) for one in contexts[1]]
        driver = ahead.driver(Phase.D, 0, rows, [4])
        assert driver.advance(1 << 30)
        flying.append(driver.result)
        if len(flying) > 1:
            ahead.keep(contexts[1], list(flying.pop(0)))
    ahead.keep(contexts[1], list(flying.pop()))
    assert [one.tokens for one in contexts[0]] == [one.tokens for one in contexts[1]]


def test_dummy_weights_are_made_on_the_device(tmp_path: Path) -> None:
    config = json.loads((write_checkpoint(tmp_path / "shape", **WIDE) / "config.json").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 12}))
    model: Any = models.load(bare, World(1), 0, device=DEVICE, weights="dummy", dtype="bfloat16", **SIZES)
    assert {tensor.device.type for tensor in model.weights.tensors()} == {"cuda"}
    graphed = GraphedDecode(model, Gpu(), (8,), step_maker(World(1), 12))
    graphed.warm((64,))
    torch.cuda.synchronize()
    assert model.pool.storage[:, model.scratch_block].isfinite().all()
    assert model.pool.storage[:, model.scratch_block].any()
