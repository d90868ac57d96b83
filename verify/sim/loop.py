"""An asyncio event loop in virtual time: one for each rank, all of them in one thread, driven by a `Scheduler`.

Stock asyncio runs on it unmodified. Within a rank the order is that of production: callbacks run first in, first out,
in batches, and timers that are due join at the start of a batch. What differs is only *when* a rank runs, which is the
scheduler's choice, and that waiting costs no time. Whatever would touch the outside raises, naming the line.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import threading
import weakref
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple

from verify.sim.errors import Outside
from verify.sim.scheduler import Scheduler
from verify.sim.waits import call_site, describe
from verify.sources import place

if TYPE_CHECKING:
    import contextvars

    from verify.sim.launches import Launches

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


def _outside(name: str, instead: str = "the simulated world has no such thing; use the ports of the kernel") -> Any:
    def refuse(self: RankLoop, *args: Any, **kwargs: Any) -> NoReturn:
        raise Outside(f"rank {self.rank} called {name} at {place(call_site())}: {instead}")

    refuse.__name__ = name
    return refuse


class _Ready:
    """A handle among which `choose` picks, where the order within a rank is free."""

    def __init__(self, loop: RankLoop, handle: events.Handle) -> None:
        self._loop, self._handle = loop, handle

    def __str__(self) -> str:
        callback = self._handle._callback  # type: ignore[attr-defined]
        owner = getattr(callback, "__self__", None)
        what = owner.get_name() if isinstance(owner, asyncio.Task) else getattr(callback, "__qualname__", "callback")
        return f"{self._loop}: {what}"

    def act(self) -> None:
        """Never: its rank runs it."""
        raise NotImplementedError


class RankTask(asyncio.Task[T]):
    """A task with a hash of its own, so that a set of tasks has the same order in every run.

    asyncio cancels the tasks of a group, and waits for several, in the order of a set; by default that is the order of
    addresses.
    """

    def __init__(self, number: int, coro: Any, **kwargs: Any) -> None:
        self.number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.number


class RankLoop(asyncio.AbstractEventLoop):
    """The event loop of one rank.

    rank: its number, for names and messages. scheduler: shared by all ranks of a world; one of its own by default, so
    that `asyncio.Runner(loop_factory=RankLoop)` runs a program of one rank. `host`, where set, makes it stand still.
    """

    slow_callback_duration = 0.1

    def __init__(self, rank: int = 0, scheduler: Scheduler | None = None) -> None:
        self.rank = rank
        self.scheduler = scheduler if scheduler is not None else Scheduler()
        self._ready: deque[events.Handle] = deque()
        self._due: list[tuple[float, int, events.TimerHandle]] = []
        self._batch = 0
        self._sequence = 0
        self._awake = self._acting = self._closed = self._debug = False
        self._born = self._opened = 0
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._factory: Any = None
        self._handler: ExceptionHandler | None = None
        self._asyncgens: weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], int] = weakref.WeakKeyDictionary()
        self._asyncgen_hooks = (self._asyncgen_firstiter, self._asyncgen_finalizer)
        self._thread = threading.get_ident()
        self.host: Launches | None = None
        self.scheduler.witnesses.append(self.waits)

    def __str__(self) -> str:
        return f"rank {self.rank}"

    # -- an actor of the scheduler ------------------------------------------------------------------------------

    def act(self) -> None:
        """Run one batch of handles; one handle where somebody chooses among the actors."""
        ready, scheduler, due = self._ready, self.scheduler, self._due
        choose = scheduler.choose
        if self.host:
            self.host.clear.append(partial(scheduler.enable, self))
            return
        if not self._batch or scheduler.permute:
            while due:
                ready.append(heapq.heappop(due)[2])
            self._batch = len(ready)
        count = self._batch if choose is None else min(1, self._batch)
        self._batch -= count
        if choose is not None and scheduler.permute and len(ready) > 1:
            ready.rotate(-choose([_Ready(self, handle) for handle in ready]))
        self._enter()
        try:
            for ran in range(1, count + 1):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
                if self.host:
                    self._batch += count - ran
                    break
        finally:
            self._acting = False
            if self._batch:
                scheduler.enable_first(self)
            elif ready or due:
                scheduler.enable(self)
            else:
                self._awake = False

    def _enter(self) -> None:
        """From here on this rank's code runs."""
        if self.scheduler.current is not self:
            self.scheduler.current = self
            events._set_running_loop(self)
            sys.set_asyncgen_hooks(*self._asyncgen_hooks)
        self._acting = True

    def _wake(self) -> None:
        self._awake = True
        self.scheduler.enable(self)

    # -- callbacks and time -------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> events.Handle:
        """As in asyncio."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = events.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._awake:
            self._wake()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> events.Handle:
        """As in asyncio, from the one thread that there is."""
        if threading.get_ident() != self._thread:
            raise Outside(f"rank {self.rank} was called from a thread at {place(call_site())}: there is one thread")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        """As in asyncio."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        """As in asyncio, to the nearest nanosecond; a time that is not yet reached moves the clock by one at least."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = events.TimerHandle(when, callback, args, self, context)
        now_ns = self.scheduler.now_ns
        if when <= now_ns / 1e9:
            self._join(handle)
        else:
            handle._scheduled = True  # type: ignore[attr-defined]
            self.scheduler.timer(max(now_ns + 1, round(when * 1e9)), handle, self._join)
        return handle

    def _join(self, handle: events.TimerHandle) -> None:
        handle._scheduled = False  # type: ignore[attr-defined]
        self._sequence += 1
        heapq.heappush(self._due, (handle.when(), self._sequence, handle))
        if not self._awake:
            self._wake()

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        self.scheduler.dropped()

    def time(self) -> float:
        """Virtual seconds, the same on all ranks."""
        return self.scheduler.now_ns / 1e9

    # -- futures and tasks --------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """As in asyncio."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[T]:
        """As in asyncio; a task without a name is named after its order of creation."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        self._born += 1
        name = str(name) if name is not None else f"task {self._born}"
        if context is not None:
            kwargs["context"] = context
        if self._factory is None:
            task: asyncio.Task[T] = self._task(self._born, coro, loop=self, name=name, **kwargs)
        else:
            task = self._factory(self, coro, **kwargs)
            if hasattr(task, "set_name"):
                task.set_name(name)
        self._tasks[task] = self._born
        return task

    def _task(self, number: int, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        return RankTask(number, coro, **kwargs)

    def set_task_factory(self, factory: Any) -> None:
        """As in asyncio."""
        self._factory = factory

    def get_task_factory(self) -> Any:
        """As in asyncio."""
        return self._factory

    # -- state --------------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Drive the whole world until `future` is done."""
        task = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        stop = self.scheduler.stop

        def done(_: asyncio.Future[Any]) -> None:
            stop()

        task.add_done_callback(done)
        try:
            self.scheduler.run()
        except BaseException:
            if task.done() and not task.cancelled():
                task.exception()
            raise
        finally:
            task.remove_done_callback(done)
        if not task.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        return task.result()

    def run_forever(self) -> None:
        """Drive the whole world until `stop`."""
        self.scheduler.run()

    def stop(self) -> None:
        """End `run_forever` after this batch."""
        self.scheduler.stop()

    def is_running(self) -> bool:
        """Whether one of this rank's handles is running."""
        return self._acting

    def is_closed(self) -> bool:
        """As in asyncio."""
        return self._closed

    def close(self) -> None:
        """As in asyncio."""
        if self._acting:
            raise RuntimeError("Cannot close a running event loop")
        self._closed = True
        self._ready.clear()
        self._due.clear()
        self._batch = 0

    def get_debug(self) -> bool:
        """As in asyncio."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """As in asyncio; nothing depends on it here."""
        self._debug = enabled

    async def shutdown_asyncgens(self) -> None:
        """As in asyncio."""
        closing = sorted(self._asyncgens, key=self._asyncgens.__getitem__)
        self._asyncgens.clear()
        for outcome in await asyncio.gather(*(agen.aclose() for agen in closing), return_exceptions=True):
            if isinstance(outcome, Exception):
                self.call_exception_handler({"message": "an async generator failed to close", "exception": outcome})

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Nothing: there is no executor."""

    def _asyncgen_firstiter(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._opened += 1
        self._asyncgens[agen] = self._opened

    def _asyncgen_finalizer(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens.pop(agen, None)
        if not self._closed:
            self.call_soon(self.create_task, agen.aclose())

    # -- errors -------------------------------------------------------------------------------------------------

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An exception that nobody receives ends the run, unless a handler was set."""
        if self._handler is not None:
            self._handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with `Orphan`."""
        task = context.get("task") or context.get("future")
        name = f" ({task.get_name()})" if isinstance(task, asyncio.Task) else ""
        self.scheduler.fail(f"rank {self.rank}{name}: {context.get('message')}", context.get("exception"))

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        """As in asyncio."""
        self._handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        """As in asyncio."""
        return self._handler

    # -- looking at the rank ------------------------------------------------------------------------------------

    def pending(self) -> list[asyncio.Task[Any]]:
        """The rank's unfinished tasks in order of creation."""
        alive = [(born, task) for task, born in self._tasks.items() if not task.done()]
        return [task for _, task in sorted(alive, key=lambda pair: pair[0])]

    def unreceived(self) -> list[asyncio.Task[Any]]:
        """The rank's failed tasks whose exception nobody has looked at, in order of creation."""
        dead = [(born, task) for task, born in self._tasks.items() if getattr(task, "_log_traceback", False)]
        return [task for _, task in sorted(dead, key=lambda pair: pair[0])]

    def waits(self) -> Iterator[str]:
        """What each unfinished task waits for, in words."""
        for task in self.pending():
            yield f"rank {self.rank}: {describe(task)}"

    # -- the outside --------------------------------------------------------------------------------------------

    run_in_executor = _outside("run_in_executor", "a rank has no threads; submit device work to a stream")
    set_default_executor = _outside("set_default_executor")
    add_reader = _outside("add_reader")
    remove_reader = _outside("remove_reader")
    add_writer = _outside("add_writer")
    remove_writer = _outside("remove_writer")
    add_signal_handler = _outside("add_signal_handler")
    remove_signal_handler = _outside("remove_signal_handler")
    getaddrinfo = _outside("getaddrinfo")
    getnameinfo = _outside("getnameinfo")
    create_connection = _outside("create_connection")
    create_server = _outside("create_server")
    create_unix_connection = _outside("create_unix_connection")
    create_unix_server = _outside("create_unix_server")
    create_datagram_endpoint = _outside("create_datagram_endpoint")
    connect_accepted_socket = _outside("connect_accepted_socket")
    connect_read_pipe = _outside("connect_read_pipe")
    connect_write_pipe = _outside("connect_write_pipe")
    subprocess_shell = _outside("subprocess_shell")
    subprocess_exec = _outside("subprocess_exec")
    sendfile = _outside("sendfile")
    start_tls = _outside("start_tls")
    sock_recv = _outside("sock_recv")
    sock_recv_into = _outside("sock_recv_into")
    sock_recvfrom = _outside("sock_recvfrom")
    sock_recvfrom_into = _outside("sock_recvfrom_into")
    sock_sendall = _outside("sock_sendall")
    sock_sendto = _outside("sock_sendto")
    sock_connect = _outside("sock_connect")
    sock_accept = _outside("sock_accept")
    sock_sendfile = _outside("sock_sendfile")
