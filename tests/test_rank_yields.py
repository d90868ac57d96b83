"""A rank whose exchanges never have to wait must still let its loop read the inbox."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernel import views
from kernel.cache import KVCache
from kernel.comm.local import LocalCollectives
from kernel.inbox import Inbox, Stop
from kernel.journal import Journal
from kernel.rank import Ports, Rank
from kernel.record import NullRecorder
from kernel.sched import registry
from kernel.sched.policy import Limits
from kernel.topology import World

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 20_000


class PromptPeer:
    """A rendezvous whose other rank is always there first, and has read one inbox entry more than we have at first."""

    def __init__(self) -> None:
        self.exchanges = 0

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        self.exchanges += 1
        assert self.exchanges < MOST, "the loop never got to read the inbox"
        view, plan, order = views.decode(payload)
        return [payload, views.encode(replace(view, rank=1, inbox=1), plan, order)]

    def close(self) -> None:
        """Nothing."""


class NoDevice:
    """Of a rank that never has work."""

    deferred = False
    layout: Any = None

    def stream(self, phase: object) -> Any:
        return None

    def route(self) -> Any:
        return None

    def collectives(self, phase: object) -> Any:
        return LocalCollectives()

    @contextmanager
    def scope(self, phase: object) -> Iterator[None]:
        yield

    async def close(self) -> None:
        """Nothing."""


class NoModel:
    """Only its size is asked for."""

    layers = 1

    def forward(self, step: object, rows: object) -> Any:
        raise AssertionError("no work was given")

    def reload(self, path: str) -> None:
        """Nothing."""


async def test_the_inbox_is_read_while_exchanges_never_wait() -> None:
    world, limits = World(2, 2, 2), Limits(size=2, replicas=2, boundaries=1)
    inbox, peer = Inbox(), PromptPeer()
    ports = Ports(
        device=NoDevice(),
        rendezvous=peer,
        model=NoModel(),
        cache=KVCache(4, 4),
        inbox=inbox,
        journal=Journal(NullRecorder()),
        emit=lambda output: None,
        use_policy=lambda entry: registry.create(entry.spec, limits),
    )
    rank = Rank(0, world, limits, registry.create("fine", limits), ports)
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, inbox.put, Stop())
    await rank.run()
    assert 2 < peer.exchanges < MOST
