"""`turnstile top --agent`: one a host. It looks at the rings there when the collector asks, and sends what has changed.

It goes on until its run has ended and the collector knows, or until Ctrl-C. A collector that is not there yet, or goes
away, is tried again; one that does not know the token is not.
"""

from __future__ import annotations

import hmac
import platform
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from verify import runs
from verify.hosts import wire
from verify.hosts.delta import Sender
from verify.top.follow import Follower

if TYPE_CHECKING:
    from pathlib import Path

CONNECT_S: Final = 5.0
PATIENCE_S: Final = 60.0
"""Without a word of the collector; it then is tried anew."""
AGAIN_S: Final = (0.2, 0.5, 1.0, 2.0)
"""Between two tries, the last one for ever."""


class _Lost(Exception):
    """The connection is gone; the text says how."""


def serve_agent(address: tuple[str, int], token_file: Path, run: str, stalled_s: float) -> int:
    """Serve until the run has ended; 0. Raises UsageError: no run, no token, a wrong one, or two agents for a rank."""
    token = wire.read_token(token_file)
    folder = runs.find(run, newest=True)
    follower = Follower(folder, stalled_s)
    follower.read()  # what is unusable is said before anything else
    tries, told, name = 0, "", wire.nonce()
    while True:
        try:
            with _connect(address) as link:
                tries = 0
                if not told.startswith("connected"):
                    told = f"connected to {address[0]}:{address[1]}"
                    print(f"turnstile: {told}: sending the ranks of {folder}", file=sys.stderr, flush=True)
                if _talk(link, token, follower, address, name):
                    return 0
        except (_Lost, OSError) as error:
            if told != (now := f"no collector at {address[0]}:{address[1]} ({_why(error)})"):
                told = now
                print(f"turnstile: {told}: trying again", file=sys.stderr, flush=True)
        if tries >= len(AGAIN_S) and follower.read().ended:
            raise UsageError(f"{_at(address)}: the run has ended, and no collector was there to know")
        time.sleep(AGAIN_S[min(tries, len(AGAIN_S) - 1)])
        tries += 1


def _at(address: tuple[str, int]) -> str:
    return f"--agent {address[0]}:{address[1]}"


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _connect(address: tuple[str, int]) -> socket.socket:
    link = socket.create_connection(address, timeout=CONNECT_S)
    with suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _talk(link: socket.socket, token: bytes, follower: Follower, address: tuple[str, int], name: str) -> bool:
    """Answer the collector; True when the run has ended and it knows. Raises _Lost, and UsageError if refused."""
    lines = _Lines(link)
    greeting = lines.next(CONNECT_S)
    if greeting.get("turnstile") != wire.VERSION or not isinstance(greeting.get("nonce"), str):
        raise UsageError(f"{_at(address)}: no collector of this version answers there: check the port")
    host, mine, theirs = platform.node()[:200], wire.nonce(), greeting["nonce"]
    shown = wire.proof(token, "agent", theirs, mine, host)
    link.sendall(wire.line({"host": host, "agent": name, "nonce": mine, "proof": shown}))
    answer = lines.next(CONNECT_S)
    if "error" in answer:
        raise UsageError(f"{_at(address)}: {str(answer['error'])[:200]}")
    if not hmac.compare_digest(str(answer.get("proof", "")), wire.proof(token, "collector", mine, theirs)):
        raise UsageError(f"{_at(address)}: the collector does not know the token: use its --token-file")
    sender = Sender()
    while True:
        asked = lines.next(PATIENCE_S)
        if "error" in asked:
            raise UsageError(f"{_at(address)}: {str(asked['error'])[:200]}")
        if "end" in asked:
            return True
        look = follower.read()
        _, rows = follower.rows(look)
        message = {
            "seen": asked.get("look"), "run": str(follower.run)[:1000], "about": follower.about[:1000],
            "size": follower.size, "ended": look.ended, **sender.changes(look, rows),
        }  # fmt: skip
        data = wire.line(message)
        if len(data) > wire.LONGEST:
            raise UsageError(f"{_at(address)}: an answer of {len(data):,} bytes: one has {wire.LONGEST:,} at most")
        link.settimeout(PATIENCE_S)
        link.sendall(data)


class _Lines:
    """Lines of a blocking socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._data = link, b""

    def next(self, patience_s: float) -> dict[str, Any]:
        """The next message. Raises _Lost."""
        end = time.monotonic() + patience_s
        while b"\n" not in self._data:
            left = end - time.monotonic()
            if left <= 0:
                raise _Lost("it says nothing")
            self._link.settimeout(left)
            try:
                more = self._link.recv(65536)
            except TimeoutError:
                raise _Lost("it says nothing") from None
            if not more:
                raise _Lost("it has closed the connection")
            self._data += more
            if len(self._data) > 65536:
                raise _Lost("it sends too long a line")
        one, _, self._data = self._data.partition(b"\n")
        try:
            return wire.parse(one)
        except wire.Malformed as error:
            raise _Lost(str(error)) from None
