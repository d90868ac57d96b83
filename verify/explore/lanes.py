"""A rank's event loop for exploration: each ready handle is an actor of its own, so that any order can be chosen.

Two fidelities. `any`: ready handles of a rank in any order; more orders than production has, and the fewest conflicts,
so that one run can stand for all. `fifo`: as in production, first in, first out; what comes from outside the rank (a
rendezvous, a device) is delivered when the scheduler chooses, behind what is ready then.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from verify.sim.footprint import everything, touched
from verify.sim.loop import RankLoop, RankTask
from verify.sim.waits import Wait, call_site
from verify.sources import place

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable, Coroutine, Generator

    from verify.sim.scheduler import Scheduler
    from verify.sim.trace import Trace

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FORWARDERS = ("shield.<locals>._inner_done_callback", "shield.<locals>._outer_done_callback")


class LaneTask(RankTask[T]):
    """A task of which to await the end is a step of its own, also when it has ended already."""

    _label = ""

    @property
    def label(self) -> str:
        """Names it among all tasks of all ranks, the same in every schedule."""
        if not self._label:
            # Not before it is asked for: a TaskGroup names its tasks after it has made them.
            loop = self.get_loop()
            name = f"{loop}: {self.get_name()}"
            self._label = loop.unique(name) if isinstance(loop, LaneLoop) else name
        return self._label

    def __await__(self) -> Generator[Any, None, T]:
        if self.done() and self._split():
            ended = Wait(loop=self.get_loop())
            ended.what, ended.causes = f"task {self.get_name()!r}", self.ended()
            ended.set_result(None)
            yield from ended.__await__()
        return (yield from super().__await__())

    def _split(self) -> bool:
        loop = self.get_loop()
        return isinstance(loop, LaneLoop) and loop.scheduler.trace is not None and loop.scheduler.trace.split

    def ended(self) -> tuple[int, ...]:
        """The step in which it ended."""
        loop = self.get_loop()
        trace = loop.scheduler.trace if isinstance(loop, LaneLoop) else None
        return trace.last(self) if trace is not None else ()


class Turn:
    """One ready handle: the right to run it once. lane: its task, or a name of its own."""

    __slots__ = ("_causes", "delivered", "handle", "lane", "loop")

    def __init__(self, loop: LaneLoop, handle: events.Handle, lane: Any, causes: tuple[int, ...]) -> None:
        self.loop, self.handle, self.lane, self._causes = loop, handle, lane, causes
        self.delivered = True

    def __str__(self) -> str:
        lane = self.lane
        name = lane if isinstance(lane, str) else getattr(lane, "label", "") or f"{self.loop}: {lane.get_name()}"
        return name if self.delivered else f"{name} delivered"

    @property
    def line(self) -> tuple[Turn, ...]:
        """At the fidelity `fifo`, where it is the first of its rank's ready handles: all of them."""
        return self.loop.line if self.delivered else ()

    def causes(self) -> tuple[int, ...]:
        """The step that made it ready, and what else had to happen."""
        return self._causes

    def wait_for(self, step: int) -> None:
        """It cannot run before `step`."""
        self._causes = (*self._causes, step)

    def act(self) -> None:
        """Run the handle, or let it join the others that are ready."""
        self.loop.take(self)


