"""The all-rank control phase over TCP, for a world of several hosts.

Rank 0 listens; every other rank connects and proves that it knows the token (an HMAC of a nonce, so the token itself never
travels). In each exchange rank 0 collects everybody's tag and payload and sends all of them to everybody. A message is
a length and that many bytes; its first byte says what it is.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from kernel.comm.rendezvous import PAYLOAD, TAG, check_sizes, compare_tags, missed
from kernel.errors import RankLost, UsageError

_LENGTH: Final = struct.Struct("!I")
_ROUND: Final = struct.Struct("!cQ")
_PART: Final = struct.Struct("!II")
_HELLO: Final = struct.Struct("!cI32s")
_LARGEST_FROM_STRANGER: Final = _HELLO.size
HELLO, ARRIVE, ALL, LOST, WELCOME = b"H", b"A", b"R", b"L", b"W"


class _Peer(asyncio.Protocol):
    """One connection: cuts the byte stream into messages."""

    def __init__(self, on_message: Callable[[_Peer, bytes], None], on_lost: Callable[[_Peer], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._data = bytearray()
        self.transport: asyncio.Transport | None = None
        self.rank: int | None = None
        self.nonce = os.urandom(32)
        self.largest = _LARGEST_FROM_STRANGER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        link = transport.get_extra_info("socket")
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self.largest:
                self.drop()
                return
            if len(self._data) < _LENGTH.size + length:
                return
            message = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            self._on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)

    def send(self, message: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(_LENGTH.pack(len(message)) + message)

    def drop(self) -> None:
        self._data.clear()
        if self.transport is not None:
            self.transport.close()


class TcpRendezvous:
    """`kernel.ports.Rendezvous` of one rank; made by `open`. deadline_s as in `SharedRendezvous`."""

    def __init__(self, rank: int, size: int, token: str, deadline_s: float | None) -> None:
        self.rank, self.size = rank, size
        self._token, self._deadline_s = token.encode(), deadline_s
        self._server: asyncio.Server | None = None
        self._peers: dict[int, _Peer] = {}
        self._parts: dict[int, dict[int, tuple[bytes, bytes]]] = {}
        self._round = 0
        self._complete: dict[int, list[tuple[bytes, bytes]]] = {}
        self._lost: str | None = None
        self._changed: asyncio.Future[None] | None = None
        self._closed = False
        self.port = 0
        """Where rank 0 listens."""

    @classmethod
    async def open(
        cls,
        rank: int,
        size: int,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        deadline_s: float | None = None,
        connect_s: float = 60.0,
        listening: Callable[[int], None] | None = None,
    ) -> TcpRendezvous:
        """Connect all ranks; returns on each once it is connected (on rank 0: once everybody is).

        host, port: where rank 0 listens (only for this host by default; port 0: any free one, told to `listening`).
        Raises UsageError when rank 0 cannot listen there, RankLost when not all are connected after `connect_s`.
        """
        self = cls(rank, size, token, deadline_s)
        try:
            async with asyncio.timeout(connect_s):
                if rank == 0:
                    await self._listen(host, port, listening)
                else:
                    await self._connect(host, port)
        except TimeoutError:
            late = sorted(set(range(1, size)) - set(self._peers)) if rank == 0 else [0]
            self.close()
            raise missed(f"rank {rank} connecting at {host}:{port or self.port}", late, connect_s) from None
        except BaseException:
            self.close()
            raise
        return self

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """Wait until every rank has arrived with the same tag; all payloads in rank order.

        Raises UsageError when tag or payload are too long, Divergence when tags differ, RankLost naming the rank whose
        connection ended, or those that did not arrive within the deadline.
        """
        name = check_sizes(tag, payload)
        if self._changed is not None:
            raise RuntimeError(f"rank {self.rank} exchanges {tag!r} within an exchange: await one at a time")
        self._round += 1
        number = self._round
        doing = f"rank {self.rank} in exchange {number} ({tag})"
        if self.rank == 0:
            self._arrive(0, number, name, payload)
        elif 0 in self._peers:
            self._peers[0].send(_ROUND.pack(ARRIVE, number) + _part(name, payload))
        try:
            async with asyncio.timeout(self._deadline_s):
                while number not in self._complete:
                    await self._change(doing)
        except TimeoutError:
            late = [r for r in range(self.size) if r not in self._parts.get(number, {})] if self.rank == 0 else [0]
            error = missed(doing, late, self._deadline_s or 0.0)
            self._end(str(error))
            raise error from None
        parts = self._complete.pop(number)
        compare_tags(number, [name for name, _ in parts])
        return [payload for _, payload in parts]

    def close(self) -> None:
        """Close the connections; an exchange in progress raises RankLost. Idempotent."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers.values()):
            peer.drop()
        self._notify()

    # -- connecting ---------------------------------------------------------------------------------------------

    async def _listen(self, host: str, port: int, listening: Callable[[int], None] | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._stranger, host, port)
        except OSError as error:
            raise UsageError(f"rank 0 cannot listen at {host}:{port} ({error.strerror}): choose a free port") from None
        self.port = self._server.sockets[0].getsockname()[1]
        if listening is not None:
            listening(self.port)
        while len(self._peers) < self.size - 1:
            await self._change(f"rank 0 listening at {host}:{self.port}")
        self._server.close()

    def _stranger(self) -> _Peer:
        return _Challenger(self._admit, self._gone)

    def _admit(self, peer: _Peer, message: bytes) -> None:
        if peer.rank is not None:
            self._received(peer, message)
            return
        proof = b""
        rank = -1
        if len(message) == _HELLO.size and message[:1] == HELLO:
            _, rank, proof = _HELLO.unpack(message)
        expected = _proof(self._token, peer.nonce, rank)
        if not (hmac.compare_digest(proof, expected) and 0 < rank < self.size and rank not in self._peers):
            peer.drop()
            return
        peer.rank, peer.largest = rank, _ROUND.size + _PART.size + TAG + PAYLOAD
        self._peers[rank] = peer
        peer.send(WELCOME)
        self._notify()

    async def _connect(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        while not self._welcome:
            peer = _Peer(self._greeted, self._gone)
            peer.largest = self.size * (_PART.size + TAG + PAYLOAD) + _ROUND.size
            try:
                await loop.create_connection(lambda peer=peer: peer, host, port)  # type: ignore[misc]
            except OSError:  # rank 0 does not listen yet
                await asyncio.sleep(0.05)
                continue
            while 0 not in self._peers:
                await self._change(f"rank {self.rank} connecting to rank 0 at {host}:{port}")
            return

    _welcome = False

    def _greeted(self, peer: _Peer, message: bytes) -> None:
        if peer.rank is not None:
            self._received(peer, message)
        elif message == WELCOME:
            peer.rank = 0
            self._peers[0] = peer
            self._notify()
        else:
            peer.send(_HELLO.pack(HELLO, self.rank, _proof(self._token, message, self.rank)))

    # -- running ------------------------------------------------------------------------------------------------
