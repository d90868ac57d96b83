"""The all-rank control phase over TCP, for a world of several hosts.

Rank 0 listens, the others connect. In each exchange rank 0 collects everybody's tag and payload and sends all of them
to everybody. While connecting, both ends prove that they know the token (`kernel.comm.tcp_link.proof`); nothing else
that a stranger sends is read.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from typing import TYPE_CHECKING, Final

from kernel.comm.rendezvous import PAYLOAD, TAG, check_sizes, compare_tags, missed
from kernel.comm.tcp_link import NONCE, Link, proof
from kernel.errors import RankLost, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_HELLO: Final = struct.Struct(f"!I{NONCE}s32s")
_ROUND: Final = struct.Struct("!cQ")
_PART: Final = struct.Struct("!II")
_LARGEST_PART: Final = _PART.size + TAG + PAYLOAD
_ALL, _LOST = b"A", b"L"
_STRANGER_S: Final = 10.0
_RETRY_S: Final = 0.05


class TcpRendezvous:
    """`kernel.ports.Rendezvous` of one rank; made by `open`. deadline_s: as in `SharedRendezvous`. dead_s: as in
    `keep_alive`.
    """

    def __init__(
        self, rank: int, size: int, token: str, deadline_s: float | None = None, dead_s: float = 0.0
    ) -> None:
        self.rank, self.size, self._dead_s = rank, size, dead_s
        self._token, self._deadline_s = token, deadline_s
        self._links: dict[int, Link] = {}
        self._number = 0
        self._here: dict[int, dict[int, bytes]] = {}  # on rank 0: exchange -> rank -> its part
        self._done: dict[int, list[bytes]] = {}  # exchange -> all parts
        self._lost: str | None = None
        self._changed: asyncio.Future[None] | None = None

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
        dead_s: float = 0.0,
        listening: Callable[[int], None] | None = None,
    ) -> TcpRendezvous:
        """Connect all ranks; returns once this rank is connected (rank 0: once everybody is).

        host, port: where rank 0 listens, by default only for this host; port 0: any free one, told to `listening`.
        connect_s: seconds to wait for the others. Raises UsageError when rank 0 cannot listen there, RankLost naming
        the ranks that are missing when the time is over.
        """
        self = cls(rank, size, token, deadline_s, dead_s)
        doing = f"rank {rank} connecting at {host}:{port}"
        try:
            async with asyncio.timeout(connect_s):
                if rank:
                    await self._connect(host, port, doing)
                elif size > 1:
                    await self._listen(host, port, doing, listening)
        except TimeoutError:
            missing = [0] if rank else [r for r in range(1, size) if r not in self._links]
            self.close()
            raise missed(doing, missing, connect_s) from None
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
        self._number = number = self._number + 1
        doing = f"rank {self.rank} in exchange {number} ({tag})"
        part = _PART.pack(len(name), len(payload)) + name + payload
        if self.rank == 0:
            self._arrive(0, number, part)
        else:
            self._links[0].send(_ROUND.pack(_ALL, number) + part)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._until(lambda: number in self._done, doing)
        except TimeoutError:
            here = self._here.get(number, {})
            late = [0] if self.rank else [r for r in range(self.size) if r not in here]
            error = missed(doing, late, self._deadline_s or 0.0)
            self._end(str(error))
            raise error from None
        pairs = [_unpack(part) for part in self._done.pop(number)]
        compare_tags(number, [name for name, _ in pairs])
        return [payload for _, payload in pairs]

    def close(self) -> None:
        """End the connections; an exchange in progress raises RankLost. Idempotent."""
        self._lost = self._lost or "its rendezvous was closed"
        for link in self._links.values():
            link.drop()
        self._notify()

    # -- connecting ---------------------------------------------------------------------------------------------

    async def _listen(
        self, host: str, port: int, doing: str, listening: Callable[[int], None] | None
    ) -> None:
        strangers: set[Link] = set()

        def greet(link: Link) -> None:
            strangers.add(link)
            link.send(link.nonce)
            loop.call_later(_STRANGER_S, _drop_stranger, link)

        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                lambda: Link(_HELLO.size, self._admit, self._ended, greet, self._dead_s), host, port
            )
        except OSError as error:
            raise UsageError(f"rank 0 cannot listen at {host}:{port} ({error.strerror}): give a free port") from None
        try:
            if listening is not None:
                listening(server.sockets[0].getsockname()[1])
            await self._until(lambda: len(self._links) == self.size - 1, doing)
        finally:
            server.close()
            for link in strangers:
                _drop_stranger(link)

    def _admit(self, link: Link, message: bytes) -> None:
        """On rank 0: a stranger's first message, or a member's part of an exchange."""
        if link.peer is not None:
            _, number = _ROUND.unpack_from(message)
            self._arrive(link.peer, number, message[_ROUND.size :])
            return
        rank, nonce, answer = _HELLO.unpack(message) if len(message) == _HELLO.size else (0, b"", b"")
        known = hmac.compare_digest(answer, proof(self._token, link.nonce, rank))
        if not (known and 0 < rank < self.size and rank not in self._links):
            link.drop()
            return
        link.peer, link.largest = rank, _ROUND.size + _LARGEST_PART
        self._links[rank] = link
        link.send(proof(self._token, nonce, 0))
        self._notify()

    async def _connect(self, host: str, port: int, doing: str) -> None:
        loop = asyncio.get_running_loop()
        greetings: list[bytes] = []

        def greeted(link: Link, message: bytes) -> None:
            if link.peer is not None:
                self._receive(message)
            elif not greetings:
                greetings.append(message)
                link.send(_HELLO.pack(self.rank, link.nonce, proof(self._token, message, self.rank)))
            elif hmac.compare_digest(message, proof(self._token, link.nonce, 0)):
                link.peer, self._links[0] = 0, link
                self._notify()
            else:
                link.drop()

        def ended(link: Link) -> None:
            if link.peer is None:
                self._lost = f"rank 0 at {host}:{port} refused the connection; give all ranks the same token and world"
                self._notify()
            else:
                self._ended(link)

        largest = _ROUND.size + self.size * _LARGEST_PART
        while True:
            with_rank_0 = Link(largest, greeted, ended, dead_s=self._dead_s)
            try:
                await loop.create_connection(lambda link=with_rank_0: link, host, port)  # type: ignore[misc]
            except OSError:  # rank 0 does not listen yet
                await asyncio.sleep(_RETRY_S)
            else:
                break
        await self._until(lambda: 0 in self._links, doing)

    # -- running ------------------------------------------------------------------------------------------------

    def _arrive(self, rank: int, number: int, part: bytes) -> None:
        here = self._here.setdefault(number, {})
        here[rank] = part
        if len(here) == self.size:
            parts = [part for _, part in sorted(self._here.pop(number).items())]
            for link in self._links.values():
                link.send(_ROUND.pack(_ALL, number) + b"".join(parts))
            self._done[number] = parts
            self._notify()

    def _receive(self, message: bytes) -> None:
        kind, number = _ROUND.unpack_from(message)
        if kind == _LOST:
            self._end(message[_ROUND.size :].decode(errors="replace"))
            return
        parts, at = [], _ROUND.size
        while at < len(message):
            stop = at + _PART.size + sum(_PART.unpack_from(message, at))
            parts.append(message[at:stop])
            at = stop
        self._done[number] = parts
        self._notify()

    def _ended(self, link: Link) -> None:
        if link.peer is not None:
            self._end(f"rank {link.peer} ended its connection")

    def _end(self, reason: str) -> None:
        """The run is over for this rank; rank 0 tells the others why."""
        if self._lost is None:
            self._lost = reason
            if self.rank == 0:
                for link in self._links.values():
                    link.send(_ROUND.pack(_LOST, self._number) + reason.encode()[:PAYLOAD])
            self._notify()

    async def _until(self, ready: Callable[[], bool], doing: str) -> None:
        while not ready():
            if self._lost is not None:
                raise RankLost(f"{doing} was given up: {self._lost}")
            self._changed = asyncio.get_running_loop().create_future()
            try:
                await self._changed
            finally:
                self._changed = None

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _drop_stranger(link: Link) -> None:
    if link.peer is None:
        link.drop()


def _unpack(part: bytes) -> tuple[bytes, bytes]:
    name_length, length = _PART.unpack_from(part)
    middle = _PART.size + name_length
    return part[_PART.size : middle], part[middle : middle + length]
