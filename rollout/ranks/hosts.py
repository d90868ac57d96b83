"""A world of several hosts, started by torchrun: `torchrun --nnodes 2 --nproc-per-node 2 -m turnstile rollout ...`.

torchrun starts one process a rank. The one with RANK 0 is the launcher: it runs the command itself and starts rank 0
beside it; the others are ranks. They find the launcher through torchrun's store and prove that they know its token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel.comm.tcp_link import keep_alive
from kernel.errors import RankLost, UsageError
from rollout.ranks import orphans, wire, words
from rollout.ranks.nursery import search_path
from rollout.ranks.pulse import AWAY_S, Pulse
from rollout.ranks.torchrun import Place, store_at
from rollout.ranks.wire import failure
from rollout.ranks.words import Words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kernel.topology import World

_START_S = 120.0
_START_CUDA_S = 900.0
"""Weights of tens of gigabytes, kernels compiled at first use, and a graph for each bucket."""
_GRACE_S = 10.0


class HostsLauncher:
    """The launcher's side, in torchrun's process of rank 0. The interface is that of `launcher.Launcher`."""

    def __init__(self, world: World, config: dict[str, Any], here: Place) -> None:
        if world.size != here.size:
            raise UsageError(f"--world {world.size}, but torchrun started {here.size} processes: make them equal")
        self.world, self._here = world, here
        where = {"host": here.host, "port": here.port, "run": here.run}
        self._token = secrets.token_hex(16)
        self._config = {**config, "store": where, "token": self._token}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._messages = Words()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._own: asyncio.subprocess.Process | None = None
        self._hosts: dict[int, str] = {}
        self.pulse = Pulse(config["rank_timeout_s"])

    async def start(self) -> None:
        """Wait for all ranks to connect and to load their shards. Raises what a rank failed with, or RankLost."""
        host = self._here.host
        self._server = await asyncio.start_server(self._admit, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        store = await asyncio.to_thread(store_at, self._config["store"])
        store.set("control", f"{port} {self._token}")
        self._own = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollout.ranks.worker",
            "join",
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": str(self._config["threads"])},
            start_new_session=True,
        )
        self._tasks.append(asyncio.create_task(self.pulse.watch(self._lost), name="pulse"))
        waiting = set(range(self.world.size))
        start_s = _START_CUDA_S if self._config["device"]["device"] == "cuda" else _START_S
        try:
            async with asyncio.timeout(start_s):
                while waiting:
                    rank, message = await self._messages.get()
                    if "ready" not in message:
                        if "lost" in message:
                            message["lost"] += self.pulse.at[rank]
                        raise failure(rank, message)
                    waiting.discard(rank)
        except TimeoutError:
            names = ", ".join(map(str, sorted(waiting)))
            raise RankLost(f"rank {names} did not start within {start_s:g} s: see torchrun's output there") from None

    def send(self, messages: list[dict[str, Any]]) -> None:
        """One message a rank, in rank order."""
        for rank, message in enumerate(messages):
            words.tell(self._writers[rank], message)

    async def messages(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(rank, message) as they come, less beats; one that ends without a word, or is silent, gives {"lost": why}."""
        while True:
            yield await self._messages.get()

    async def close(self, reason: str = "") -> list[int]:
        """End the connections, which ends the ranks; the exit code of the one started here. Idempotent."""
        codes = []
        if reason:
            for writer in self._writers.values():
                writer.close()
        if self._own is not None:
            try:
                await asyncio.wait_for(self._own.wait(), _GRACE_S)
            except TimeoutError:
                self._own.kill()
                await self._own.wait()
            codes.append(self._own.returncode or 0)
            orphans.end(partial(orphans.of_sessions, {self._own.pid}))
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()
        if self._server is not None:
            self._server.close()
        return codes

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection: nothing of a stranger is read but a line that must hold the token and a rank."""
        with suppress(ValueError, TimeoutError, OSError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            line = await asyncio.wait_for(reader.readuntil(b"\n"), _GRACE_S)
            token, rank_text = line.decode().split()
            rank = int(rank_text)
            if hmac.compare_digest(token, self._token) and 0 <= rank < self.world.size and rank not in self._writers:
                self._writers[rank] = writer
                self._hosts[rank] = writer.get_extra_info("peername")[0]
                keep_alive(writer.get_extra_info("socket"), 2 * self.pulse.timeout_s)
                self.pulse.expect(rank, AWAY_S if self._config["device"]["device"] == "cuda" else _START_S)
                writer.write(wire.pack({**self._config, "rank": rank, "beat_s": self.pulse.every_s}))
                self._tasks.append(asyncio.create_task(self._pump(rank, reader)))
                return
        writer.close()

    async def _pump(self, rank: int, reader: asyncio.StreamReader) -> None:
        last = await self._messages.pump(rank, reader, self._writers[rank], self.pulse.hear)
        self.pulse.forget(rank)
        if "stopped" not in last and "failed" not in last:
            why = f"rank {rank} at {self._hosts[rank]} ended: its connection is gone"
            self._tell([rank], why)
            self._messages.put(rank, {"lost": why})

    def _lost(self, ranks: list[int]) -> None:
        """Ranks are silent: give them up, those of one host together, and tell the others."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[rank], []).append(rank)
        said = "; ".join(self.pulse.why(some, f" at {host}") for host, some in by_host.items())
        why = f"{said} (stopped, or the host or the link to it is down)"
        self._tell(ranks, why)
        for rank in ranks:
            self._messages.put(rank, {"lost": why, "ranks": ranks})
            self._writers[rank].transport.abort()
        if 0 in ranks and self._own is not None:
            self._own.kill()

    def _tell(self, lost: list[int], why: str) -> None:
        for rank, writer in self._writers.items():
            if rank not in lost:
                words.tell(writer, {"abort": why})
