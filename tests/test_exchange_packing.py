"""How messages of an expert exchange are packed, and when they have moved: what is read is what was written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from kernel.comm.exchange import pair
from kernel.comm.exchange.normal import Data, NormalOverWire, returned
from kernel.comm.exchange.routing import Packing
from kernel.comm.exchange.wire import LocalWire
from kernel.errors import NotQuiescent, RankLost
from kernel.exchange.shape import Shape
from kernel.exchange.states import Place, State

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Watched(LocalWire):
    """Calls `moving` while data moves."""

    moving: Any = None

    def move(self, messages: torch.Tensor, matrix: Any, label: str) -> torch.Tensor:
        self.moving()
        return super().move(messages, matrix, label)


def submission(wire: Watched) -> tuple[NormalOverWire, Callable[[], Any]]:
    """An exchange whose data may be submitted, and what submits it."""
    normal = NormalOverWire(Shape(1, 4, 8, 1, 8, 4, 4), wire, torch.float32)
    pending = normal.notify(Place(3, 2), torch.zeros((2, 1), dtype=torch.int64))
    normal.permit(pending)
    return normal, lambda: normal.submit(pending, torch.ones(2, 8), torch.ones(2, 1))


def test_a_buffer_is_not_clean_while_data_of_an_abandoned_submission_is_in_flight() -> None:
    wire = Watched()
    normal, submit = submission(wire)

    def abandoned() -> None:
        assert normal.abandon("its request was cancelled")
        with pytest.raises(NotQuiescent, match="data that it submitted at epoch 3 layer 2 may be in flight"):
            normal.quiesce()

    wire.moving = abandoned
    submit()
    normal.quiesce()
    assert normal.states.state is State.IDLE


def test_a_buffer_is_not_clean_after_a_submission_that_failed() -> None:
    wire = Watched()
    normal, submit = submission(wire)
    wire.moving = wire.close
    with pytest.raises(RankLost):
        submit()
    assert normal.abandon("its rank was lost")
    with pytest.raises(NotQuiescent, match="may be in flight"):
        normal.quiesce()


@pytest.mark.parametrize("reached", [False, True])
def test_data_on_a_gpu_has_moved_when_the_stream_has_come_so_far(
    reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[Any] = []
    event = SimpleNamespace(record=marked.append, query=lambda: reached)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    data = Data()
    assert not data.done()
    data.ends_behind(SimpleNamespace(is_cuda=True, device="cuda:1"))  # type: ignore[arg-type]
    assert data.done() is reached
    assert marked == ["stream of cuda:1"]
