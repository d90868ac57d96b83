"""P's way onto D's launch stream in the CPU world: places in D's FIFO, taken at the host enqueue (paper section 4).

A place is a job of D's worker thread. When the thread reaches it, it waits for P to arrive there, runs what P brought,
and P's thread, which has waited meanwhile, goes on with the result: the two event edges of a routed collective. A place
taken only when P's worker gets there would cross D.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from kernel.errors import OrderViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kernel.program import Call

T = TypeVar("T")


class Job(Protocol):
    """What stands in a stream's FIFO. Ends exactly once, run or dropped."""

    label: str

    def run(self, started: Callable[[], None], ended: Callable[[bool], None]) -> None:
        """Do it, on the stream's thread. `started` is called as the work proper begins, `ended` when it is over.

        `ended` hears whether that went well before anybody else does: what is recorded of this work comes before
        whatever its outcome sets going.
        """

    def drop(self, error: BaseException) -> None:
        """Deliver `error` to whoever waits for it, instead of doing it; nothing once the work proper has begun."""


class _State(Enum):
    OPEN = auto()
    FILLED = auto()
    RUNNING = auto()
    DROPPED = auto()


class Place:
    """One reserved place in D's FIFO."""

    def __init__(self, call: Call, scope: Callable[[], AbstractContextManager[None]]) -> None:
        self.call, self.label = call, str(call)
        self._scope = scope
        self._state = _State.OPEN
        self._lock = threading.Lock()
        # Two locks as one-shot signals: far cheaper than conditions, and a routed collective pays for both.
        self._settled, self._finished = threading.Lock(), threading.Lock()
        self._settled.acquire()
        self._finished.acquire()
        self._work: Callable[[], Any] | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def fill(self, work: Callable[[], T]) -> T:
        """P's side, once: hand over `work`, wait until D's thread has run it; its value, or the exception it raised."""
        with self._lock:
            if self._state is _State.OPEN:
                self._work, self._state = work, _State.FILLED
                self._settled.release()
        self._finished.acquire()
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def run(self, started: Callable[[], None], ended: Callable[[bool], None]) -> None:
        """D's side: wait for P and run what it brings; pass by when the place was dropped."""
        self._settled.acquire()
        with self._lock:
            if self._state is not _State.FILLED or self._work is None:
                return
            self._state = _State.RUNNING
        started()
        try:
            with self._scope():
                self._value = self._work()
        except BaseException as error:
            self._error = error
        ended(self._error is None)
        self._finished.release()

    def drop(self, error: BaseException) -> None:
        """P cannot come, or D's thread ends: whoever waits on either side goes on."""
        with self._lock:
            if self._state not in (_State.OPEN, _State.FILLED):
                return
            if self._state is _State.OPEN:
                self._settled.release()
            self._state, self._error = _State.DROPPED, error
            self._finished.release()


class WorkerRoute:
    """`kernel.ports.Route` over the worker thread of D's stream.

    put: enqueues a job on D's stream. scope: what routed work runs in, on D's thread.
    Places belong to the next submission to P's stream. What its work leaves, the submission behind it takes over (a
    forward that awaits data in the middle of a segment goes on in another one). When work fails, the places that it
    holds are dropped, so that D never waits for them.
    """

    def __init__(self, put: Callable[[Job], None], scope: Callable[[], AbstractContextManager[None]]) -> None:
        self._put, self._scope = put, scope
        self._reserved: list[Place] = []  # the event loop's
        self._held: deque[Place] = deque()  # P's thread's

    def reserve(self, calls: Sequence[Call]) -> None:
        """Take one place in D's FIFO for each call, now. For the next work submitted to P's stream."""
        for call in calls:
            place = Place(call, self._scope)
            self._reserved.append(place)
            self._put(place)

    def run(self, call: Call, work: Callable[[], T]) -> T:
        """Run `work` in the place reserved for `call`, on D's thread. Called from P's work.

        Raises OrderViolation when the next reserved place is for another call, or there is none.
        """
        if not self._held or self._held[0].call != call:
            found = f"the next place is for {self._held[0].call}" if self._held else "no place is left"
            raise OrderViolation(f"P runs {call}, but {found}: reserve a segment's routed calls before submitting it")
        return self._held.popleft().fill(work)

    def bind(self, work: Callable[[], T]) -> Callable[[], T]:
        """`work` of P's stream, together with the places reserved for it since the last call."""
        places, self._reserved = self._reserved, []

        def bound() -> T:
            self._held.extend(places)
            try:
                return work()
            except BaseException as error:
                while self._held:
                    self._held.popleft().drop(error)
                raise

        return bound
