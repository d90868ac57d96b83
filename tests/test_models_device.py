"""The parts of a forward on a device that need no device: staging, results, the sampler, experts, dummy weights."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import models
from kernel.errors import UsageError
from kernel.request import Phase, Row, SamplingParams
from kernel.topology import World
from models import experts, qwen3_moe, sampling
from models.attention import flashinfer as attention_flashinfer
from models.attention.flashinfer import fills, spread, workspace_bytes
from models.config import Qwen3MoeConfig, read_config
from models.cuda import experts_fp8
from models.cuda import sampling as sampling_device
from models.cuda.drawn import Outbox
from models.cuda.sampling import DrawRows, Way, columns, draw, way
from models.cuda.staging import Ring
from models.tiny import write_checkpoint
from models.weights.dummy import DummyTensors
from models.weights.qwen3_moe import read_weights
from tests.fake_flashinfer import FakeFlashInfer
from tests.graph_device import FakeDevice, step_maker
from tests.test_models_layers import noise, plain_mixture
from tests.tiny import Team

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
PAPER = Path(__file__).parent.parent / "bench" / "gpu" / "models" / "paper"
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 0.05, 0.7, 1.0, 1.3, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 17, 1000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(-(2**65), 2**65),
)


def tensors(arrays: dict[str, Any]) -> DrawRows:
    return DrawRows.of({name: torch.from_numpy(array) for name, array in arrays.items()})


# -- sampler ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_uniform_numbers_are_those_of_the_host(draws: list[tuple[int, int]]) -> None:
    seeds = np.array([seed & (1 << 64) - 1 for seed, _ in draws], np.uint64).view(np.int64)
    found = sampling_device.uniform(torch.from_numpy(seeds), torch.tensor([at for _, at in draws]))
    assert torch.equal(found, sampling.uniform([seed for seed, _ in draws], [at for _, at in draws]))


@given(
    st.integers(0, 1000),
    st.lists(PARAMS, min_size=1, max_size=6),
    st.integers(2, 40),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_draws_are_those_of_the_host(
    seed: int, params: list[SamplingParams], vocab: int, spare: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Every way that serves the batch, padded or not, with ties: the host's tokens and log-probabilities."""
    rows = len(params) + spare
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    if data.draw(st.booleans()):
        logits = logits.round()  # ties
    logits = logits.to(dtype)
    at = [data.draw(st.integers(1, 2**33)) for _ in params]
    tokens, logprobs = sampling.sample(logits[: len(params)], params, at)
    need = way(params)
    for how in list(Way)[list(Way).index(need) :]:
        drawn = draw(logits, tensors(columns(params, at, vocab, rows)), how)
        assert drawn.shape == (rows, 2)
        found, mine = drawn[:, 0], drawn[:, 1].contiguous().view(torch.float64)
        assert found[: len(params)].tolist() == tokens.tolist(), how
        assert torch.allclose(mine[: len(params)], logprobs.double(), atol=1e-5)
        assert torch.equal(found[len(params) :], logits[len(params) :].argmax(-1)), "padding is greedy"


def test_the_way_is_the_least_that_serves() -> None:
    greedy, cut = SamplingParams(top_k=3), SamplingParams(temperature=1.0, top_p=0.5)
    assert way([]) == way([greedy]) == Way.GREEDY
    assert way([greedy, SamplingParams(temperature=0.5)]) is Way.PLAIN
    assert way([greedy, SamplingParams(temperature=0.5), cut]) is Way.TRUNCATED


def test_a_row_of_nan_draws_a_token_of_the_vocabulary() -> None:
    logits = torch.full((2, 9), float("nan"))
    params = [SamplingParams(temperature=1.0)] * 2
    for how in Way:
        drawn = draw(logits, tensors(columns(params, [1, 2], 9)), how)
        assert ((drawn[:, 0] >= 0) & (drawn[:, 0] < 9)).all()


# -- staging and results ------------------------------------------------------------------------------------------


ARRAYS = st.lists(
    st.tuples(st.sampled_from([np.int64, np.int32, np.float32, np.float64, np.bool_]), st.lists(st.integers(0, 1))),
    max_size=6,
)


