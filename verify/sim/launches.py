"""A bounded launch queue: how far the host of one simulated rank may be ahead of its device.

Each stream takes `depth` launches that have not left it; a launch too many holds the host up, as a full queue does in
CUDA. What the host does after it, on any stream, waits behind it, and so does every task of the rank: it is the thread
that stands still. A graph is one launch and brings all of its kernels at once. Paper section 4 assumes nothing about
the depth; facts of a queue only order what the stream orders already, which is what a proof at depth 1 shows.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.sim.kernels import Kernel, Queue
    from verify.sim.scheduler import Scheduler


class Launch:
    """What takes one place of a stream's queue: a kernel, or all those of a graph."""

    __slots__ = ("kernels", "last", "queue")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.kernels: list[Kernel] = []
        self.last: Kernel | None = None

    @property
    def left(self) -> bool:
        """Whether it has left the queue: its last kernel has finished."""
        return self.last is not None and self.last.finished


class Launches:
    """The way into the device of one rank. depth: launches of a stream, at least 1."""

    def __init__(self, rank: int, scheduler: Scheduler, depth: int) -> None:
        self.rank, self.depth, self._scheduler = rank, depth, scheduler
        self.lane = self
        self._waiting: deque[tuple[int, Launch | Callable[[], None]]] = deque()
        self._inside: dict[int, deque[Launch]] = {}
        self._enabled = False
        self.clear: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"rank {self.rank} launch"

    def __bool__(self) -> bool:
        """Whether the host stands still."""
        return bool(self._waiting)

    def __len__(self) -> int:
        """Kernels that have not reached their stream."""
        return sum(len(item.kernels) for _, item in self._waiting if isinstance(item, Launch))

    def add(self, item: Launch | Callable[[], None]) -> None:
        """The host launches, or does something else to its streams, after all that it did before."""
        trace = self._scheduler.trace
        self._waiting.append((trace.now if trace is not None else -1, item))
        while self._waiting and self._may(self._waiting[0][1]):
            self._issue(self._waiting.popleft()[1])

    def look(self) -> None:
        """A kernel has finished: see whether the host can go on."""
        if self._waiting and not self._enabled and self._may(self._waiting[0][1]):
            self._enabled = True
            self._scheduler.enable(self)

    def causes(self) -> tuple[int, ...]:
        """The steps without which the host would still stand."""
        step, item = self._waiting[0]
        if not isinstance(item, Launch):
            return (step,)
        inside = self._inside[id(item.queue)]
        blocker = inside[0].last if len(inside) == self.depth else None
        return (step, *(blocker.ended if blocker is not None else ()))

    def act(self) -> None:
        """One launch goes in; behind the last one the host goes on."""
        self._enabled = False
        self._issue(self._waiting.popleft()[1])
        self.look()
        if not self._waiting:
            self._go_on()

    def drop(self) -> int:
        """Forget what has not reached its stream, and let the host go on; the number of kernels."""
        left = len(self)
        for _, item in self._waiting:
            if isinstance(item, Launch):
                for kernel in item.kernels:
                    kernel.queue = item.queue
                    kernel.dropped = kernel.finished = True
        self._waiting.clear()
        self._go_on()
        return left

    def _go_on(self) -> None:
        clear, self.clear = self.clear, []
        for go in clear:
            go()

    def _may(self, item: Launch | Callable[[], None]) -> bool:
        if not isinstance(item, Launch):
            return True
        inside = self._inside.setdefault(id(item.queue), deque())
        return len(inside) < self.depth or inside[0].left

    def _issue(self, item: Launch | Callable[[], None]) -> None:
        if not isinstance(item, Launch):
            item()
            return
        inside = self._inside[id(item.queue)]
        inside.append(item)
        if len(inside) > self.depth:
            inside.popleft()
        item.last = item.kernels[-1]
        for kernel in item.kernels:
            item.queue.append(kernel)
