"""What becomes known later: a thread that notes which calls are over, and the exceptions that nobody catches.

The thread also writes the time at which it ran into the ring. Where that time stands still though the process runs,
some thread of it holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from kernel.comm.tap.notes import OURS, TORCH, Note, exception_text
from kernel.record.foreign import LEAVES
from kernel.record.layout import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from weakref import ref

    from kernel.comm.tap.notes import Notes

PERIOD_S: Final = 0.25
MOST: Final = 4096
"""Calls whose end is watched for; of more, the oldest are not."""


class Watch:
    """See the module. capturing: CUDA captures a graph in this process, during which no event may be asked for."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.capturing = False
        self.works: dict[ref[Any], Note | list[Note]] = {}
        """A Work -> its call, or the calls that were launched together. What removes an entry is its Work's end."""
        self._kept: deque[tuple[Any, Note]] = deque(maxlen=MOST)
        self._marks: deque[tuple[Any, str, Note | int]] = deque(maxlen=MOST)
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._hooks: tuple[Any, Any, Any, Any] | None = None
        self._exits: tuple[Any, Any] | None = None
        self._left = False

    # -- what is watched ------------------------------------------------------------------------------------------

    def keep(self, work: Any, note: Note) -> None:
        """A Work that says when its call is over, and that nobody in Python holds."""
        self._kept.append((work, note))

    @property
    def mine(self) -> bool:
        """Whether this thread is noting something itself."""
        return bool(getattr(self.notes.local, "marking", False))

    def mark(self, note: Note) -> None:
        """What is on the current stream now is behind a call: when it is over, so is the call."""
        self._mark(note)

    def launch(self, number: int) -> None:
        """The same for a graph launch, event `number`."""
        self._mark(number)

    def _mark(self, what: Note | int) -> None:
        try:
            if self.capturing:
                return
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.notes.local.marking = True
            try:
                event.record()
            finally:
                self.notes.local.marking = False
            self._marks.append((event, str(torch.cuda.current_stream().cuda_stream), what))
        except Exception as error:
            self.notes.broken("the end of a call", error)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No event is asked for meanwhile."""
        with self._lock:
            yield

    # -- the thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, and hear of exceptions."""
        self._thread = threading.Thread(target=self._run, name="turnstile record", daemon=True)
        self._thread.start()
        mine = self._uncaught, self._uncaught_in_thread
        self._hooks = (sys.excepthook, threading.excepthook, *mine)
        sys.excepthook, threading.excepthook = mine
        # SystemExit comes to no hook.
        leaves = self._exit
        self._exits = (sys.exit, leaves)
        sys.exit = leaves

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        self.leave()
        self._kept.clear()
        self._marks.clear()

    def leave(self) -> None:
        """Hear of no exception any more. In a forked child too, where the thread is not, and whose end is its own."""
        self._left = True
        if self._hooks is not None:
            before, before_in_threads, mine, mine_in_threads = self._hooks
            # Whoever hooked in after us calls us, and we call whom we found.
            if sys.excepthook is mine:
                sys.excepthook = before
            if threading.excepthook is mine_in_threads:
                threading.excepthook = before_in_threads
        if self._exits is not None:
            original, own = self._exits
            if sys.exit is own:
                sys.exit = original

    def _run(self) -> None:
        # Python 3.14 is the first to tell the system a thread's name. Whoever looks at the process from outside must
        # not take this one, which ticks for ever, for a thread of the program that sleeps.
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("turnstile")
        while not self._end.wait(PERIOD_S):
            try:
                self.notes.recorder.beat()
                self.look()
            except Exception as error:
                self.notes.broken("what is over", error)

    def look(self) -> None:
        """Note what is over by now."""
        for place, note in list(self.works.items())[-MOST:]:
            if isinstance(note, Note) and not note.done and (work := place()) is not None:
                self._over(work, note)
        for _ in range(len(self._kept)):
            try:
                work, note = self._kept.popleft()
            except IndexError:
                break
            if not note.done and not self._over(work, note):
                self._kept.append((work, note))
        with self._lock:
            if self.capturing:
                return
            waiting: set[str] = set()
            for _ in range(len(self._marks)):
                try:
                    event, stream, what = self._marks.popleft()
                except IndexError:
                    break
                if stream in waiting or not event.query():
                    waiting.add(stream)
                    self._marks.append((event, stream, what))
                elif isinstance(what, int):
                    self.notes.event(Kind.CALL_DONE, seq=-1, epoch=self.notes.thread(), a=what)
                else:
                    self.notes.done(what)

    def _over(self, work: Any, note: Note) -> bool:
        """Note that a call is over if its Work says so; whether it did."""
        if not note.on_host or not work.is_completed():
            return False
        # Who sent to a recv from anybody is asked when the program waits for it.
        if note.call.peer != -1:
            self.notes.done(note)
        return True

    # -- exceptions -----------------------------------------------------------------------------------------------

    def _uncaught(self, kind: Any, error: Any, trace: Any) -> None:
        before = self._hooks[0] if self._hooks is not None else sys.__excepthook__
        if not self._left and not issubclass(kind, KeyboardInterrupt):
            self.exception(error, trace)
        before(kind, error, trace)

    def _exit(self, status: Any = None, /) -> NoReturn:
        if status not in (None, 0) and not self._left and threading.current_thread() is threading.main_thread():
            try:
                self.notes.say(Kind.DECISION, f"{LEAVES}{' '.join(str(status).split())[:300]}")
            except Exception as failure:
                self.notes.broken("an exit", failure)
        raise SystemExit(status)

    def _uncaught_in_thread(self, args: Any) -> None:
        before = self._hooks[1] if self._hooks is not None else threading.__excepthook__
        if not self._left and args.exc_value is not None:
            self.exception(args.exc_value, args.exc_traceback)
        before(args)

    def exception(self, error: BaseException, trace: Any) -> None:
        """Note an exception that ends a thread, and which call raised it."""
        try:
            number = next((call for mark, call in self.notes.failed if mark == id(error)), -1)
            site = 0
            for frame, line in traceback.walk_tb(trace):
                file = frame.f_code.co_filename
                if not file.startswith((TORCH, OURS)):
                    site = self.notes.recorder.site(f"{file}:{line} {frame.f_code.co_qualname}")
            text = self.notes.recorder.site(exception_text(error))
            self.notes.event(Kind.EXCEPTION, epoch=self.notes.thread(), a=number + 1, b=text, site=site)
        except Exception as failure:
            self.notes.broken("an exception", failure)