@given(st.lists(ARRAYS, min_size=1, max_size=6), st.sampled_from([16, 1 << 12]))
def test_arrays_arrive_as_they_were_put(batches: list[Any], nbytes: int) -> None:
    ring = Ring(CPU, nbytes, 2)
    for number, batch in enumerate(batches):
        parcel = ring.take()
        assert parcel.index == number % 2
        for at, (kind, values) in enumerate(batch[:3]):
            parcel.put(f"a{at}", values, kind)
        first = parcel.ship()
        for at, (kind, values) in enumerate(batch[3:]):
            parcel.put(f"b{at}", values, kind)
        second = parcel.ship()
        parcel.close()
        assert {*first, *second} == set(parcel.tensors)
        for name, found in parcel.tensors.items():
            kind, values = batch[int(name[1:]) + 3 * (name[0] == "b")]
            assert found.numpy().dtype == kind
            assert found.tolist() == [kind(value) for value in values]
            assert torch.equal(parcel.host(name), found)
    assert ring.waits == 0
    assert nbytes == 16 or ring.grown == 0


class Slow:
    """An event that is not there yet when first asked."""

    def __init__(self) -> None:
        self.asked = self.waited = 0

    def query(self) -> bool:
        self.asked += 1
        return self.waited > 0

    def synchronize(self) -> None:
        self.waited += 1

    def record(self) -> None:
        pass


def test_a_buffer_in_use_is_waited_for() -> None:
    ring = Ring(CPU, 64, 2)
    events = [Slow(), Slow()]
    ring._events = list(events)  # type: ignore[arg-type]
    for _ in range(2):
        ring.take().close()
    assert [event.asked for event in events] == [0, 0], "its first turn needs no question"
    ring.take()
    assert ([event.waited for event in events], ring.waits) == ([1, 0], 1)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**40), st.floats(-50, 0)), max_size=4), max_size=9), st.data())
def test_results_come_back_to_their_rows(batches: list[list[tuple[int, float]]], data: st.DataObject) -> None:
    box, waiting = Outbox(CPU, 3, boxes=2), []
    for batch in batches:
        asked = [True] * len(batch)
        for _ in range(data.draw(st.integers(0, 2))):
            asked.insert(data.draw(st.integers(0, len(asked))), False)
        numbers = torch.tensor([[token, 0] for token, _ in batch] + [[7, 7]], dtype=torch.int64)
        numbers[:-1, 1] = torch.tensor([logprob for _, logprob in batch], dtype=torch.float64).view(torch.int64)
        drawn = box.post(numbers, asked)
        assert len(drawn) == len(asked)
        waiting.append((drawn, asked, batch))
    for drawn, asked, batch in data.draw(st.permutations(waiting)):
        found = list(drawn)
        assert [one is not None for one in found] == asked
        assert [(one.token, one.logprob) for one in found if one] == batch
        assert drawn == found
        assert drawn[len(found) :] == []
    grown = box.grown
    for _ in range(20):
        list(box.post(torch.zeros(1, 2, dtype=torch.int64), [True]))
    assert box.grown == grown, "buffers that were read are used again"


def test_a_result_that_is_looked_at_early_waits() -> None:
    box = Outbox(CPU, 3)
    event: Any = Slow()
    box._free[-1].event = event
    drawn = box.post(torch.zeros(2, 2, dtype=torch.int64), [True, True])
    assert (len(drawn), event.waited) == (2, 0)
    assert drawn[1] is not None
    assert event.waited == 1
    assert list(drawn) == [drawn[0], drawn[1]]
    assert event.waited == 1


# -- experts ------------------------------------------------------------------------------------------------------


