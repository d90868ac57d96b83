"""Small objects between ranks that build something, over torch's store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import HashStore

from kernel.comm.peers import Peers
from kernel.errors import RankLost

SIZE = 3


def together(call: Any) -> list[Any]:
    """What `call(rank)` gives on every rank, all at once."""
    with ThreadPoolExecutor(SIZE) as pool:
        return [each.result() for each in [pool.submit(call, rank) for rank in range(SIZE)]]


def test_a_second_world_on_one_store_reads_nothing_of_the_first() -> None:
    store = HashStore()

    def build(number: int, rank: int) -> list[Any]:
        return Peers(store, rank, SIZE, "exchange").all_gather("size", f"{number} of {rank}")

    for number in range(3):
        expected = [f"{number} of {rank}" for rank in range(SIZE)]
        assert together(lambda rank, number=number: build(number, rank)) == [expected] * SIZE


def test_values_of_every_kind_come_back_in_rank_order() -> None:
    store = HashStore()
    peers = [Peers(store, rank, SIZE, "exchange") for rank in range(SIZE)]
    values = [None, 7, "text \u00e9", b"\x00\xff"]
    for value in values:
        assert together(lambda rank, value=value: peers[rank].allgather(value)) == [[value] * SIZE] * SIZE
    assert together(lambda rank: peers[rank].all_gather("a", rank)) == [[0, 1, 2]] * SIZE


def test_a_peer_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RankLost, match=r"rank 1 did not come to size of exchange, which rank 0 builds"):
        Peers(store, 0, 2, "exchange", timeout_s=0.1).all_gather("size", 1)
