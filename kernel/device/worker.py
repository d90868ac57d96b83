"""A stream of the CPU world: a worker thread with a FIFO, and the completion of one piece of its work."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.comm.route import Job
    from kernel.request import Phase

T = TypeVar("T")


class Watch(Protocol):
    """Told what a stream does, on a thread of that stream. Raises nothing."""

    def __call__(self, phase: Phase, label: str, what: str, time_ns: int = ...) -> None:
        """`what`: "start", then "finish", or "fail" where it raised. time_ns: when, monotonic nanoseconds; 0: now."""


class Completion(Generic[T]):
    """`kernel.ports.Event`: finished by one thread, awaited by tasks of any event loop."""

    __slots__ = ("_done", "_error", "_lock", "_value", "_waiters")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def done(self) -> bool:
        """Whether the work has finished. Never blocks."""
        return self._done

    async def wait(self) -> T:
        """Suspend the task until the work has finished; its value, or the exception it raised."""
        if not self._done:
            future = asyncio.get_running_loop().create_future()
            with self._lock:
                if not self._done:
                    self._waiters.append(future)
                else:
                    future.set_result(None)
            await future
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def succeed(self, value: T) -> None:
        """The work has returned `value`."""
        self._value = value
        self._finish()

    def fail(self, error: BaseException) -> None:
        """The work has raised `error`, or will never run because of it."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._done = True
            waiters, self._waiters = self._waiters, []
        for future in waiters:
            with suppress(RuntimeError):  # that loop has been closed: nobody waits there any more
                future.get_loop().call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Work(Generic[T]):
    """A submitted callable."""

    def __init__(self, work: Callable[[], T], label: str) -> None:
        self.label, self._work = label, work
        self.completion: Completion[T] = Completion()
        self._claim = threading.Lock()

    def run(self, started: Callable[[], None], ended: Callable[[bool], None]) -> None:
        if not self._claim.acquire(blocking=False):
            return
        started()
        try:
            value = self._work()
        except BaseException as error:
            ended(False)
            self.completion.fail(error)
        else:
            ended(True)
            self.completion.succeed(value)

    def drop(self, error: BaseException) -> None:
        if self._claim.acquire(blocking=False):
            self.completion.fail(error)


class WorkerStream:
    """`kernel.ports.Stream`: jobs run one after the other on a thread called `name`.

    prepare: runs first, on the thread. `submit`, `put` and `stop` are called from one thread, the event loop's.
    """

    def __init__(
        self, phase: Phase, name: str, prepare: Callable[[], None], watch: Watch | None = None
    ) -> None:
        self.phase, self.name = phase, name
        self.ended = Completion[None]()
        """Done when the thread is through."""
        self._prepare, self._watch = prepare, watch
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._current: Job | None = None
        self._stopped: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], label: str) -> Completion[T]:
        """Enqueue `work`; returns at once. The event delivers what it raises, or the error that `stop` was given."""
        job = _Work(work, label)
        self.put(job)
        return job.completion

    def put(self, job: Job) -> None:
        """Enqueue any job."""
        if self._stopped is not None:
            job.drop(self._stopped)
        else:
            self._jobs.put(job)

    def stop(self, error: BaseException) -> None:
        """Deliver `error` for all work not yet begun, and end the thread after the work in progress. Idempotent."""
        if self._stopped is None:
            # The thread sets `_current` before it looks at `_stopped`: one of the two sees the other.
            self._stopped = error
            self._jobs.put(None)
            current = self._current
            if current is not None:
                current.drop(error)

    def join(self) -> None:
        """Wait for the thread to be gone, once `ended` is done: it has only to return."""
        self._thread.join()

    def _main(self) -> None:
        self._prepare()
        while (job := self._jobs.get()) is not None:
            self._current = job
            if self._stopped is not None:
                job.drop(self._stopped)
            elif self._watch is None:
                job.run(_ignore, _ignore)
            else:
                self._observe(job, self._watch)
            self._current = None
        self.ended.succeed(None)

    def _observe(self, job: Job, watch: Watch) -> None:
        def started() -> None:
            watch(self.phase, job.label, "start")

        def ended(well: bool) -> None:
            watch(self.phase, job.label, "finish" if well else "fail")

        job.run(started, ended)


def _ignore(_well: bool = True) -> None:
    pass
