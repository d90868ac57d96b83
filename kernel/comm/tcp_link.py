"""One TCP connection between two ranks: messages with a length, and a proof that both ends know the token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTH: Final = struct.Struct("!I")
NONCE: Final = 32


def proof(token: str, nonce: bytes, rank: int) -> bytes:
    """What only a holder of the token can answer to `nonce`, and only as `rank`; 32 bytes. The token never travels."""
    return hmac.new(token.encode(), nonce + struct.pack("!I", rank), hashlib.sha256).digest()


def keep_alive(link: socket.socket, dead_s: float) -> None:
    """Let the connection end by itself when the other host has not answered for about `dead_s` (0: the system's hours).

    The hosts' kernels do this: a process that is stopped, or busy, still counts as alive.
    """
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if dead_s:
        third = max(1, round(dead_s / 3))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * dead_s))


class Link(asyncio.Protocol):
    """One end of a connection.

    peer: the rank at the other end, None until it has proved that. largest: bytes of the longest message that it may
    send; a longer one ends the connection. dead_s: see `keep_alive`. received, lost, made: called in the event loop.
    """

    def __init__(
        self,
        largest: int,
        received: Callable[[Link, bytes], None],
        lost: Callable[[Link], None],
        made: Callable[[Link], None] | None = None,
        dead_s: float = 0.0,
    ) -> None:
        self.peer: int | None = None
        self.largest = largest
        self.nonce = os.urandom(NONCE)
        self._received, self._lost, self._made, self._dead_s = received, lost, made, dead_s
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's call."""
        self._transport = transport  # type: ignore[assignment]  # a stream's transport is a Transport
        link = transport.get_extra_info("socket")
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(link, self._dead_s)
        if self._made is not None:
            self._made(self)

    def data_received(self, data: bytes) -> None:
        """asyncio's call."""
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
            self._received(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's call."""
        self._transport = None
        self._lost(self)

    def send(self, message: bytes) -> None:
        """Send one message; nothing once the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(message)) + message)

    def drop(self) -> None:
        """End the connection after what was sent."""
        self._data.clear()
        if self._transport is not None:
            self._transport.close()