class LaneLoop(RankLoop):
    """See above. fifo: the fidelity."""

    fifo = False

    def __init__(self, rank: int = 0, scheduler: Scheduler | None = None) -> None:
        super().__init__(rank, scheduler)
        self._queue: deque[Turn] = deque()
        self._numbers: dict[str, int] = {}
        self._posts: dict[int, tuple[Any, list[int]]] = {}
        self._because: tuple[int, ...] = ()

    @property
    def line(self) -> tuple[Turn, ...]:
        """What is ready and ordered (`fifo` only)."""
        return tuple(self._queue)

    # -- becoming ready -----------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> events.Handle:
        """As in asyncio; the handle becomes an actor."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = events.Handle(callback, args, self, context)
        owner = getattr(callback, "__self__", None)
        causes: tuple[int, ...] = ()
        if (trace := self.scheduler.trace) is not None:
            causes = (trace.now, *self._because) if trace.now >= 0 else ()
            if args and isinstance(args[0], Wait):
                causes = (*causes, *args[0].causes)
        lane: Any = owner if isinstance(owner, asyncio.Task) else None
        if lane is None:
            lane = f"{self}: {self._after(getattr(callback, '__name__', 'callback'))}"
        self._ready_now(Turn(self, handle, lane, causes))
        return handle

    def _after(self, what: str) -> str:
        """A name after the step that is being taken: what others do meanwhile does not change it."""
        trace = self.scheduler.trace
        creator = trace.names[trace.now].removeprefix(f"{self}: ") if trace is not None and trace.now >= 0 else "start"
        return self.unique(f"{what} after {creator}")

    def unique(self, name: str) -> str:
        """`name`, with a number from its second use on."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        return f"{name} #{number}" if number > 1 else name

    def _ready_now(self, turn: Turn) -> None:
        if not self.fifo:
            self.scheduler.enable(turn)
        elif self._acting:
            self._join_queue(turn)
        else:
            turn.delivered = False
            self.scheduler.enable(turn)

    def _join_queue(self, turn: Turn) -> None:
        turn.delivered = True
        if self.scheduler.trace is not None:
            self.scheduler.trace.touch("ready", self.rank)
        self._queue.append(turn)
        if len(self._queue) == 1 and not self._acting:
            self.scheduler.enable(turn)

    def _join(self, handle: events.TimerHandle) -> None:
        """A timer is due."""
        handle._scheduled = False  # type: ignore[attr-defined]
        self._ready_now(Turn(self, handle, f"{self}: timer", ()))

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        """As in asyncio; the trace remembers that a rank looked at the clock, and where."""
        if self.scheduler.trace is not None and not self.scheduler.trace.clock:
            self.scheduler.trace.clock = place(call_site())
        return super().call_at(when, callback, *args, context=context)

    # -- running ------------------------------------------------------------------------------------------------

    def take(self, turn: Turn) -> None:
        """Run a handle, or deliver one that came from outside."""
        if not turn.delivered:
            self._join_queue(turn)
            return
        if self.host:
            self.host.clear.append(partial(self._again, turn))
            return
        if self.fifo and self._queue and self._queue[0] is turn:
            self._queue.popleft()
        trace = self.scheduler.trace
        if trace is not None:
            self._touch(trace, turn)
        self._enter()
        try:
            if not turn.handle._cancelled:
                turn.handle._run()
        finally:
            self._acting, self._because = False, ()
            if self.fifo and self._queue:
                self.scheduler.enable(self._queue[0])

    def _again(self, turn: Turn) -> None:
        """The host goes on."""
        if self.scheduler.trace is not None:
            turn.wait_for(self.scheduler.trace.now)
        self.scheduler.enable(turn)

    def _touch(self, trace: Trace, turn: Turn) -> None:
        """What a handle may do to what the tasks of a rank share: nothing where it only waits, else anything."""
        callback = turn.handle._callback  # type: ignore[attr-defined]
        if isinstance(turn.lane, asyncio.Task):
            for thing in touched(turn.lane, self.rank):
                trace.touch(*thing)
            return
        if getattr(callback, "__func__", None) is asyncio.TaskGroup._on_task_done:
            # The children of a group end in any order; its owner goes on after all of them.
            group, posts = self._posts.setdefault(id(callback.__self__), (callback.__self__, []))
            posts.append(trace.now)
            self._because = tuple(posts) if group._on_completed_fut is not None else ()
        elif getattr(callback, "__qualname__", "") not in _FORWARDERS:
            for thing in everything(self.rank):
                trace.touch(*thing)

    # -- tasks --------------------------------------------------------------------------------------------------

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[T]:
        """As in asyncio; a task without a name is named after the one that made it."""
        return super().create_task(coro, name=name or self._after("task"), context=context, **kwargs)

    def _task(self, number: int, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        return LaneTask(number, coro, **kwargs)
