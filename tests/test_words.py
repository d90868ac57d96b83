"""A rank's last words arrive, whatever its launcher says meanwhile; a cause is read before what follows from it."""

from __future__ import annotations

import asyncio
import socket
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import PolicyError, RankLost
from kernel.request import SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine
from rollout.ranks import wire, words

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.ranks.nursery import Nursery

FAILED = {"failed": "PolicyError", "message": "rank 0: policy p failed"}
POLICY = """
    from kernel.sched.fine import Fine

    class Late(Fine):
        name = "late"
        \"\"\"Fails on one rank only: the other loses it.\"\"\"

        async def turn(self, gate):
            if gate.p_active and gate._rank.rank == 1:
                raise ZeroDivisionError("in my turn")
            await super().turn(gate)
"""


async def _ends() -> tuple[tuple[asyncio.StreamReader, asyncio.StreamWriter], ...]:
    ours, theirs = socket.socketpair()
    return await asyncio.open_connection(sock=ours), await asyncio.open_connection(sock=theirs)


async def test_last_words_arrive_though_the_launcher_writes_before_it_reads() -> None:
    (reader, writer), (rank_reader, rank_writer) = await _ends()
    inbox = words.Words()
    rank_writer.write(wire.pack(FAILED))
    parting = asyncio.create_task(words.part(rank_reader, rank_writer))
    await asyncio.sleep(0.05)
    for _ in range(10):  # the first write to a closed socket fails, and with it the whole connection
        words.tell(writer, {"entries": []})
        await asyncio.sleep(0)
    assert await inbox.pump(0, reader, writer, lambda rank, message: False) == FAILED
    assert await inbox.get() == (0, FAILED)
    await parting


async def test_a_rank_goes_when_its_launcher_is_gone() -> None:
    (_, writer), (rank_reader, rank_writer) = await _ends()
    writer.close()
    await writer.wait_closed()
    await words.part(rank_reader, rank_writer)


async def test_the_cause_is_read_before_what_follows_from_it() -> None:
    inbox = words.Words()
    follows: dict[str, Any] = {"failed": "RankLost", "message": "a rendezvous was given up: rank 0 failed"}
    inbox.put(1, follows)
    await asyncio.sleep(0.05)
    inbox.put(0, FAILED)
    assert [await inbox.get(), await inbox.get()] == [(0, FAILED), (1, follows)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path)
    (path / "late.py").write_text(textwrap.dedent(POLICY))
    return path


async def test_a_launcher_that_was_busy_still_hears_why(checkpoint: Path, nursery: Nursery) -> None:
    """The loop is held while one rank fails and the other loses it; then it writes to both before it reads."""

    async def run() -> None:
        async with Engine(
            checkpoint, World(2, 2, 2), policy=f"{checkpoint / 'late.py'}:Late", nursery=nursery
        ) as engine:
            turns = [asyncio.create_task(engine.generate([3, 4, 5], SamplingParams(max_tokens=9))) for _ in range(2)]
            await asyncio.sleep(0)
            time.sleep(2)  # noqa: ASYNC251
            for _ in range(3):
                engine.session().generate([3, 4, 5])
                await asyncio.sleep(0)
            await asyncio.gather(*turns)

    with pytest.raises(PolicyError, match=r"policy late failed: Late\.turn at \S+late\.py:\d+: ZeroDivisionError"):
        await run()


def test_a_rank_that_lost_another_is_told_apart_by_its_error() -> None:
    """`Words` goes by this name."""
    assert isinstance(wire.failure(1, {"failed": "RankLost", "message": "x"}), RankLost)
