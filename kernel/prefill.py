"""One prefill epoch on one rank: a forward that is submitted segment by segment (paper sections 3 and 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel.errors import ProtocolError

if TYPE_CHECKING:
    from kernel.driver import Driver
    from kernel.phase import PhaseState
    from kernel.request import Row, Sampled

Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]


class Epoch:
    """The rows of one replica in one epoch, and the segments submitted so far.

    number: the epoch. sizes: rows of each replica. published: called when P's host enqueue stands at a boundary.
    ended_in: the round in which its last segment was submitted, -1 before. settled: all of it is known to have finished
    on this rank's device.
    """

    def __init__(
        self,
        number: int,
        state: PhaseState,
        driver: Driver[Sequence[Sampled | None]],
        rows: Sequence[Row],
        sizes: tuple[int, ...],
        published: Callable[[int], None],
        spawn: Spawn,
        rank: int = 0,
    ) -> None:
        self._rank = rank
        self.number, self.rows, self.sizes = number, rows, sizes
        self._state, self._driver, self._published, self._spawn = state, driver, published, spawn
        self._tasks: list[asyncio.Task[Any]] = []
        self._events: list[Any] = []
        self._ended = False
        self._standing: tuple[int, asyncio.Task[Any]] | None = None
        """A boundary that depends on counts, and the task that ends when P stands there."""
        self.ended_in = -1
        self.settled = False

    def submit(self, start: int, end: int, round_: int) -> None:
        """Enqueue segment [start, end) in `round_`; its routed collectives take their places in D's FIFO now.

        Raises ProtocolError while the segment before waits for counts.
        """
        label = f"P e{self.number} [{start},{end})"
        state = self._state
        if self._standing is not None:
            raise ProtocolError(
                f"{label} released while P is under way to boundary {self._standing[0]}: await gate.reached() first",
                rank=self._rank,
                epoch=self.number,
                boundary=start,
            )
        # A boundary that depends on data (expert counts) is published when the data are there, not at submission.
        late = state.program.counts(start, end)
        if state.route is not None:
            state.route.reserve(state.program.segment(start, end).shared)
        event = state.stream.submit(partial(self._driver.advance, end), label)
        self._events.append(event)
        if end >= state.program.boundaries:
            self._ended, self.ended_in = True, round_
        if not late:
            self._tasks.append(self._spawn(self._through(event, end, label), label))
            self._published(end)
            return
        self._standing = end, self._spawn(self._stand(event, end, label), f"{label} counts")
        self._tasks.append(self._spawn(self._finish(self._standing[1]), label))

    async def _stand(self, event: Any, end: int, label: str) -> Any:
        """Go on with the segment whenever counts have come, until P's host enqueue stands at `end`; its last event."""
        driver, stream = self._driver, self._state.stream
        if self._state.deferred:  # only then is it known where the forward stands
            await event.wait()
        while driver.waiting is not None:
            value = await driver.waiting.wait()
            event = stream.submit(partial(driver.resume, value, end), label)
            self._events.append(event)
            if self._state.deferred:
                await event.wait()
        if not driver.stands(end):
            await event.wait()  # which says why
        return event

    async def _through(self, event: Any, end: int, label: str) -> None:
        event = await self._stand(event, end, label)
        await event.wait()

    async def _finish(self, standing: asyncio.Task[Any]) -> None:
        event = await standing
        await event.wait()

    async def standing(self) -> None:
        """Wait until P stands at the end of the segment under way, and publish that boundary.

        Whoever waits publishes: the rank's own task, at a place of its turn, so that what it sees depends on no race.
        """
        if self._standing is not None:
            end, task = self._standing
            await asyncio.shield(task)
            if self._standing is not None:  # not published by somebody who waited too
                self._standing = None
                self._published(end)

    def close(self) -> None:
        """Abandon the forward, if no segment is running it any more, and with it what it has notified peers of."""
        if all(task.done() for task in self._tasks):
            self._driver.close()
            if self._state.normal is not None:
                self._state.normal.abandon(f"epoch {self.number} was given up")

    def poll(self) -> bool:
        """Whether all of it has finished on this rank's device, asked of the device: an answer that depends on time."""
        self.settled = self.settled or (
            self._ended and self._driver.waiting is None and all(event.done() for event in self._events)
        )
        return self.settled

    async def drained(self) -> None:
        """Wait until everything submitted so far has finished on the device."""
        await self.standing()
        ended = self._ended
        for task in list(self._tasks):
            await asyncio.shield(task)
        self.settled = self.settled or ended

    @property
    def sampled(self) -> Sequence[Sampled | None]:
        """The first tokens of its complete prompts, row by row; only once finished."""
        assert self._driver.result is not None, "an epoch is asked for its results before it has finished"
        return self._driver.result
