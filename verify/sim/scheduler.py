"""In which order a simulated world moves: one virtual clock, one list of actors, one choice.

An actor is whatever can take a step by itself: a rank's event loop with ready handles, a stream whose head can reach
the device, a piece of device work that is due to finish. Enabled actors commute or compete; which one acts next is the
only freedom a schedule has, and all of it passes through one `choose` call. The default takes the actor that was
enabled first. The clock moves only when nobody can act.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verify.sim.errors import Deadlock, Livelock, Orphan

if TYPE_CHECKING:
    from verify.sim.trace import Trace


class Actor(Protocol):
    """Something that can take a step. `str()` of it names it in recorded schedules, stable from run to run."""

    def act(self) -> None:
        """Take one step. An actor that can take another one enables itself again."""


class Cancellable(Protocol):
    """What the clock holds: `asyncio.TimerHandle` or `Alarm`."""

    def cancelled(self) -> bool:
        """Whether it no longer counts."""


Choose = Callable[[Sequence[Actor]], int]
"""Given two or more enabled actors, oldest first, the index of the one that acts."""


class Alarm:
    """Enables an actor at a virtual time, unless cancelled."""

    __slots__ = ("_scheduler", "actor", "dead")

    def __init__(self, scheduler: Scheduler, actor: Actor) -> None:
        self._scheduler, self.actor, self.dead = scheduler, actor, False

    def cancel(self) -> None:
        """Forget it. Idempotent."""
        if not self.dead:
            self.dead = True
            self._scheduler.alarms -= 1
            self._scheduler.dropped()

    def cancelled(self) -> bool:
        """Whether it was cancelled or has fired."""
        return self.dead


class Scheduler:
    """Chooses the next actor, and advances virtual time.

    choose: picks among enabled actors; None is the first, without building the list. permute: `choose` also orders the
    ready handles of a rank (production runs them first in, first out, so a fault found this way may be one of a program
    that asyncio would not run so; it finds what depends on that order). patience_s: virtual seconds in
    which only timers of the ranks may fire while something is stuck, before that counts as a deadlock. livelock: steps
    in which neither the clock moves nor a device or rendezvous gets anywhere that count as a livelock.
    `trace`, where set, follows which step had to come before which; `steps` counts all steps so far, `now_ns` is the
    virtual time in nanoseconds, `progress` grows whenever a device or a rendezvous gets anywhere, `stuck` tells whether
    one of them has unfinished business.
    """

    def __init__(
        self, choose: Choose | None = None, permute: bool = False, patience_s: float = 600.0, livelock: int = 2_000_000
    ) -> None:
        self.choose, self.permute = choose, permute
        self.now_ns = 0
        self.steps = 0
        self.alarms = 0
        self.progress = 0
        self.running = False
        self.current: asyncio.AbstractEventLoop | None = None
        self.trace: Trace | None = None
        self.failures: list[BaseException] = []
        self.witnesses: list[Callable[[], Iterable[str]]] = []
        self.stuck: Callable[[], bool] = bool
        self._enabled: deque[Actor] = deque()
        self._heap: list[tuple[int, int, Cancellable, Callable[[Any], None]]] = []
        self._sequence = 0
        self._dropped = 0
        self._stopping = False
        self._patience_ns, self._livelock = int(patience_s * 1e9), livelock
        self._idle_since, self._progress_then = -1, 0

    # -- what actors call ---------------------------------------------------------------------------------------

    def enable(self, actor: Actor) -> None:
        """`actor` can act. It must not be enabled already."""
        self._enabled.append(actor)

    def enable_first(self, actor: Actor) -> None:
        """`actor` can act and goes on before all others, unless chosen otherwise."""
        self._enabled.appendleft(actor)

    def alarm(self, at_ns: int, actor: Actor) -> Alarm:
        """Enable `actor` when the clock reaches `at_ns`."""
        alarm = Alarm(self, actor)
        self.alarms += 1
        self._push(at_ns, alarm, self._fire)
        return alarm

    def timer(self, at_ns: int, handle: Cancellable, fire: Callable[[Any], None]) -> None:
        """Call `fire(handle)` when the clock reaches `at_ns`: a rank's own timer."""
        self._push(at_ns, handle, fire)

    def dropped(self) -> None:
        """One entry of the clock was cancelled."""
        self._dropped += 1
        if self._dropped > 256 and self._dropped * 2 > len(self._heap):
            self._heap[:] = [entry for entry in self._heap if not entry[2].cancelled()]
            heapq.heapify(self._heap)
            self._dropped = 0

    def stop(self) -> None:
        """End `run` after the current step."""
        self._stopping = True

    # -- running ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take steps until `stop`. Raises Deadlock, Livelock, Orphan, and what device work raises by itself."""
        if self.running:
            raise RuntimeError("the simulated world is already running")
        hooks = sys.get_asyncgen_hooks()
        self.running, self._stopping = True, False
        enabled, choose = self._enabled, self.choose
        since, moved, got = self.steps, self.now_ns, self.progress
        try:
            while not self._stopping:
                if enabled:
                    if choose is None or len(enabled) == 1:
                        actor = enabled.popleft()
                    else:
                        picked = choose(enabled)
                        actor = enabled[picked]
                        del enabled[picked]
                    self.steps += 1
                    if self.trace is not None:
                        self.trace.begin(actor)
                        actor.act()
                        self.trace.end()
                    else:
                        actor.act()
                    if self.failures:
                        raise self.failures.pop(0)
                    if self.steps - since > self._livelock:
                        if self.progress == got:
                            raise Livelock(self.waits(), self.now_ns, self.steps - since)
                        since, got = self.steps, self.progress
                elif self._advance():
                    if self.now_ns != moved:
                        since, moved = self.steps, self.now_ns
                else:
                    raise Deadlock(self.waits(), self.now_ns)
        finally:
            self.running = False
            self._leave(hooks)

    def drain(self, steps: int) -> None:
        """Let enabled actors act, at most `steps` times, with the clock standing still; failures are dropped."""
        hooks = sys.get_asyncgen_hooks()
        try:
            while self._enabled and steps > 0:
                steps -= 1
                self._enabled.popleft().act()
        finally:
            self._leave(hooks)
            self.failures.clear()

    def waits(self) -> list[str]:
        """Who waits for what, in words."""
        return [line for witness in self.witnesses for line in witness()]

    def fail(self, message: str, cause: BaseException | None) -> None:
        """End the run: nobody is there to receive `cause`."""
        error = Orphan(f"{message}: {type(cause).__name__}: {cause}" if cause else message)
        error.__cause__ = cause
        self.failures.append(error)

    # -- inside -------------------------------------------------------------------------------------------------

    def _leave(self, hooks: Any) -> None:
        self.current = None
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(*hooks)

    def _push(self, at_ns: int, item: Cancellable, fire: Callable[[Any], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_ns, self._sequence, item, fire))

    def _fire(self, alarm: Alarm) -> None:
        alarm.dead = True
        self.alarms -= 1
        self._enabled.append(alarm.actor)

    def _advance(self) -> bool:
        """Move the clock to its next entry and fire all that are due; False when there is none."""
        heap = self._heap
        while heap and heap[0][2].cancelled():
            heapq.heappop(heap)
            self._dropped -= 1
        if not heap:
            return False
        at = heap[0][0]
        if self.alarms or self.progress != self._progress_then or not self.stuck():
            self._idle_since, self._progress_then = -1, self.progress
        elif self._idle_since < 0:
            self._idle_since = self.now_ns
        elif at - self._idle_since > self._patience_ns:
            raise Deadlock(self.waits(), self.now_ns, only_timers=True)
        self.now_ns = max(self.now_ns, at)
        while heap and heap[0][0] <= at:
            _, _, item, fire = heapq.heappop(heap)
            if item.cancelled():
                self._dropped -= 1
            else:
                fire(item)
        return True
