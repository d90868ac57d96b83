"""A rank's heart: what it says of itself every fraction of a second, so that its launcher knows that it lives.

A beat is a message of the rank's event loop, so a process that was stopped, a loop that a policy holds, and a host that
cannot be reached are silent alike. It says how far the rank has come and where it stands (`pulse` listens).
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kernel.journal import Journal

FRAMES: Final = 3
"""Of a wait, the innermost ones outside asyncio are told."""


class Heart:
    """Beats every `every_s` from now on, by `send`, until closed. journal: set once the rank has one."""

    def __init__(self, send: Callable[[dict[str, Any]], None], every_s: float) -> None:
        self.journal: Journal | None = None
        self._send, self._every = send, every_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._away: str | None = None
        self._beat()

    def _beat(self) -> None:
        self._say()
        self._handle = self._loop.call_later(self._every, self._beat)

    def _say(self) -> None:
        journal = self.journal
        moved, at = (0, " while it started") if journal is None else (journal.moved, journal.standing)
        self._send({"beat": moved, "at": at} | ({} if self._away is None else {"away": self._away}))

    @asynccontextmanager
    async def away(self, what: str) -> AsyncIterator[None]:
        """The loop is about to be held for longer than a beat, by `what`, with turns of it in between perhaps."""
        self._away = what
        self._say()
        for _ in range(3):
            await asyncio.sleep(0)  # the message leaves at the end of a turn of the loop
        try:
            yield
        finally:
            self._away = None
            self._say()

    def tell(self) -> None:
        """Say in which lines this rank's round waits."""
        self._send({"where": [] if self._task is None else waits(self._task)})

    def close(self) -> None:
        """Say nothing more."""
        self._handle.cancel()


def waits(task: asyncio.Task[Any]) -> list[str]:
    """Where a suspended task waits: its innermost frames outside asyncio, the outer one first."""
    lines: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None) or getattr(inner, "ag_frame", None)
        if frame is not None and not frame.f_globals.get("__name__", "").startswith("asyncio"):
            code = frame.f_code
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        ways = (getattr(inner, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        inner = next(filter(None, ways), None)
    return lines[-FRAMES:]

