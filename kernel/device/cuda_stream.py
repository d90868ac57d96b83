"""A stream of the CUDA world: work runs in place, as it only enqueues; one thread waits for what it enqueued.

No Python runs inside the driver. Each submission ends with an event with blocking synchronisation; the stream's waiter
thread sleeps on it without the interpreter's lock and wakes the loop.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from kernel.device.worker import Completion

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kernel.device.device_clock import DeviceClock
    from kernel.device.faults import Faults
    from kernel.device.worker import Watch
    from kernel.request import Phase

T = TypeVar("T")


def timing_event() -> torch.cuda.Event:
    """An event that tells time, and that a thread can sleep on."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


class CudaCompletion(Completion[T], Generic[T]):
    """`kernel.ports.Event` of one submission. The first outcome counts: a stream that stops may be ahead of the GPU."""

    __slots__ = ("_claimed", "end")

    def __init__(self) -> None:
        super().__init__()
        self.end: Any = None
        """The device's event, while the waiter has not seen it complete."""
        self._claimed = False

    def done(self) -> bool:
        """Whether the work has finished on the device, asked of the device itself. Never blocks."""
        if self._done:
            return True
        end = self.end
        try:
            return end is not None and bool(end.query())
        except RuntimeError:
            return self._done  # the device has failed; the waiter says how

    def succeed(self, value: T) -> None:
        """The device is through."""
        if self._claim():
            super().succeed(value)

    def fail(self, error: BaseException) -> None:
        """It failed, or will not be waited for any more."""
        if self._claim():
            super().fail(error)

    def _claim(self) -> bool:
        with self._lock:
            claimed, self._claimed = self._claimed, True
        return not claimed


class _Job:
    """One submission on its way through the device."""

    __slots__ = ("begin", "completion", "end", "kept", "label", "submitted_ns", "value")

    def __init__(self, label: str, begin: Any, end: Any, completion: CudaCompletion[Any]) -> None:
        self.label, self.begin, self.end, self.completion = label, begin, end, completion
        self.submitted_ns = 0
        self.value: Any = None
        self.kept: Any = None


class CudaStream:
    """`kernel.ports.Stream` over `stream`, a torch.cuda.Stream. `submit` and `stop` are called from one thread.

    current: makes `stream` the current one. prepare: runs first on the waiter thread (it selects the GPU there, or the
    thread would make a context on another one). watch: told of each start and finish, with the device's time.
    before: called as a submission begins; may raise. after: called as it ends, with whether its host code succeeded;
    what it returns is kept alive until the device is through. events: makes a timing event.
    """

    def __init__(
        self,
        phase: Phase,
        stream: Any,
        name: str,
        *,
        faults: Faults,
        clock: DeviceClock,
        current: Callable[[], AbstractContextManager[Any]],
        prepare: Callable[[], None],
        watch: Watch | None = None,
        before: Callable[[], None] | None = None,
        after: Callable[[bool], object] | None = None,
        events: Callable[[], Any] = timing_event,
    ) -> None:
        self.phase, self.name, self.torch_stream = phase, name, stream
        self.ended = Completion[None]()
        """Done when the waiter thread is through."""
        self._faults, self._clock, self._current, self._prepare = faults, clock, current, prepare
        self._watch, self._before, self._after, self._events = watch, before, after, events
        self._free: list[Any] = []
        self._abandoned: list[Any] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._flying: dict[int, _Job] = {}
        self._stopped: BaseException | None = None
        threading.Thread(target=self._main, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T], label: str) -> CudaCompletion[T]:
        """Run `work` now, with this stream current. The event completes when the device has done what it enqueued.

        An exception of `work` is delivered by the event at once; one that the device reports later too, as DeviceFault.
        """
        completion = CudaCompletion[T]()
        if self._stopped is not None:
            completion.fail(self._stopped)
            return completion
        job = _Job(label, self._event() if self._watch else None, self._event(), completion)
        worked = False
        try:
            if self._before is not None:
                self._before()
            with self._current():
                job.submitted_ns = time.monotonic_ns()
                if job.begin is not None:
                    job.begin.record(self.torch_stream)
                job.value = work()
                job.end.record(self.torch_stream)
            worked = True
        except BaseException as error:
            completion.fail(self._faults.translate(error, self.phase, label))
        finally:
            if self._after is not None:
                job.kept = self._after(worked)
        if not worked:
            # Part of it may run on the device still, and nobody will learn when that ends.
            self._abandoned.append(job.kept)
            return completion
        completion.end = job.end
        self._flying[id(job)] = job
        self._faults.enter(id(job), self.phase, label)
        self._jobs.put(job)
        return completion

    def stop(self, error: BaseException) -> None:
        """Deliver `error` for everything that has not finished, and end the thread once the device is through."""
        if self._stopped is None:
            self._stopped = error
            self._jobs.put(None)
            for job in list(self._flying.values()):
                job.completion.fail(error)

    def _event(self) -> Any:
        return self._free.pop() if self._free else self._events()

    def _main(self) -> None:
        try:
            self._prepare()
            while (job := self._jobs.get()) is not None:
                self._finish(job)
        finally:
            self.ended.succeed(None)

    def _finish(self, job: _Job) -> None:
        fault: BaseException | None = None
        try:
            if self._watch is not None and job.begin is not None:
                job.begin.synchronize()
                begun = self._clock.at(job.begin, job.submitted_ns)
                self._watch(self.phase, job.label, "start", begun)
                job.end.synchronize()
                self._watch(self.phase, job.label, "finish", max(begun, self._clock.at(job.end)))
            else:
                job.end.synchronize()
        except Exception as error:
            fault = self._faults.translate(error, self.phase, job.label)
        self._flying.pop(id(job), None)
        self._faults.leave(id(job))
        job.completion.end = None
        value, job.value = job.value, None
        if fault is None:
            job.kept = None
            job.completion.succeed(value)
            # Only the loop's thread takes events again, so nobody can find one re-recorded while asking it.
            self._free += [event for event in (job.begin, job.end) if event and not self._clock.holds(event)]
        else:
            self._abandoned.append(job.kept)
            job.completion.fail(fault)
