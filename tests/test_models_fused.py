"""Triton's kernels against torch's operations. Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from models.attention.pool import KVPool
from models.cuda.fused import FusedParts, TorchParts, gated, parts
from models.experts import Order
from models.layers import Rotary

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1"),
]
TYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-2, "rtol": 1e-2}


def pair(dtype: torch.dtype, k: int, dim: int) -> tuple[TorchParts, FusedParts, KVPool, KVPool]:
    pools = [KVPool(2, 8, k, 4, dim, dtype, DEVICE) for _ in range(2)]
    rotary = Rotary(dim, 1e4, DEVICE)
    return TorchParts(pools[0], rotary, 1e-6), FusedParts(pools[1], rotary, 1e-6), pools[0], pools[1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [48, 128, 2560])
def test_norm(dtype: torch.dtype, size: int) -> None:
    plain, fused, _, _ = pair(dtype, 1, 16)
    weight = noise(size, dtype=dtype, seed=1)
    for rows in (0, 1, 5):
        x = noise(rows, size, dtype=dtype)
        assert torch.allclose(fused.norm(weight)(x), plain.norm(weight)(x), **tolerance(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("q", "k", "dim"), [(4, 2, 16), (8, 1, 128), (3, 3, 64)])
def test_heads(dtype: torch.dtype, q: int, k: int, dim: int) -> None:
    plain, fused, ours, theirs = pair(dtype, k, dim)
    weight = noise(q + k, dim, dtype=dtype, seed=1)
    for rows in (0, 1, 9):
        positions = torch.arange(7, 7 + rows, device=DEVICE).view(-1, 1, 1)
        blocks = torch.tensor([ours.place(1 + at // 4, at) for at in range(rows)], dtype=torch.int64, device=DEVICE)
        cells = ours.cells(blocks)
        one, other = (noise(rows, q + 2 * k, dim, dtype=dtype, seed=2) for _ in range(2))
        plain.heads(1, weight)(one, plain.angles(positions), cells)
        fused.heads(1, weight)(other, fused.angles(positions), cells)
        assert torch.allclose(one, other, **tolerance(dtype))
        assert torch.equal(one[:, q + k :], other[:, q + k :])
        assert torch.allclose(ours.storage, theirs.storage, **tolerance(dtype))
        assert torch.equal(ours.storage != 0, theirs.storage != 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [24, 768, 1500])
def test_gated(dtype: torch.dtype, columns: int) -> None:
    both, share = noise(6, 2 * columns, dtype=dtype), noise(6, dtype=dtype, seed=1).abs()
    share[2], both[2] = 0, float("nan")
    found = gated(both, share, True)
    gate, value = both.float().chunk(2, dim=1)
    expected = (F.silu(gate) * value * share.float()[:, None]).to(dtype)
    expected[2] = 0
    assert torch.allclose(found, expected, **tolerance(dtype))
    assert gated(both[:0], share[:0], True).shape == (0, columns)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("first", "experts"), [(0, 6), (0, 2), (2, 4)], ids=["all", "first", "last"])
@pytest.mark.parametrize("size", [40, 1024, 2560])
def test_summed(dtype: torch.dtype, first: int, experts: int, size: int) -> None:
    for rows in (0, 1, 7):
        scores = torch.rand(rows, 6, generator=torch.Generator().manual_seed(rows))
        chosen = scores.topk(3).indices.to(DEVICE)
        pairs = Order(chosen, first, torch.arange(experts, dtype=torch.int16, device=DEVICE), 6)
        out = noise(3 * rows, size, dtype=dtype)
        out[int(pairs.ends[-1]) :] = float("nan")  # of other ranks' experts
        found = pairs.sum(out, True)
        assert found.shape == (rows, size)
        assert torch.allclose(found, pairs.sum(out), **tolerance(dtype))


def test_float32_and_odd_heads_stay_with_torch() -> None:
    rotary = Rotary(24, 1e4, DEVICE)
    assert isinstance(parts(KVPool(1, 2, 1, 4, 24, torch.bfloat16, DEVICE), rotary, 1e-6), TorchParts)
    assert isinstance(parts(KVPool(1, 2, 1, 4, 16, torch.float32, DEVICE), rotary, 1e-6), TorchParts)
    fused = isinstance(parts(KVPool(1, 2, 1, 4, 16, torch.bfloat16, DEVICE), rotary, 1e-6), FusedParts)
    assert fused == (DEVICE == "cuda")
