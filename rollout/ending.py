"""Signals that ask a run to end: each is heard at once, told to the loop, and never raised in the middle of it.

asyncio's own handler raises KeyboardInterrupt at a second Ctrl-C wherever the loop stands, which leaves its cleaning up
undone and its traceback on the terminal. Who has asked once is heard once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def asked_for(number: int) -> bool:
    """Whether a signal is to end a run here: SIGHUP, of a terminal that was closed, not under `nohup`, which has it
    ignored."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def end_once(number: int, _: FrameType | None) -> NoReturn:
    """A handler for before there is a loop: the first signal ends the program as Ctrl-C does, others are ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class Ending:
    """A context around a loop. asked: the signal that has come first, None while there is none.

    Before the loop has called `heard_by`, a signal is kept for it. Outside the main thread, no signal is heard here.
    Afterwards SIGTERM, SIGHUP, and a signal that was heard, are ignored for good: the process ends as it was asked to.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}
        self._tell: Callable[[int], object] | None = None

    def heard_by(self, end: Callable[[int], object]) -> None:
        """From the loop: `end(signal)` is to be called in it, also for one that has come already."""
        loop = asyncio.get_running_loop()
        self._tell = lambda number: loop.call_soon_threadsafe(end, number)
        if self.asked is not None:
            end(self.asked)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in filter(asked_for, SIGNALS):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            ending = self.asked is not None or number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ending else before)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.asked is None:
            self.asked = number
            if self._tell is not None:
                with suppress(RuntimeError):  # the loop has just closed
                    self._tell(number)
