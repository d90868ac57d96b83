"""What ranks tell their launcher: nothing is lost, and a failure is read before what follows from it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import RankLost
from rollout.ranks import wire

if TYPE_CHECKING:
    from collections.abc import Callable

CAUSE_S: Final = 1.0
"""How long the word of a rank that lost another waits for that other's own, which may come on a slower way."""
PART_S: Final = 30.0
"""For a launcher to take note that a rank ends; longer than a busy one holds its loop."""


class Words:
    """Messages of all ranks in one queue. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue()

    def put(self, rank: int, message: dict[str, Any]) -> None:
        """A rank has said this."""
        if message.get("failed") == RankLost.__name__:
            asyncio.get_running_loop().call_later(CAUSE_S, self._queue.put_nowait, (rank, message))
        else:
            self._queue.put_nowait((rank, message))

    async def get(self) -> tuple[int, dict[str, Any]]:
        """The next to be read."""
        return await self._queue.get()

    async def pump(
        self,
        rank: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heard: Callable[[int, dict[str, Any]], bool],
    ) -> dict[str, Any]:
        """Take what a rank says until it parts, and let it go; its last message, {} if none.

        heard: takes a message and tells whether nobody else needs it.
        """
        last: dict[str, Any] = {}
        while (message := await wire.read(reader)) is not None:
            if not heard(rank, message):
                last = message
                self.put(rank, message)
        writer.close()
        return last


def tell(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send; nothing to one that has parted."""
    if not writer.is_closing():
        writer.write(wire.pack(message))


async def part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say no more, and go once the other side has heard everything, which it shows by closing.

    A socket that is closed sooner makes the other side's next write fail, and it then drops what it had not read yet.
    """
    with suppress(OSError, TimeoutError, RuntimeError):  # nobody is left to tell; uvloop raises the last of them
        async with asyncio.timeout(PART_S):
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
    with suppress(OSError):
        writer.close()
        await writer.wait_closed()
