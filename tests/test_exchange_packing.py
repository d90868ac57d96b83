"""How messages of an expert exchange are packed: what is read is what was written, wherever its bytes lie."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from kernel.comm.exchange import pair
from kernel.comm.exchange.normal import returned
from kernel.comm.exchange.routing import Packing
from kernel.comm.exchange.wire import LocalWire
from kernel.exchange.shape import Shape
from kernel.exchange.states import Place

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with strides of dimensions of size 0 and 1 that only say how they came about."""
    return x.t().contiguous().t()


def numbers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct small numbers, exact in every type."""
    return torch.arange(rows * columns).remainder(251).view(rows, columns).to(dtype)


@given(
    dtype=st.sampled_from(DTYPES),
    hidden=st.integers(1, 40),
    topk=st.integers(1, 4),
    rows=st.integers(0, 5),
    before=st.integers(0, 3),
)
def test_what_is_unpacked_is_what_was_packed(
    dtype: torch.dtype, hidden: int, topk: int, rows: int, before: int
) -> None:
    """before: other messages in the same memory, in front of these."""
    packing = Packing(Shape(2, 8, hidden, topk, 64, 16, dtype.itemsize), dtype)
    values, chosen = numbers(rows, hidden, dtype), numbers(rows, topk, torch.int64).remainder(9) - 1
    shares = numbers(rows, topk, torch.float32) / 256
    packed = packing.pack(values, chosen, shares)
    assert torch.equal(packed, packing.pack(strided(values), strided(chosen), strided(shares)))
    assert packed.shape == (rows, hidden * dtype.itemsize + 8 * topk) == (rows, packing.width)
    among = torch.cat([torch.full((before, packing.width), 7, dtype=torch.uint8), packed])[before:]
    for each in (packed, among):
        got, experts, weights = packing.unpack(each)
        assert got.dtype == weights.dtype == dtype
        assert torch.equal(got, values)
        assert torch.equal(experts, chosen)
        assert torch.equal(weights, shares.to(dtype))


@given(dtype=st.sampled_from(DTYPES), hidden=st.integers(1, 40), rows=st.integers(0, 5), before=st.integers(0, 3))
def test_results_come_back_as_they_were_sent(dtype: torch.dtype, hidden: int, rows: int, before: int) -> None:
    results = numbers(before + rows, hidden, dtype)[before:]
    for each in (results, strided(results)):
        assert torch.equal(returned(LocalWire(), each, [[rows]], "combine"), results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 3, 33, 64])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_an_exchange_takes_any_hidden_size_and_any_number_of_rows(dtype: torch.dtype, hidden: int, rows: int) -> None:
    shape = Shape(1, 4, hidden, 1, 8, 4, dtype.itemsize)
    exchange, place = pair.local(shape, dtype), Place(0, 0)
    values, ones = numbers(rows, hidden, dtype), torch.ones((rows, 1), dtype=dtype)
    chosen = torch.arange(rows).remainder(4).view(-1, 1)
    pending = exchange.normal.notify(place, chosen)
    asyncio.run(pending.event.wait())
    exchange.normal.permit(pending)
    for came, back in (
        (exchange.normal.submit(pending, values, ones), exchange.normal.combine),
        (exchange.low_latency.dispatch(place, values, chosen, ones), exchange.low_latency.combine),
    ):
        assert torch.equal(came.rows, values)
        assert torch.equal(came.experts, chosen)
        assert torch.equal(back(place, came.rows), values)