def careless(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """grouped_mm, with NaN where the device leaves whatever was in memory."""
    ends, out = [0, *offs.tolist()], x.new_full((x.shape[0], weight.shape[2]), float("nan"))
    for expert, (start, stop) in enumerate(pairwise(ends)):
        out[start:stop] = x[start:stop] @ weight[expert]
    return out


@given(st.integers(0, 12), st.sampled_from([4, 8]), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_permuted_experts_of_all_shards_sum_to_the_mixture(
    rows: int, total: int, k: int, parts: int, seed: int
) -> None:
    hidden, width, each = 8, 16, total // parts
    x, router = noise(rows, hidden, seed=seed), noise(total, hidden, seed=seed + 1)
    up, down = noise(total, 2 * width, hidden, seed=seed + 2), noise(total, width, hidden, seed=seed + 3)
    weights, chosen = experts.route(x, router.t(), k, True)
    found = torch.zeros_like(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "grouped_mm", careless)
        for first in range(0, total, each):
            mine = slice(first, first + each)
            found += experts.Experts(up[mine], down[mine], first, total).permuted(x, weights, chosen)
    expected = plain_mixture(x, router, up, down, k, True)
    assert torch.allclose(found.double(), expected, atol=1e-3, rtol=1e-4)


def test_experts_on_a_device_choose_by_rows_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[tuple[str, int]] = []
    for way_ in ("dense", "permuted"):

        def take(self: Any, x: torch.Tensor, *_: Any, way_: str = way_) -> torch.Tensor:
            ways.append((way_, x.shape[0]))
            return x

        monkeypatch.setattr(experts.Experts, way_, take)
    monkeypatch.setattr(experts, "DENSE_BYTES", 2 * 8 * 32 * 4 * 50)
    for dtype, rows in ((torch.bfloat16, 16), (torch.bfloat16, 129), (torch.float32, 120), (torch.bfloat16, 0)):
        held = experts.Experts(torch.zeros(8, 64, 64, dtype=dtype), torch.zeros(8, 32, 64, dtype=dtype), 0, 8)
        held._cuda = True
        x, chosen = torch.zeros(rows, 64, dtype=dtype), torch.zeros(rows, 2, dtype=torch.int64)
        assert held(x, x[:, :2], chosen).shape == x.shape
    assert ways == [("dense", 16), ("permuted", 129), ("dense", 50), ("dense", 50), ("dense", 20), ("dense", 0)]


def scaled(
    x: torch.Tensor, weight: torch.Tensor, scale_a: torch.Tensor, _a: Any, scale_b: torch.Tensor, _b: Any, **more: Any
) -> torch.Tensor:
    """scaled_grouped_mm by its definition, with its layout rules."""
    assert x.dtype == weight.dtype == torch.float8_e4m3fn
    assert x.is_contiguous()
    assert weight.stride(1) == 1
    assert (scale_a.shape, scale_b.shape) == ((x.shape[0],), (weight.shape[0], weight.shape[2]))
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert more.pop("output_dtype") == torch.bfloat16
    wide = weight.float() * scale_b.unsqueeze(1)
    return careless(x.float() * scale_a.unsqueeze(1), wide, **more).bfloat16()


@pytest.mark.parametrize("parts", [1, 2])
def test_float8_experts_are_close_to_the_mixture(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled)
    total, hidden, width, each = 8, 64, 32, 8 // parts
    x, router = noise(20, hidden).bfloat16(), noise(total, hidden, seed=1).bfloat16()
    up, down = (noise(*shape, seed=n).bfloat16() / 8 for n, shape in ((2, (8, 64, 64)), (3, (8, 32, 64))))
    weights, chosen = experts.route(x, router.t(), 3, True)
    found = torch.zeros_like(x)
    for first in range(0, total, each):
        mine = slice(first, first + each)
        found += experts_fp8.Fp8Experts(up[mine], down[mine], first, total)(x, weights, chosen)
    expected = plain_mixture(x, router, up, down, 3, True)
    assert (found.double() - expected).norm() < 0.08 * expected.norm()
    assert width * 2 == up.shape[1]


def test_float8_rows_are_scaled_one_by_one() -> None:
    x = torch.tensor([[1.0, -448.0], [1e-3, 5e-4], [0.0, 0.0]])
    rows, scale = experts_fp8.quantise(x)
    assert torch.allclose(rows.float() * scale.unsqueeze(1), x, rtol=0.07)
    assert rows.float().abs().amax(1).tolist() == [448.0, 448.0, 0.0]


# -- FlashInfer, by a stand-in that reads what it is given ---------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=5), st.sampled_from([1, 4, 16]))
def test_index_arrays_say_where_each_context_lies(contexts: list[tuple[int, int]], size: int) -> None:
    rows = [
        Row(n, (0,) * fed, start, tuple(range(100 * n, 100 * n + 61)), None) for n, (start, fed) in enumerate(contexts)
    ]
    found = spread(rows, size)
    assert len(found["qo"]) == len(found["kv"]) == len(rows) + 1
    for n, (start, fed) in enumerate(contexts):
        pages = found["pages"][found["kv"][n] : found["kv"][n + 1]]
        places = [(page, at) for page in pages for at in range(size)]
        length = (len(pages) - 1) * size + found["last"][n]
        assert length == found["lens"][n] == start + fed
        assert places[:length] == [(100 * n + at // size, at % size) for at in range(length)]
        assert found["qo"][n + 1] - found["qo"][n] == fed
    with pytest.raises(IndexError, match="do not fit"):
        spread([Row(0, None, size, (3,), None)], size)


def test_workspace_holds_the_split_tiles() -> None:
    # 132 SMs, 4 KV heads: 66 tiles of 16 rows for each of 32 heads; 256 rows of 8 heads a KV head: 128 + 256 tiles.
    assert workspace_bytes(32, 4, 128, 64, 132, 16) == 32 * 96 * 16 * 129 * 4 + (16 << 20)
    assert workspace_bytes(32, 4, 128, 0, 132, 16) == 32 * 66 * 16 * 129 * 4 + (16 << 20)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlashInfer]:
    library = FakeFlashInfer()
    monkeypatch.setattr(attention_flashinfer, "library", lambda: library)
    monkeypatch.setattr(attention_flashinfer, "check_shape", lambda *_: None)
    monkeypatch.setattr(attention_flashinfer, "processors", lambda _: 4)
    monkeypatch.setattr(attention_flashinfer, "hopper", lambda _: True)
    return library


@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_over_flashinfer_draws_the_same(graphs: bool, tmp_path: Path, fake: FakeFlashInfer) -> None:
    from models.cuda.graphs import GraphedDecode

    path = write_checkpoint(tmp_path, head_dim=8, heads=8, kv_heads=2)
    model: Any = qwen3_moe.load(
        path, World(1), 0, blocks=96, block_size=4, slots=16, attention="flashinfer", staged=True
    )
    plain, flashed = Team(path, World(1)), Team(path, World(1))
    device = FakeDevice()
    flashed.models = [GraphedDecode(model, device, (2, 4), step_maker(World(1), 4), enabled=graphs)]
    flashed.models[0].warm((5,))
    outcomes = []
    for team in (plain, flashed):
        contexts = [team.admit(0, list(range(3 * n, 7 * n + 4)), 30) for n in range(3)]
        team.prefill(contexts, (3, 8))
        for step in range(12):
            team.decode(contexts[step % 3 :], bucket=4 if step % 2 else 3 - step % 3)
        outcomes.append([context.tokens for context in contexts])
        for context in contexts:
            assert all(-20 < sampled.logprob <= 0 for sampled in context.drawn)
    assert outcomes[0] == outcomes[1]
    assert flashed.models[0].replays == (graphs and 8)
    assert fake.pinned > 2, "plans took turns with their pinned buffers"


@pytest.mark.parametrize(
    ("attention", "backends"), [("flashinfer", ["fa3", "fa2"]), ("flashinfer-fa2", ["fa2", "fa2"])]
)
def test_prefills_that_fill_the_device_take_its_own_kernels(
    attention: str, backends: list[str], tmp_path: Path, fake: FakeFlashInfer
) -> None:
    path = write_checkpoint(tmp_path, head_dim=8, heads=8, kv_heads=2)
    model: Any = qwen3_moe.load(path, World(1), 0, blocks=96, block_size=4, slots=16, attention=attention, staged=True)
    for tokens in (64, 63):  # of 8 heads: a tile of 128 queries for each of four SMs
        team = Team(path, World(1))
        team.models = [model]
        team.prefill([team.admit(0, list(range(tokens)), tokens + 4)])
    found = [next(name for name, seen in fake.planned.items() if tokens in seen) for tokens in (64, 63)]
    assert found == backends


def test_what_fills_a_device() -> None:
    assert fills(528, 1, 32, 132)
    assert not fills(527, 1, 32, 132), "fewer tiles than SMs"
    assert not fills(2000, 40, 32, 132), "tiles less than half full"
    assert fills(65_536, 8, 64, 132)
    assert not fills(300_000, 1, 64, 132), "the schedule might not fit"


def test_a_plan_that_does_not_fit_the_graph_is_an_error(tmp_path: Path, fake: FakeFlashInfer) -> None:
    from kernel.errors import ModelError
    from models.cuda.inputs import StaticInputs

    path = write_checkpoint(tmp_path, layers=1)
    model: Any = qwen3_moe.load(path, World(1), 0, blocks=8, block_size=4, slots=2, attention="flashinfer", staged=True)
    inputs = StaticInputs(model.source, 2, 8, model.scratch_block)
    inputs.fill(())
    inputs.fill(())
    fake.info = [5, 5]
    with pytest.raises(ModelError, match=r"planned \[5, 5\]"):
        inputs.fill(())


# -- loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash"}, "attention flash: choose one of reference, flashinfer, flashinfer-fa2"),
        ({"weights": "random"}, "weights random: choose one of checkpoint, dummy"),
        ({"quantization": "int4"}, "quantization int4: choose one of None, fp8"),
        ({"attention": "flashinfer"}, r"cannot run with device cpu, dtype float32, head_dim 16 .*attention reference"),
        ({"quantization": "fp8"}, "fp8 cannot run with device cpu, dtype float32; it needs CUDA and bfloat16"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, layers=1)
    with pytest.raises(UsageError, match=message):
        models.load(path, World(1), 0, blocks=4, block_size=4, slots=2, **options)


def dummy(path: Path, world: World, rank: int) -> Any:
    config = read_config(path)
    assert isinstance(config, Qwen3MoeConfig)
    return read_weights(DummyTensors(path, config), config, world, rank, torch.bfloat16)


def test_dummy_weights_need_a_config_alone_and_agree_where_ranks_must(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, layers=2, dense_layers=(0,), attention_bias=True)
    (path / "model.safetensors").unlink()
    one, same, third = (dummy(path, World(4, 2, 4), rank) for rank in (0, 2, 1))
    assert torch.equal(one.embed, same.embed)
    assert torch.equal(one.layers[1].attention.qkv, same.layers[1].attention.qkv)
    assert torch.equal(one.layers[1].experts.router, third.layers[1].experts.router)
    assert not torch.equal(one.layers[1].experts.up, same.layers[1].experts.up)
    assert not torch.equal(one.embed, third.embed)
    model: Any = models.load(path, World(1), 0, blocks=90, block_size=4, slots=4, weights="dummy", dtype="bfloat16")
    team = Team(write_checkpoint(tmp_path / "team"), World(1))
    team.models = [model]
    team.programs = {phase: replace(program, layers=2) for phase, program in team.programs.items()}
    contexts = [team.admit(0, [n, 5, 9], 60) for n in range(3)]
    team.prefill(contexts)
    for _ in range(40):
        team.decode(contexts)
    assert all(np.isfinite(s.logprob) for context in contexts for s in context.drawn)
    assert len({s.token for context in contexts for s in context.drawn}) > 20
    assert Phase.D in team.programs


def test_the_paper_shaped_model_fits_one_gpu() -> None:
    config = read_config(PAPER)
    assert isinstance(config, Qwen3MoeConfig)
    numbers = sum(int(np.prod(shape)) for shape in DummyTensors(PAPER, config).shapes.values())
    assert 34e9 < 2 * numbers < 37e9
    assert (config.layers, config.hidden_size, config.experts_per_token) == (42, 2560, 8)
    assert json.loads((PAPER / "config.json").read_text())["torch_dtype"] == "bfloat16"
