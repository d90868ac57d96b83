"""One contract for every substrate of the expert exchange: values, sizes, states and concurrent phases.

GPU substrates are those of `tests.exchanges.GPUS`, marked `gpu`.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from kernel.errors import Divergence, RankLost
from kernel.exchange.states import LowLatency, Place
from kernel.topology import World
from tests.exchanges import (
    GPUS,
    SKEWS,
    SUBSTRATES,
    Case,
    Substrate,
    both,
    build,
    decode,
    on_device,
    prefill,
    raised,
    replays,
)
from tests.ranks import Me, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis.strategies import SearchStrategy


def lacks(substrate: Substrate) -> list[pytest.MarkDecorator]:
    """What this machine may lack for it."""
    gpus = pytest.mark.skipif(torch.cuda.device_count() < substrate.ranks, reason=f"needs {substrate.ranks} GPUs")
    package = pytest.mark.skipif(find_spec("deep_ep_cpp") is None, reason="deep_ep is not installed")
    return [gpus, package] if substrate.name == "deepep" else [gpus]


EACH = [
    *(pytest.param(each, marks=[pytest.mark.slow] * each.slow) for each in SUBSTRATES),
    *(pytest.param(each, marks=[pytest.mark.gpu, *lacks(each)]) for each in GPUS),
]


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[tuple[int, int, str], Ranks]]:
    """Ranks by (how many, bytes of their slots, ""), which substrates share: to start them takes longest.

    On GPUs each has its own, by its name: NVSHMEM is one runtime a process.
    """
    made: dict[tuple[int, int, str], Ranks] = {}
    with ExitStack() as stack:
        yield made
        for ranks in made.values():
            stack.enter_context(ranks)


@pytest.fixture(scope="module", params=EACH, ids=str)
def ranks(
    request: pytest.FixtureRequest,
    worlds: dict[tuple[int, int, str], Ranks],
    tmp_path_factory: pytest.TempPathFactory,
) -> Ranks:
    substrate: Substrate = request.param
    key = substrate.ranks, substrate.capacity, substrate.name if substrate.device == "cuda" else ""
    if key not in worlds:
        worlds[key] = Ranks(World(substrate.ranks, substrate.ranks, substrate.ranks), capacity=key[1], timeout_s=120)
    ranks = worlds[key]
    ranks.substrate = substrate  # type: ignore[attr-defined]
    ranks.run(build, substrate, str(tmp_path_factory.mktemp("store") / "file"))
    return ranks


def size(ranks: Ranks) -> int:
    return ranks.world.size


def good(ranks: Ranks, job: Any, *args: Any) -> None:
    assert [told for told in ranks.run(job, *args) if told] == []


def cases(most: int) -> SearchStrategy[Case]:
    rows = st.lists(st.integers(0, most), min_size=4, max_size=4).map(tuple)
    return st.builds(Case, rows, st.sampled_from(SKEWS), st.integers(0, 1000))


@pytest.mark.parametrize("phase", ["P", "D"])
@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("rows", [(5, 5, 5, 5), (0, 0, 0, 0), (16, 0, 3, 1), (0, 7, 0, 0)], ids=str)
def test_values_are_those_of_a_dense_reference(
    ranks: Ranks, phase: str, skew: str, rows: tuple[int, ...]
) -> None:
    good(ranks, prefill if phase == "P" else decode, Case(rows, skew, 3))


@given(case=cases(64))
@settings(max_examples=25, deadline=None)
def test_prefill_moves_exactly_what_was_notified(ranks: Ranks, case: Case) -> None:
    good(ranks, prefill, case)


@given(case=cases(16))
@settings(max_examples=25, deadline=None)
def test_decode_moves_what_was_chosen(ranks: Ranks, case: Case) -> None:
    good(ranks, decode, case)


@given(st.lists(cases(64), max_size=5), st.lists(cases(16), max_size=9))
@settings(max_examples=12, deadline=None)
def test_phases_interleave_without_a_wrong_value(ranks: Ranks, prefills: list[Case], decodes: list[Case]) -> None:
    good(ranks, both, prefills, decodes)


@given(st.lists(cases(64), max_size=4), st.lists(cases(16), min_size=1, max_size=6))
@settings(max_examples=12, deadline=None)
def test_graphs_are_replayed_between_prefills(ranks: Ranks, prefills: list[Case], decodes: list[Case]) -> None:
    if not ranks.substrate.graphs:  # type: ignore[attr-defined]
        pytest.skip("this substrate has no graphs")
    good(ranks, replays, prefills, decodes)


async def cancelled(me: Me, case: Case, settle: bool) -> list[str]:
    """Abandon P's operation behind its notification, decode meanwhile, and go on behind the quiescent point."""
    normal = me.keep["exchange"].normal
    _, experts, _ = on_device(me, case)
    pending = normal.notify(Place(1, 4), experts)
    assert normal.abandon("its request was cancelled")
    told = [
        raised(normal.notify, Place(1, 5), experts),
        raised(normal.permit, pending),
        decode(me, case),
    ]
    await pending.event.wait()
    normal.quiesce()
    return [*told, await prefill(me, case)]


@pytest.mark.parametrize("rows", [(3, 5, 2, 4), (0, 0, 0, 0)], ids=str)
def test_an_operation_abandoned_behind_its_notification_retires_the_buffer(
    ranks: Ranks, rows: tuple[int, ...]
) -> None:
    for told in ranks.run(cancelled, Case(rows, "even", 5), True):
        assert told == ["BufferRetired", "BufferRetired", "", ""]


