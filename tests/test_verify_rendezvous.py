"""The simulated rendezvous: who meets whom, when, and what breaks it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import Divergence, RankLost, UsageError
from kernel.topology import World
from verify.sim.rendezvous import uniform_skew
from verify.sim.world import SimWorld

if TYPE_CHECKING:
    from verify.sim.world import SimRank

THREE = World(3)


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=5), st.integers(0, 9))
def test_payloads_come_in_rank_order_when_the_last_has_arrived(
    rounds: list[tuple[int, int, int]], latency: int
) -> None:
    async def main(sim: SimRank) -> list[Any]:
        got = []
        for number, delays in enumerate(rounds):
            await asyncio.sleep(delays[sim.rank] / 1e6)
            answers = await sim.rendezvous.exchange(f"round {number}", bytes([sim.rank, number]))
            got.append((sim.clock.now_ns(), answers))
        return got

    at, expected = 0, []
    for number, delays in enumerate(rounds):
        at += max(delays) * 1000 + latency
        expected.append((at, [bytes([rank, number]) for rank in range(3)]))
    assert SimWorld(THREE, latency_ns=latency).run(main) == [expected] * 3


def test_skew_delays_the_arrival() -> None:
    async def main(sim: SimRank) -> int:
        await sim.rendezvous.exchange("a", b"")
        await sim.rendezvous.exchange("b", b"")
        return sim.clock.now_ns()

    assert SimWorld(THREE, skew=lambda rank, number: 10 * rank + number).run(main) == [20 + 21] * 3


def test_uniform_skew_is_a_stream_for_each_rank() -> None:
    one, other = uniform_skew(1000, 7), uniform_skew(1000, 7)
    in_turn = [[one(rank, n) for n in range(20)] for rank in range(3)]
    mixed = [[other(rank, n) for rank in (2, 0, 1)] for n in range(20)]
    assert [[row[(rank + 1) % 3] for row in mixed] for rank in range(3)] == in_turn
    assert len({tuple(row) for row in in_turn}) == 3
    assert all(0 <= late <= 1000 for row in in_turn for late in row)


def test_different_tags_are_a_divergence_on_every_rank() -> None:
    async def main(sim: SimRank) -> str:
        with pytest.raises(Divergence) as caught:
            await sim.rendezvous.exchange("post-d" if sim.rank == 1 else "pre-d", b"")
        assert (caught.value.ranks, caught.value.round, caught.value.field) == ((1,), 0, "rendezvous tag")
        return str(caught.value)

    assert "rank 0: pre-d, rank 1: post-d, rank 2: pre-d" in SimWorld(THREE).run(main)[0]


def test_a_rank_that_ends_releases_those_who_wait_for_it() -> None:
    async def main(sim: SimRank) -> str:
        await sim.rendezvous.exchange("together", b"")
        if sim.rank == 2:
            await asyncio.sleep(0.001)
            sim.rendezvous.close()
            sim.rendezvous.close()
            return "left"
        with pytest.raises(RankLost, match="rank 2 ended while others wait for it in rendezvous 'alone', number 1"):
            await sim.rendezvous.exchange("alone", b"")
        with pytest.raises(RankLost, match="'again'"):
            await sim.rendezvous.exchange("again", b"")
        return "told"

    assert SimWorld(THREE).run(main) == ["told", "told", "left"]


def test_a_late_arrival_after_the_loss_of_a_rank_changes_nothing() -> None:
    async def main(sim: SimRank) -> None:
        if sim.rank == 2:
            await asyncio.sleep(0.001)
            sim.rendezvous.close()
            await asyncio.sleep(1)
            return
        with pytest.raises(RankLost):
            await sim.rendezvous.exchange("alone", b"")

    SimWorld(THREE, skew=lambda rank, number: 500_000_000).run(main)


def test_one_exchange_at_a_time_of_at_most_4000_bytes() -> None:
    async def main(sim: SimRank) -> None:
        with pytest.raises(UsageError, match="4001 bytes"):
            await sim.rendezvous.exchange("big", bytes(4001))
        first = asyncio.ensure_future(sim.rendezvous.exchange("first", bytes(4000)))
        await asyncio.sleep(sim.rank)
        if sim.rank == 0:
            with pytest.raises(UsageError, match="'second' while 'first' is pending"):
                await sim.rendezvous.exchange("second", b"")
        await first

    SimWorld(THREE).run(main)
