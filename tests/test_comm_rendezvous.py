"""The all-rank exchange: over shared memory with real processes, and over TCP."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.comm.rendezvous import PAYLOAD, TAG, SharedRendezvous
from kernel.comm.shared import Arena, Liveness
from kernel.comm.tcp_rendezvous import TcpRendezvous
from kernel.errors import Divergence, RankLost, UsageError
from kernel.topology import World
from tests.ranks import Me, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 3


@pytest.fixture(scope="module", params=[True, False], ids=["uvloop", "asyncio"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param:
        pytest.importorskip("uvloop")
    with Ranks(World(SIZE), uvloop=request.param) as ranks:
        yield ranks


def rendezvous(me: Me, **settings: Any) -> SharedRendezvous:
    """This rank's rendezvous, kept while the settings stay; a new one goes on where the old one ended."""
    if me.keep.get("settings") != settings:
        if "rendezvous" in me.keep:
            me.keep["rendezvous"].close()
        me.keep["settings"] = settings
        me.keep["rendezvous"] = SharedRendezvous(me.arena, me.rank, **settings)
    kept: SharedRendezvous = me.keep["rendezvous"]
    return kept


def said(rank: int, number: int, lengths: list[int]) -> bytes:
    return bytes([rank, number % 256]) * (lengths[(number + rank) % len(lengths)] // 2)


async def talk(
    me: Me, rounds: int, lengths: list[int], skews: list[float], settings: dict[str, Any]
) -> list[list[bytes]]:
    meeting = rendezvous(me, **settings)
    answers = []
    for number in range(rounds):
        skew = skews[(number * SIZE + me.rank) % len(skews)]
        if skew:
            await asyncio.sleep(skew)
        answers.append(await meeting.exchange(f"round {number}", said(me.rank, number, lengths)))
    return answers


@settings(max_examples=15)
@given(
    rounds=st.integers(1, 12),
    lengths=st.lists(st.integers(0, PAYLOAD), min_size=1, max_size=5),
    skews=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.0005, 0.002]), min_size=1, max_size=7),
)
def test_everybody_gets_everybody_s_payload_of_that_round(
    ranks: Ranks, rounds: int, lengths: list[int], skews: list[float]
) -> None:
    expected = [[said(rank, number, lengths) for rank in range(SIZE)] for number in range(rounds)]
    assert ranks.run(talk, rounds, lengths, skews, {}) == [expected] * SIZE


def test_a_fast_rank_laps_slow_ones_without_damage(ranks: Ranks) -> None:
    # Rank 0 never waits by itself; the others are late by turns, and enter round k+1 while others still read round k.
    rounds, lengths = 300, [PAYLOAD, 2, 100]
    skews = [0.0] * 3 * 5 + [0.0, 0.001, 0.0] + [0.0] * 3 * 4 + [0.0, 0.0, 0.002]
    expected = [[said(rank, number, lengths) for rank in range(SIZE)] for number in range(rounds)]
    assert ranks.run(talk, rounds, lengths, skews, {}) == [expected] * SIZE


def test_bells_alone_wake_everybody(ranks: Ranks) -> None:
    # The timer would need an hour.
    answers = ranks.run(talk, 50, [10], [0.0, 0.001, 0.0, 0.0], {"recheck_s": 3600.0})
    assert [len(a) for a in answers] == [50] * SIZE


async def talk_without_bells(me: Me) -> int:
    meeting = SharedRendezvous(me.arena, me.rank)
    ring, me.arena.ring = me.arena.ring, lambda ranks: None  # type: ignore[method-assign]
    try:
        for number in range(5):
            await meeting.exchange(f"quiet {number}", b"")
    finally:
        me.arena.ring = ring  # type: ignore[method-assign]
        meeting.close()
    return number


def test_a_lost_wake_up_only_delays(ranks: Ranks) -> None:
    assert ranks.run(talk_without_bells) == [4] * SIZE


async def other_tag(me: Me, odd: int) -> None:
    await rendezvous(me).exchange("post-d" if me.rank == odd else "pre-d", b"x")


@pytest.mark.parametrize("odd", range(SIZE))
def test_different_tags_are_a_divergence_on_every_rank(ranks: Ranks, odd: int) -> None:
    for outcome in ranks.outcomes(other_tag, odd):
        assert isinstance(outcome, Divergence)
        assert outcome.ranks == (odd,)
        for rank in range(SIZE):
            assert f"rank {rank} {'post-d' if rank == odd else 'pre-d'!r}" in str(outcome)


async def too_long(me: Me, tag: int, payload: int) -> str:
    with pytest.raises(UsageError, match="at most"):
        await rendezvous(me).exchange("t" * tag, b"x" * payload)
    return "refused"


