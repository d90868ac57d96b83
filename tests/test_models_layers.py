"""Norm, rotary embedding, experts and paged attention, each against a plain computation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernel.ports import Received
from kernel.request import Row
from models import experts
from models.attention.pool import KVPool
from models.attention.reference import Batch, attend
from models.layers import Norm, Rotary, embed


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norm(dtype: torch.dtype, scale: float) -> None:
    x, weight = (noise(5, 48) * scale).to(dtype), noise(48, seed=1).to(dtype)
    x[0] = 0
    found = Norm(weight, 1e-5)(x)
    double = x.double()
    expected = double * (double.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert found.dtype == dtype
    assert not found[0].any()
    assert torch.allclose(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_rotary_turns_pairs_by_position_times_frequency() -> None:
    d, theta, positions = 8, 100.0, torch.tensor([0, 1, 7, 100000])
    x = noise(4, 3, d)
    rotary = Rotary(d, theta, "cpu")
    found = torch.empty_like(x)
    rotary.turn(x, rotary.angles(positions.view(-1, 1, 1), torch.float32), out=found)
    pairs = torch.complex(x[..., : d // 2].double(), x[..., d // 2 :].double())
    frequency = theta ** (-torch.arange(0, d, 2).double() / d)
    turned = pairs * torch.exp(1j * positions.double()[:, None] * frequency)[:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    # float32 angles: a position of 100,000 is known to about 1/128 of a radian.
    assert torch.allclose(found[:3].double(), expected[:3], atol=1e-5)
    assert torch.allclose(found[3].double(), expected[3], atol=3e-2)


@given(st.integers(1, 5), st.lists(st.integers(0, 22), max_size=9))
def test_embedding_shards_sum_to_the_table(parts: int, tokens: list[int]) -> None:
    rows = -(-23 // parts)
    table = torch.zeros(rows * parts, 4)
    table[:23] = noise(23, 4)
    ids = torch.tensor(tokens, dtype=torch.int64)
    shards = [embed(table[p * rows : (p + 1) * rows], p * rows, ids, parts == 1) for p in range(parts)]
    assert torch.equal(torch.stack(shards).sum(0), table[ids])
    assert ids.tolist() == tokens


def plain_mixture(
    x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor, k: int, normalise: bool
) -> torch.Tensor:
    """Row by row and expert by expert, in float64."""
    x, router, up, down = x.double(), router.double(), up.double(), down.double()
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        probs = (router @ x[row]).softmax(-1)
        best = probs.topk(k)
        total = best.values.sum() if normalise else 1.0
        for share, expert in zip(best.values, best.indices.tolist(), strict=True):
            gate, value = (up[expert] @ x[row]).chunk(2)
            out[row] += share / total * (down[expert].t() @ (F.silu(gate) * value))
    return out


@given(
    rows=st.integers(0, 12),
    total=st.sampled_from([1, 4, 8, 12]),
    k=st.integers(1, 4),
    normalise=st.booleans(),
    parts=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 4)]),
    grouped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_experts_of_all_shards_sum_to_the_mixture(
    rows: int, total: int, k: int, normalise: bool, parts: tuple[int, int], grouped: bool, seed: int
) -> None:
    hidden, width = 8, 16
    k, ep = min(k, total), parts[0] if total % parts[0] == 0 else 1
    columns, each = width // parts[1], total // ep
    x, router = noise(rows, hidden, seed=seed), noise(total, hidden, seed=seed + 1)
    up, down = noise(total, 2 * width, hidden, seed=seed + 2), noise(total, width, hidden, seed=seed + 3)
    expected = plain_mixture(x, router, up, down, k, normalise)
    weights, chosen = experts.route(x, router.t(), k, normalise)
    found = torch.zeros_like(x)
    for first in range(0, total, each):
        for start in range(0, width, columns):
            mine, some = slice(first, first + each), slice(start, start + columns)
            gate, value = up[mine, :width][:, some], up[mine, width:][:, some]
            local = (torch.cat((gate, value), 1).contiguous(), down[mine, some].contiguous())
            held = experts.Experts(*local, first, total)
            found += (held.grouped if grouped else held.dense)(x, weights, chosen)
    assert torch.allclose(found.double(), expected, atol=1e-3, rtol=1e-4)


def test_rows_of_other_ranks_experts_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm leaves rows past its last group as they were in memory."""
    plain = F.grouped_mm

    def careless(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = plain(x, weight, offs=offs)
        out[int(offs[-1]) :] = float("nan")
        return out

    x, up, down = noise(9, 8), noise(3, 16, 8, seed=1), noise(3, 8, 8, seed=2)
    weights, chosen = experts.route(x, noise(8, 12, seed=3), 4, True)
    held = experts.Experts(up, down, 6, 12)
    expected = held.dense(x, weights, chosen)
    monkeypatch.setattr(F, "grouped_mm", careless)
    assert torch.allclose(held.grouped(x, weights, chosen), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_lie_by_expert_give_what_sorted_rows_give(dtype: torch.dtype) -> None:
    """Places that nobody has taken hold NaN; their results are nobody's."""
    torch.manual_seed(3)
    up, down = torch.randn(4, 32, 48).to(dtype) / 7, torch.randn(4, 16, 48).to(dtype) / 4
    held, counts = experts.Experts(up, down, 8, 16), torch.tensor([3, 0, 5, 1])
    rows = torch.full((4, 5, 48), float("nan"), dtype=dtype)
    for expert, count in enumerate(counts.tolist()):
        rows[expert, :count] = torch.randn(count, 48).to(dtype)
    taken = torch.arange(5) < counts.unsqueeze(1)
    local = torch.where(taken, torch.arange(4).unsqueeze(1), -1).view(-1, 1)
    ones = torch.ones(20, 1, dtype=dtype)
    found = held.received(Received(rows.view(-1, 48), local, ones, grouped=True))
    real = taken.view(-1)
    expected = held.received(Received(rows.view(-1, 48)[real], local[real], ones[real]))
    assert torch.allclose(found[real], expected, atol=1e-5 if dtype is torch.float32 else 2e-2)



def test_experts_choose_by_size_and_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    for way in ("dense", "grouped"):
        monkeypatch.setattr(experts.Experts, way, lambda *_, way=way: ways.append(way))
    for rows, hidden, width in ((4, 64, 32), (4096, 64, 32), (4096, 66, 32), (4096, 64, 30)):
        x, chosen = torch.zeros(rows, hidden), torch.zeros(rows, 2, dtype=torch.int64)
        experts.Experts(torch.zeros(8, 2 * width, hidden), torch.zeros(8, width, hidden), 0, 8)(x, x, chosen)
    assert ways == ["dense", "grouped", "dense", "dense"]


@pytest.mark.parametrize(("rows", "experts_", "width", "expected"), [
    (1, 8, 128, True), (200, 8, 128, True), (4096, 8, 128, False),
    (1, 64, 128, False), (8, 64, 128, True), (64, 64, 128, True), (512, 64, 128, False),
])  # fmt: skip
def test_where_tiles_are_multiplied_few_rows_are_dense(
    rows: int, experts_: int, width: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which way was faster, as measured on such a processor."""
    monkeypatch.setattr(experts, "tiles", lambda dtype: True)
    up, down = (torch.zeros(experts_, *shape, dtype=torch.bfloat16) for shape in ((2 * width, 256), (width, 256)))
    assert experts.Experts(up, down, 0, experts_).prefers_dense(rows, 8 if experts_ == 64 else 2) is expected
    monkeypatch.setattr(experts, "tiles", lambda dtype: False)
    assert not experts.Experts(up, down, 0, experts_).prefers_dense(rows + 8, 2)


def test_mlp_is_a_gated_mlp() -> None:
    x, up, down = noise(3, 8), noise(12, 8, seed=1), noise(6, 8, seed=2)
    expected = (F.silu(x @ up[:6].t()) * (x @ up[6:].t())) @ down
    assert torch.allclose(experts.Experts(up[None], down[None]).plain(x), expected, atol=1e-5)


CONTEXTS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 7)), min_size=1, max_size=4)
"""(tokens already in the pool, tokens fed) of each row."""


@given(
    contexts=CONTEXTS, heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]), single=st.booleans(), seed=st.integers(0, 99)
)
def test_paged_attention(contexts: list[tuple[int, int]], heads: tuple[int, int], single: bool, seed: int) -> None:
    """Any mix of rows, fed all at once or one token a row, equals causal attention over each row's own context."""
    (q_heads, k), dim, size = heads, 4, 3
    contexts = [(start, 1 if single else fed) for start, fed in contexts]
    pool = KVPool(2, 32, k, size, dim, torch.float32, "cpu")
    pool.storage.normal_(generator=torch.Generator().manual_seed(seed))  # others' tokens, in blocks not ours
    order = torch.randperm(31, generator=torch.Generator().manual_seed(seed)).tolist()
    rows, whole = [], []
    for number, (start, fed) in enumerate(contexts):
        blocks = tuple(1 + order.pop() for _ in range(-(-(start + fed) // size) + number % 2))
        rows.append(Row(number, None if fed == 1 else (0,) * fed, start, blocks, None))
        whole.append(noise(start + fed, 2 * k, dim, seed=seed + number))
        past = Row(0, (0,) * start, 0, blocks, None)
        if start:
            pool.write(1, Batch([past], pool).cells, whole[-1][:start])
    batch = Batch(rows, pool)
    kv = torch.cat([tokens[start:] for tokens, (start, _) in zip(whole, contexts, strict=True)])
    q = noise(batch.tokens, q_heads, dim, seed=seed + 50)
    pool.write(1, batch.cells, kv)
    found = attend(q, kv, pool, 1, batch).view(-1, q_heads, dim)
    assert batch.single == all(fed == 1 for _, fed in contexts)
    assert batch.positions.flatten().tolist() == [at for start, fed in contexts for at in range(start, start + fed)]
    for (start, fed), tokens, first in zip(contexts, whole, batch.first, strict=True):
        for at in range(fed):
            reach = start + at + 1
            for head in range(q_heads):
                keys, values = tokens[:reach, head * k // q_heads], tokens[:reach, k + head * k // q_heads]
                scores = (keys @ q[first + at, head]) / dim**0.5
                assert torch.allclose(found[first + at, head], scores.softmax(-1) @ values, atol=1e-5)


def test_pool_views_show_what_was_written() -> None:
    pool = KVPool(3, 5, 2, 4, 6, torch.float32, "cpu")
    row = Row(0, (0,) * 6, 0, (3, 1), None)
    kv = noise(6, 4, 6)
    pool.write(2, Batch([row], pool).cells, kv)
    for at in range(6):
        block, place = row.blocks[at // 4], at % 4
        assert torch.equal(pool.keys[2, block, place], kv[at, :2])
        assert torch.equal(pool.values[2, block, place], kv[at, 2:])
    assert pool.storage.count_nonzero() == kv.numel()


def test_no_rows() -> None:
    pool = KVPool(1, 2, 2, 4, 6, torch.float32, "cpu")
    batch = Batch([], pool)
    pool.write(0, batch.cells, torch.zeros(0, 4, 6))
    assert attend(torch.zeros(0, 4, 6), torch.zeros(0, 4, 6), pool, 0, batch).shape == (0, 24)
