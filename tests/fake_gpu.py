"""A GPU of two FIFOs that moves only when a test says so, with the few calls that `kernel.device.cuda_*` makes."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUND_S = 30.0


class FakeGpu:
    """What has run, in order; the current stream; an error that the device has reported (sticky)."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.current: FakeStream | None = None
        self.error: RuntimeError | None = None
        self.now_ms = 0.0
        self.streams: list[FakeStream] = []
        self.moved = threading.Condition()

    def stream(self) -> FakeStream:
        """A new FIFO."""
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def event(self) -> FakeEvent:
        """A new event, not recorded."""
        return FakeEvent(self)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """`stream` is the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, name: str) -> None:
        """A kernel on the current stream."""
        assert self.current is not None
        self.current.ops.append(("run", name))

    def step(self) -> bool:
        """Let each stream do what it can do next; False when nothing can move."""
        with self.moved:
            moved = [stream.step() for stream in self.streams]
            self.moved.notify_all()
        return any(moved)

    def run(self) -> None:
        """Let everything happen that can."""
        while self.step():
            pass

    def fail(self, error: RuntimeError) -> None:
        """From now on everything that asks the device raises `error`."""
        with self.moved:
            self.error = error
            self.moved.notify_all()


class FakeStream:
    """A FIFO of kernels, records and waits."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.ops = gpu, list[tuple[str, Any]]()

    def wait_event(self, event: FakeEvent) -> None:
        """What follows waits for the latest record of `event`."""
        self.ops.append(("wait", event.token))

    def step(self) -> bool:
        """Do the first thing, if it can be done."""
        if not self.ops:
            return False
        kind, what = self.ops[0]
        if kind == "wait" and not what.reached:
            return False
        self.ops.pop(0)
        self.gpu.now_ms += 1.0
        if kind == "run":
            self.gpu.ran.append(what)
        elif kind == "record":
            what.reached, what.at_ms = True, self.gpu.now_ms
        return True


class Token:
    """One record of an event."""

    reached = False
    at_ms = 0.0


class FakeEvent:
    """As torch.cuda.Event."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.token = gpu, Token()
        self.token.reached = True
        self.records = 0

    def record(self, stream: FakeStream) -> None:
        """Completes when `stream` gets here."""
        self.token = Token()
        self.records += 1
        stream.ops.append(("record", self.token))

    def query(self) -> bool:
        """Whether the latest record has been reached."""
        if self.gpu.error is not None:
            raise self.gpu.error
        return self.token.reached

    def synchronize(self) -> None:
        """Wait for it."""
        token = self.token
        with self.gpu.moved:
            assert self.gpu.moved.wait_for(lambda: token.reached or self.gpu.error is not None, BOUND_S)
        if self.gpu.error is not None:
            raise self.gpu.error

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds between two reached records."""
        assert self.token.reached
        assert end.token.reached
        return end.token.at_ms - self.token.at_ms