@pytest.mark.parametrize(("tag", "payload"), [(1, PAYLOAD + 1), (TAG + 1, 0)])
def test_what_does_not_fit_is_refused_and_does_no_harm(ranks: Ranks, tag: int, payload: int) -> None:
    assert ranks.run(too_long, tag, payload) == ["refused"] * SIZE
    assert len(ranks.run(talk, 2, [PAYLOAD], [0.0], {})) == SIZE


async def two_at_once(me: Me) -> str:
    meeting = rendezvous(me)
    if me.rank:
        while me.arena.status(0).reason != "refused":  # noqa: ASYNC110 - another process says it
            await asyncio.sleep(0.01)
        await meeting.exchange("one", b"")
        return "fine"
    first = asyncio.ensure_future(meeting.exchange("one", b""))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one exchange at a time"):
        await meeting.exchange("two", b"")
    me.arena.report(Liveness.RUNNING, "refused")
    await first
    return "refused"


def test_one_exchange_at_a_time(ranks: Ranks) -> None:
    assert ranks.run(two_at_once) == ["refused", "fine", "fine"]


async def only_some(me: Me, absent: list[int], settings: dict[str, Any]) -> str:
    if me.rank in absent:
        await asyncio.sleep(30)
    await SharedRendezvous(me.arena, me.rank, **settings).exchange("post-d", b"")
    return "through"


def test_a_deadline_names_who_did_not_arrive() -> None:
    with Ranks(World(SIZE)) as ranks:
        ranks.start(only_some, [1, 2], {"deadline_s": 0.05})
        ranks.processes[1].poll()
        ranks._links[0].poll(20)  # rank 0 has answered
        for rank in (1, 2):
            ranks.kill(rank)
        outcome = ranks.finish()[0]
    assert isinstance(outcome, RankLost)
    assert "rank 1, 2 did not arrive within 0.05 s" in str(outcome)
    assert "post-d" in str(outcome)


def test_a_killed_peer_ends_the_exchange_of_the_others() -> None:
    with Ranks(World(SIZE)) as ranks:
        ranks.run(talk, 1, [8], [0.0], {})
        ranks.start(only_some, [1], {"recheck_s": 3600.0})
        ranks.kill(1)
        outcomes = ranks.finish(timeout_s=20)
        # A later exchange does not even begin.
        assert all("was given up" in str(late) for late in ranks.outcomes(only_some, [], {})[::2])
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RankLost)
        assert f"rank {rank} in exchange 2 (post-d) was given up: rank 1 ended with status -9" in str(outcomes[rank])


async def test_a_world_of_one_returns_at_once() -> None:
    arena = Arena.create(World(1))
    meeting = SharedRendezvous(Arena.attach(os.dup(arena.fd), 0), 0)
    assert [await meeting.exchange("pre-d", b"mine") for _ in range(3)] == [[b"mine"]] * 3
    meeting.close()


async def test_close_ends_an_exchange_in_progress() -> None:
    meeting = SharedRendezvous(Arena.create(World(2)), 0)
    waiting = asyncio.ensure_future(meeting.exchange("pre-d", b""))
    await asyncio.sleep(0.01)
    meeting.close()
    meeting.close()
    with pytest.raises(RankLost, match="closed"):
        await waiting


async def test_no_timer_outlives_its_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, loop = Arena.create(World(2)), asyncio.get_running_loop()
    first, second = (SharedRendezvous(Arena.attach(os.dup(arena.fd), k), k, recheck_s=0.02) for k in range(2))
    timers: list[asyncio.TimerHandle] = []
    third, call_later = asyncio.Event(), loop.call_later

    def noted(*args: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args))
        if len(timers) >= 3:
            third.set()
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", noted)
    for number in range(3):
        timers.clear()
        third.clear()
        waiting = asyncio.ensure_future(first.exchange(f"slow {number}", b"a"))
        await third.wait()  # it has looked twice by itself
        assert await second.exchange(f"slow {number}", b"b") == await waiting == [b"a", b"b"]
        assert not [timer for timer in timers if not timer.cancelled() and timer.when() > loop.time()]
    first.close()
    second.close()


# -- TCP --------------------------------------------------------------------------------------------------------------


async def tcp_world(size: int, **settings: Any) -> list[TcpRendezvous]:
    """All ranks in one event loop; what is between them is TCP all the same."""
    port = asyncio.get_running_loop().create_future()
    join = partial(TcpRendezvous.open, size=size, token="secret", connect_s=20, **settings)
    first = asyncio.ensure_future(join(0, listening=port.set_result))
    at = await port if size > 1 else 0
    return list(await asyncio.gather(first, *(join(rank, port=at) for rank in range(1, size))))


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_tcp_exchanges_payloads_in_rank_order(size: int) -> None:
    world = await tcp_world(size)
    chance = random.Random(size)

    async def rank(me: int) -> list[list[bytes]]:
        answers = []
        for number in range(30):
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.002)
            answers.append(await world[me].exchange(f"round {number}", said(me, number, [PAYLOAD, 0, 7, 100])))
        return answers

    answers = await asyncio.gather(*map(rank, range(size)))
    expected = [[said(r, n, [PAYLOAD, 0, 7, 100]) for r in range(size)] for n in range(30)]
    assert answers == [expected] * size
    for meeting in world:
        meeting.close()


