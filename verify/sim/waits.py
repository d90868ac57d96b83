"""What a suspended task waits for, in words: the await line of its own code, and the thing awaited."""

from __future__ import annotations

import asyncio
import linecache
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernel.step
from verify.sources import Site, place

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

_ROOMS = ("loop", "scheduler", "device", "collectives", "rendezvous", "waits")
_MACHINERY = (
    str(Path(asyncio.__file__).parent),
    str(Path(kernel.step.__file__)),
    *(str(Path(__file__).with_name(f"{room}.py")) for room in _ROOMS),
    str(Path(__file__).parents[1] / "explore"),
)


class Wait(asyncio.Future[None]):
    """A future that knows what it stands for, and which steps of a trace had to happen before it was done.

    To await it suspends the task, also when it is done already.
    """

    what: str = ""
    causes: tuple[int, ...] = ()

    def __await__(self) -> Generator[Any, None, None]:
        if self.done():
            self._asyncio_future_blocking = True
            yield self
        return (yield from super().__await__())


@lru_cache(maxsize=4096)
def machinery(filename: str) -> bool:
    """Whether a frame is asyncio's or the simulated world's, not that of the program that runs on it."""
    return filename.startswith(_MACHINERY)


def call_site() -> Site:
    """Where the program's own code, not the machinery, called in."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("?", 0)


def await_frames(coro: Any) -> list[FrameType]:
    """Frames of a suspended coroutine, outermost first, down to what it finally awaits."""
    frames = []
    while coro is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coro, f"{kind}_frame", None)
            if frame is not None:
                frames.append(frame)
                coro = getattr(coro, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            break
    return frames


def describe(task: asyncio.Task[Any]) -> str:
    """One line: the task's name, its await line, and what it waits for."""
    frames = await_frames(task.get_coro())
    own = [frame for frame in frames if not machinery(frame.f_code.co_filename)] or frames
    where = ""
    if own:
        site = own[-1].f_code.co_filename, own[-1].f_lineno
        text = linecache.getline(*site).strip()
        where = f" at {place(site)}" + (f" `{text}`" if text else "")
    waiter = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, Wait) and waiter.what:
        what = f" for {waiter.what}"
    elif isinstance(waiter, asyncio.Task):
        what = f" for task {waiter.get_name()!r}"
    elif waiter is None:
        what = ", ready to run"
    else:
        what = ""
    return f"task {task.get_name()!r} waits{where}{what}"
