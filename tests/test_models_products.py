"""Products with a packed weight against torch's own, and the way back to those where packing is not to be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import products

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    products.packs.cache_clear()
    yield
    products.packs.cache_clear()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@given(rows=st.integers(0, 70), inner=st.integers(1, 80), outer=st.integers(1, 80), biased=st.booleans())
def test_a_packed_weight_gives_the_same_product(rows: int, inner: int, outer: int, biased: bool) -> None:
    if not products.packs():
        pytest.skip("this processor, or this torch, packs no weights")
    x, other, weight = noise(rows, inner), noise(rows, outer, seed=1), noise(outer, inner, seed=2).t()
    bias = noise(outer, seed=3) if biased else None
    packed, plain = products.Packed(weight, bias), products.Plain(weight, bias)
    exact = x.double() @ weight.double()
    with torch.inference_mode():
        for found, expected, truth in (
            (packed(x), plain(x), exact if bias is None else exact + bias.double()),
            (packed.onto(x, other), plain.onto(x, other), exact + other.double()),
        ):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            # Half a unit in the last of bfloat16's 8 bits, of the sum and of what was added to it.
            assert torch.all((found.double() - truth).abs() <= 2**-7 * (truth.abs() + exact.abs()) + 1e-6)


def test_without_the_operations_products_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "tiles", lambda dtype: True)

    class Nothing:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Nothing())
    assert isinstance(products.product(noise(8, 8)), products.Plain)


def test_operations_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "tiles", lambda dtype: True)
    monkeypatch.setattr(products.Packed, "__call__", lambda self, x: torch.zeros(4, 64, dtype=torch.bfloat16))
    assert isinstance(products.product(noise(8, 8)), products.Plain)


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "tiles", lambda dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(products, "packs", lambda: True)
    monkeypatch.setattr(products.Packed, "__init__", lambda self, weight, bias=None: None)
    monkeypatch.setattr(products, "MOST_BYTES", 2 * 64 * 64)
    assert isinstance(products.product(noise(64, 64)), products.Packed)
    assert isinstance(products.product(noise(64, 65)), products.Plain), "too large to keep twice"
    assert isinstance(products.product(noise(64, 64).float()), products.Plain)
    assert isinstance(products.product(noise(0, 64)), products.Plain)