async def test_tcp_tags_must_agree() -> None:
    world = await tcp_world(3)
    outcomes = await asyncio.gather(
        *(meeting.exchange("a" if k < 2 else "b", b"") for k, meeting in enumerate(world)), return_exceptions=True
    )
    assert [(type(o), getattr(o, "ranks", None)) for o in outcomes] == [(Divergence, (2,))] * 3
    for meeting in world:
        meeting.close()


async def test_tcp_a_closed_connection_names_the_rank_on_every_other() -> None:
    world = await tcp_world(3)
    waiting = [asyncio.ensure_future(world[k].exchange("post-d", b"")) for k in (0, 1)]
    await asyncio.sleep(0.01)
    world[2].close()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, RankLost)
        assert "rank 2 ended its connection" in str(outcome)
    with pytest.raises(RankLost, match="rank 2"):
        await world[1].exchange("pre-d", b"")
    for meeting in world:
        meeting.close()


async def test_tcp_a_deadline_names_who_did_not_arrive() -> None:
    world = await tcp_world(3, deadline_s=None)
    world[0]._deadline_s = 0.05
    outcomes = await asyncio.gather(*(world[k].exchange("x", b"") for k in (0, 2)), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, RankLost)
        assert "rank 1 did not arrive within 0.05 s" in str(outcome)
    for meeting in world:
        meeting.close()


@pytest.mark.parametrize("kind", ["wrong token", "wrong rank", "long message", "silence", "rank 0's nonce back"])
async def test_tcp_strangers_are_turned_away_and_the_world_still_forms(kind: str) -> None:
    loop = asyncio.get_running_loop()
    port = loop.create_future()
    first = asyncio.ensure_future(TcpRendezvous.open(0, 2, "secret", listening=port.set_result, connect_s=20))
    at = await port
    if kind in ("wrong token", "wrong rank"):
        token, rank = ("guess", 1) if kind == "wrong token" else ("secret", 2)
        with pytest.raises(RankLost, match="refused"):
            await TcpRendezvous.open(rank, 2, token, port=at, connect_s=20)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", at)
        nonce = (await reader.readexactly(36))[4:]
        if kind == "long message":
            writer.write(b"\xff" * 200)
            assert await asyncio.wait_for(reader.read(), 20) == b""
        elif kind == "rank 0's nonce back":
            writer.write((68).to_bytes(4, "big") + (1).to_bytes(4, "big") + nonce + nonce)
            assert await asyncio.wait_for(reader.read(), 20) == b""
    second = await TcpRendezvous.open(1, 2, "secret", port=at, connect_s=20)
    world = [await first, second]
    answers = await asyncio.gather(*(meeting.exchange("x", bytes([k])) for k, meeting in enumerate(world)))
    assert answers == [[b"\0", b"\1"]] * 2
    if kind == "silence":  # once everybody is here, strangers are dropped
        assert await asyncio.wait_for(reader.read(), 20) == b""
    if kind not in ("wrong token", "wrong rank"):
        writer.close()
    for meeting in world:
        meeting.close()


async def test_tcp_an_impostor_of_rank_0_is_not_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((32).to_bytes(4, "big") + bytes(32))
        await reader.readexactly(4 + 68)
        writer.write((32).to_bytes(4, "big") + bytes(32))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    with pytest.raises(RankLost, match="refused"):
        await TcpRendezvous.open(1, 2, "secret", port=server.sockets[0].getsockname()[1], connect_s=20)
    server.close()


async def test_tcp_who_is_missing_is_named() -> None:
    with pytest.raises(RankLost, match=r"rank 1, 2 did not arrive within 0\.05 s"):
        await TcpRendezvous.open(0, 3, "secret", connect_s=0.05)
    with pytest.raises(RankLost, match="rank 0 did not arrive"):
        await TcpRendezvous.open(1, 3, "secret", port=1, connect_s=0.1)


async def test_tcp_a_port_in_use_is_the_user_s_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="give a free port"):
            await TcpRendezvous.open(0, 2, "secret", port=taken.getsockname()[1])


async def tcp_in_processes(me: Me, port: int) -> Any:
    meeting = await TcpRendezvous.open(me.rank, SIZE, "secret", port=port, connect_s=20)
    assert await meeting.exchange("one", bytes([me.rank])) == [b"\0", b"\1", b"\2"]
    if me.rank == 1:
        os._exit(3)
    return await meeting.exchange("two", b"")


def test_tcp_a_process_that_ends_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Ranks(World(SIZE)) as ranks:
        outcomes = ranks.outcomes(tcp_in_processes, port)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RankLost)
        assert "rank 1 ended its connection" in str(outcomes[rank])
