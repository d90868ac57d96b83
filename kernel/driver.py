"""Advances a model's `forward` from boundary to boundary. Model code is an `async def`, but not an asyncio task.

Running to the next boundary *is* a segment. Under D nothing may suspend, so one model file serves both phases and
capture.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kernel.errors import ModelError
from kernel.request import Phase
from kernel.step import Step, Suspend

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager
    from types import CodeType, FrameType

    from kernel.ports import Event

R = TypeVar("R")
_END: Final = 1 << 30


class Driver(Generic[R]):
    """Owns one forward's coroutine. Not thread-safe: one stream advances it."""

    def __init__(
        self, forward: Coroutine[Any, Any, R], step: Step, scope: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._forward, self._step, self._scope = forward, step, scope
        self._at = -1
        self._send: Any = None
        self.result: R | None = None
        self.finished = False
        self.waiting: Event[Any] | None = None

    def advance(self, end: int) -> bool:
        """Run model code until boundary `end` or its end; True when the forward has finished.

        Returns False with `waiting` set when the model awaits a handle that is not ready.
        Raises ModelError, naming the line, when model code awaits anything but a boundary or a handle, or when its
        boundaries do not count 0, 1, 2, ...
        """
        if self._at == end:
            return False
        value, self._send = self._send, None
        with self._scope():
            while True:
                try:
                    request = self._forward.send(value)
                except StopIteration as stop:
                    self._step.finished()
                    self.result, self.finished = stop.value, True
                    return True
                value = None
                if not isinstance(request, Suspend):
                    raise ModelError(
                        f"{self._line()} awaits {type(request).__name__}: model code may await only"
                        " step.boundary(i), step.notified(i), step.inner(i) and step.ready(handle)"
                    )
                if request.event is not None:
                    if self._step.phase is Phase.D:
                        raise ModelError(f"{self._line()} awaits step.ready under D, where nothing may suspend")
                    self.waiting = request.event
                    return False
                if request.index != self._at + 1:
                    raise ModelError(
                        f"{self._line()} awaits boundary {request.index} after boundary {self._at}:"
                        " a forward passes boundaries 0, 1, 2, ... one by one"
                    )
                self._at = request.index
                if request.index >= end:
                    return False

    def whole(self) -> R:
        """Run to the end, under D, where nothing may suspend; what the forward returns."""
        self.advance(_END)
        assert self.result is not None
        return self.result

    def stands(self, end: int) -> bool:
        """Whether its host code has got to boundary `end`, or to its end."""
        return self.finished or self._at >= end

    def resume(self, value: Any, end: int) -> bool:
        """Go on after `waiting` is done, with its value."""
        self.waiting, self._send = None, value
        return self.advance(end)

    def close(self) -> None:
        """Abandon the forward. One that its stream's thread is running just now ends with that stream."""
        with suppress(ValueError):  # "coroutine already executing"
            self._forward.close()

    def _line(self) -> str:
        inner: Any = self._forward
        code: CodeType = inner.cr_code
        frame: FrameType | None = inner.cr_frame
        while inner is not None and getattr(inner, "cr_frame", None) is not None:
            code, frame = inner.cr_code, inner.cr_frame
            inner = inner.cr_await
        return f"{code.co_filename}:{frame.f_lineno if frame else code.co_firstlineno}"
