"""Starts the ranks of one host as processes, and ends them: whatever happens, none outlives the launcher."""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel.comm.shared import Arena
from rollout.ranks import standing, wire, words
from rollout.ranks.nursery import Child, Nursery
from rollout.ranks.pulse import AWAY_S, Pulse
from rollout.ranks.words import Words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kernel.topology import World

_GRACE_S = 10.0
_TELL_S = 5.0
"""For the nursery to tell how a rank ended, once its connection is gone."""


@dataclass(slots=True)
class Process:
    """A rank's process and the socket to it."""

    rank: int
    process: Child
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Launcher:
    """The ranks of `world` on this host. `start`, then `messages` and `send`; `close` always."""

    def __init__(self, world: World, config: dict[str, Any], nursery: Nursery | None = None) -> None:
        self.world, self._config = world, config
        self._own = None if nursery else Nursery(config["threads"])
        self._nursery = nursery or self._own
        self._arena = Arena.create(world)
        self._ranks: list[Process] = []
        self._messages = Words()
        self._tasks: list[asyncio.Task[None]] = []
        self._store: Any = None
        self.pulse = Pulse(config["rank_timeout_s"])

    async def start(self) -> None:
        """Start all ranks and wait until each has loaded its shards. Raises what a rank failed with."""
        if self._config["device"]["device"] == "cuda":
            await self._prepare_gpus()
        for rank in range(self.world.size):
            self._ranks.append(await self._spawn(rank))
        self._tasks = [asyncio.create_task(self._pump(process)) for process in self._ranks]
        self._tasks.append(asyncio.create_task(self.pulse.watch(self._lost), name="pulse"))
        waiting = set(range(self.world.size))
        while waiting:
            rank, message = await self._messages.get()
            if "ready" in message:
                waiting.discard(rank)
            else:
                if "lost" in message:
                    message["lost"] += self.pulse.at[rank]
                raise wire.failure(rank, message)

    async def _prepare_gpus(self) -> None:
        """A store through which NCCL's communicators find each other; a lone rank needs none."""
        where = None
        if self.world.size > 1:
            from rollout.ranks.torchrun import serve_store

            self._store, where = await asyncio.to_thread(serve_store)
        self._config = {**self._config, "nccl": where}

    def send(self, messages: list[dict[str, Any]]) -> None:
        """One message a rank, in rank order."""
        for process, message in zip(self._ranks, messages, strict=True):
            words.tell(process.writer, message)

    async def messages(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(rank, message) as they come, less beats; one that ends without a word, or is silent, gives {"lost": why}."""
        while True:
            yield await self._messages.get()

    async def close(self, reason: str = "") -> list[int]:
        """End the ranks, gently and then not; their exit codes. Idempotent."""
        if reason:
            self._arena.abort(reason)
            for process in self._ranks:
                process.writer.close()
        codes = list(await asyncio.gather(*(self._end(process) for process in self._ranks)))
        for task in self._tasks:
            task.cancel()
        for process in self._ranks:
            process.writer.close()
        self._arena.close()
        self._store = None
        if self._own is not None:
            self._own.close()
        return codes

    async def _end(self, process: Process) -> int:
        try:
            return await asyncio.wait_for(process.process.wait(), _GRACE_S)
        except TimeoutError:
            process.process.kill()
        # The nursery tells of ends, and may itself be stopped.
        try:
            return await asyncio.wait_for(process.process.wait(), _GRACE_S)
        except TimeoutError:
            return -signal.SIGKILL

    async def _spawn(self, rank: int) -> Process:
        assert self._nursery is not None
        ours, theirs = socket.socketpair()
        try:
            process = await self._nursery.spawn([theirs.fileno(), *self._arena.fds])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(wire.pack({**self._config, "rank": rank, "arena": self._arena.fd, "beat_s": self.pulse.every_s}))
        self.pulse.expect(rank, AWAY_S if self._config["device"]["device"] == "cuda" else None)
        return Process(rank, process, reader, writer)

    def _lost(self, ranks: list[int]) -> None:
        """End what says nothing any more, and tell the others."""
        pids = [self._ranks[rank].process.pid for rank in ranks]
        why = self.pulse.why(ranks, pids=pids)
        # Before they are killed. A stopped one cannot answer, and is known by that.
        places = [] if "SIGSTOP" in why else standing.ask(pids)
        why += "".join(f"; rank {rank} stands at {place}" for rank, place in zip(ranks, places, strict=False) if place)
        self._arena.abort(why)
        for rank in ranks:
            self._messages.put(rank, {"lost": why, "ranks": ranks})
            self._ranks[rank].process.kill()
            self._tell(self._ranks[rank], why)

    async def _pump(self, process: Process) -> None:
        def heard(rank: int, message: dict[str, Any]) -> bool:
            if "failed" in message and self._config["device"]["device"] == "cuda":
                # Shared memory tells the others on a CPU; a kernel that waits for this rank looks at nothing.
                self._tell(process, f"rank {rank} failed: {message['message']}")
            return self.pulse.hear(rank, message)

        last = await self._messages.pump(process.rank, process.reader, process.writer, heard)
        self.pulse.forget(process.rank)
        try:
            code = await asyncio.wait_for(process.process.wait(), _TELL_S)
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        except TimeoutError:
            how = "has ended, or closed its connection"
        if "stopped" not in last and "failed" not in last:
            why = f"rank {process.rank} {how}"
            self._arena.abort(why)
            self._tell(process, why)
            self._messages.put(process.rank, {"lost": why})

    def _tell(self, process: Process, why: str) -> None:
        for other in self._ranks:
            # A rank that waits for work looks at its socket only.
            if other is not process:
                words.tell(other.writer, {"abort": why})