async def cancelled_with_data(me: Me, case: Case) -> list[str]:
    """Abandon P's operation behind its submission: its buffer is clean once the data has moved."""
    normal = me.keep["exchange"].normal
    rows, experts, weights = on_device(me, case)
    pending = normal.notify(Place(1, 4), experts)
    await pending.event.wait()
    normal.permit(pending)
    received = normal.submit(pending, rows, weights)
    assert normal.abandon("its request was cancelled")
    told = [raised(normal.combine, Place(1, 4), received.rows), decode(me, case)]
    if rows.is_cuda:
        torch.cuda.synchronize()
    normal.quiesce()
    return [*told, await prefill(me, case)]


def test_an_operation_abandoned_behind_its_submission_retires_the_buffer(ranks: Ranks) -> None:
    for told in ranks.run(cancelled_with_data, Case((3, 5, 2, 4), "even", 5)):
        assert told == ["BufferRetired", "", ""]


async def misused(me: Me, case: Case) -> list[str]:
    exchange, place = me.keep["exchange"], Place(2, 0)
    rows, experts, weights = on_device(me, case)
    normal, low = exchange.normal, exchange.low_latency
    told = [raised(normal.combine, place, rows), raised(low.combine, place, rows)]
    pending = normal.notify(place, experts)
    told += [raised(normal.notify, Place(2, 1), experts)]
    await pending.event.wait()
    told += [raised(normal.submit, pending, rows, weights)]
    normal.permit(pending)
    received = normal.submit(pending, rows, weights)
    told += [raised(normal.submit, pending, rows, weights)]
    normal.combine(place, received.rows)
    most = me.keep["substrate"].shape
    told += [raised(normal.notify, place, experts.new_full((most.prefill_rows + 1, most.topk), -1))]
    wide = [each.repeat_interleave(9, 0) for each in (rows, experts, weights)]
    told += [raised(low.dispatch, place, *wide)]
    return told


def test_each_misuse_has_its_own_error_and_leaves_the_exchange_usable(ranks: Ranks) -> None:
    case = Case((2, 2, 2, 2), "even", 1)
    for told in ranks.run(misused, case):
        assert told == [
            "NotDispatched",
            "NotDispatched",
            "DispatchPending",
            "NotPermitted",
            "NotNotified",
            "RowLimit",
            "RowLimit",
        ]
    good(ranks, both, [case], [case])


def captured(me: Me) -> list[str]:
    """The account of graphs, on any substrate: whole layers may be captured, half of one may not."""
    low, case = me.keep["exchange"].low_latency, Case((1, 1, 1, 1), "even", 2)
    data, account = on_device(me, case), low.states

    def half() -> None:
        with low.capture("half"):
            low.dispatch(case.place, *data)

    def whole() -> Any:
        with low.capture("whole") as hold:
            received = low.dispatch(case.place, *data)
            low.combine(case.place, received.rows)
        return hold

    hold = whole()
    told = [raised(low.replayed, hold), raised(low.close)]
    low.dropped(hold)
    told += [raised(low.replayed, hold), raised(half)]
    told += [raised(low.dispatch, case.place, *data), raised(whole)]
    low.states = LowLatency(me.rank, account.most)  # what building it anew does
    return told


def test_graphs_hold_whole_layers_and_keep_the_buffer_alive(ranks: Ranks) -> None:
    if ranks.substrate.graphs:  # type: ignore[attr-defined]
        pytest.skip("the account of graphs is tested with real ones there")
    assert ranks.run(captured) == [["nothing", "StillHeld", "StillHeld", *3 * ["OddGraph"]]] * size(ranks)
    good(ranks, decode, Case((2, 1, 0, 3), "even", 4))


def other_places(me: Me) -> str:
    data = on_device(me, Case((1, 1, 1, 1), "even", 2))
    with pytest.raises(Divergence) as caught:
        me.keep["exchange"].low_latency.dispatch(Place(9, me.rank), *data)
    return str(caught.value)


@pytest.mark.slow
def test_peers_that_call_for_different_layers_are_told_in_shared_memory() -> None:
    substrate = Substrate("shm", 2)
    with Ranks(World(2, 2, 2)) as ranks:
        ranks.run(build, substrate, "")
        for said in ranks.run(other_places):
            assert "dispatch of round 9 layer 0" in said
            assert "epoch" not in said


def closing(me: Me) -> str:
    """Rank 0 leaves without its part; the others wait for it until their own exchange is closed."""
    import threading

    exchange, case = me.keep["exchange"], Case((2, 2, 2, 2), "even", 3)
    if me.rank == 0:
        return RankLost.__name__
    threading.Timer(0.2, exchange.normal.close).start()
    threading.Timer(0.4, exchange.low_latency.close).start()
    _, experts, _ = on_device(me, case)
    pending = exchange.normal.notify(case.place, experts)
    told = raised(decode, me, case)
    import asyncio

    return told if raised(asyncio.run, pending.event.wait()) == told else "counts came"


@pytest.mark.slow
@pytest.mark.parametrize("substrate", [s for s in SUBSTRATES if s.ranks == 2 and s.name in ("shm", "gloo")], ids=str)
def test_closing_ends_whoever_waits(substrate: Substrate, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Ranks(World(2, 2, 2)) as ranks:
        ranks.run(build, substrate, str(tmp_path_factory.mktemp("store") / "file"))
        assert ranks.run(closing) == [RankLost.__name__] * 2
