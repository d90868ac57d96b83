"""The simulated GPU below the ports: kernels, first-in-first-out queues, room on the device.

A kernel starts when it is the head of its queue, the events it waits for have happened, it has arrived at the device
and there is room for it; it finishes by itself (compute) or together with its peers (collectives, see that module).
Where room can be short, the arrival at the device is a step of its own: arrivals of different queues compete for room
and are granted it in order of arrival, the first that fits (the 'hardware queue'). That room is held until the kernel
finishes is what makes the order of two queues matter (paper section 4, Figure 2). With room for all, nobody can tell a
late arrival from a late end, so that a kernel arrives in the step that lets it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from kernel.errors import UsageError
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.sim.launches import Launches
    from verify.sim.scheduler import Alarm, Scheduler
    from verify.sim.trace import Trace

Entry = tuple[int, str, str, str]
"""One line of a rank's log: virtual nanoseconds, what happened, where (a stream or "host"), to what."""


class Meeting(Protocol):
    """A collective, as one member's kernel sees it."""

    def joined(self, kernel: Kernel) -> None:
        """The kernel is resident."""

    def missing(self) -> str:
        """Who is not resident yet, and why, in words."""


class Kernel:
    """One piece of device work of one rank.

    weight: room it takes, in slots (or CTAs). duration_ns: of a compute kernel alone on the device. meeting: its
    collective. then: called when it has finished.
    """

    __slots__ = (
        "alarm", "arrival", "arrived", "begun", "blockers", "dropped", "duration_ns", "ended", "enqueued", "finished",
        "heirs", "label", "meeting", "number", "queue", "remaining_ns", "resident", "since_ns", "then", "watched",
        "weight",
    )  # fmt: skip

    def __init__(
        self,
        label: str,
        weight: int = 0,
        duration_ns: int = 0,
        meeting: Meeting | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.label, self.weight, self.duration_ns, self.meeting, self.then = label, weight, duration_ns, meeting, then
        self.queue: Queue
        self.number = -1
        self.blockers: Sequence[Kernel] = ()
        self.heirs: list[Queue] = []
        self.arrived = self.resident = self.finished = self.dropped = False
        self.alarm: Alarm | None = None
        self.remaining_ns, self.since_ns = duration_ns, 0
        # Steps of a trace (`verify.sim.trace`): its enqueue, its arrival, those that let it start, and its end.
        self.enqueued = self.arrival = -1
        self.begun: tuple[int, ...] = ()
        self.ended: tuple[int, ...] = ()
        self.watched = False

    def __str__(self) -> str:
        return f"{self.queue}: {self.label}"

    def causes(self) -> tuple[int, ...]:
        """The steps without which it could not finish."""
        return self.begun

    @property
    def marker(self) -> bool:
        """Whether it is nothing but a place in its queue, reached when all before it have finished."""
        return self.meeting is None and not self.duration_ns and not self.weight

    @property
    def blocked(self) -> bool:
        """Whether it waits for an event of another queue."""
        return bool(self.blockers) and any(not blocker.finished for blocker in self.blockers)

    def act(self) -> None:
        """Finish: the time of a compute kernel is over."""
        if not self.finished:
            self.queue.chip.computed(self)


class Queue:
    """A stream: kernels in order of enqueue, each starting after the one before has finished."""

    def __init__(self, chip: Chip, phase: Phase) -> None:
        self.chip, self.phase = chip, phase
        self.name = f"rank {chip.rank} stream {phase}"
        self.items: deque[Kernel] = deque()
        self.edges: list[Kernel] = []
        self.tail: Kernel | None = None
        self.count = 0
        self._enabled = False
        self.freed: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    def append(self, kernel: Kernel) -> None:
        """Enqueue a kernel behind all others; it also waits for the events that this queue was told to wait for."""
        if kernel.weight > self.chip.capacity:
            raise UsageError(
                f"{self}: {kernel.label} takes {kernel.weight} slots of a device that has {self.chip.capacity}:"
                " give the device more capacity or the phase less weight"
            )
        kernel.queue, kernel.number = self, self.count
        self.count += 1
        if self.edges:
            kernel.blockers = [edge for edge in self.edges if not edge.finished]
            for blocker in kernel.blockers:
                blocker.heirs.append(self)
            self.edges.clear()
        if self.chip.scheduler.trace is not None:
            kernel.enqueued = self.chip.scheduler.trace.now
        self.items.append(kernel)
        self.tail = kernel
        self.chip.outstanding += 1
        self.chip.note("enqueue", self.phase, kernel.label)
        if len(self.items) == 1:
            self.look()

    def record(self) -> list[Kernel]:
        """What an event recorded now stands for."""
        return [*self.edges, self.tail] if self.tail is not None and not self.tail.finished else list(self.edges)

    def look(self) -> None:
        """See whether the head can go on."""
        while self.items and not self._enabled:
            head = self.items[0]
            if head.arrived or head.blocked:
                return
            if not head.marker:
                if not self.chip.crowded:
                    self.chip.arrive(head)
                else:
                    self._enabled = True
                    self.chip.scheduler.enable(self)
                return
            head.arrived = True
            self.chip.retire(head, chain=False)

    def causes(self) -> tuple[int, ...]:
        """The steps without which the head could not arrive."""
        if not self.items:
            return ()
        head = self.items[0]
        return (head.enqueued, *self.freed, *(step for blocker in head.blockers for step in blocker.ended))

    def act(self) -> None:
        """The head arrives at the device."""
        self._enabled = False
        if self.items and not self.items[0].arrived:
            self.chip.arrive(self.items[0])

    def why(self, kernel: Kernel) -> str:
        """Why a kernel of this queue is not resident, in words."""
        if kernel.dropped:
            return "dropped when the device was closed"
        if kernel.number < 0:
            return f"the host waits for room in the launch queue of stream {self.phase}"
        head = self.items[0]
        if kernel is not head:
            return f"queued behind {head.label} on stream {self.phase}"
        open_ = [blocker for blocker in kernel.blockers if not blocker.finished]
        if open_:
            return f"waits for {' and '.join(f'{each.label} on stream {each.queue.phase}' for each in open_)}"
        return f"waits for {self.chip.room(kernel)}" if kernel.arrived else "about to start"


class Chip:
    """One rank's device: its queues and its room.

    capacity: slots. contention: how much compute kernels that run at the same time slow each other down; at 0 not at
    all, at 1 two of them take as long as one after the other. log: where events of this rank go, None for nowhere.
    `width` and `least`: the room that one kernel of each queue takes together, and the least that one takes.
    """

    def __init__(
        self, rank: int, scheduler: Scheduler, capacity: int, contention: float = 0.0, log: list[Entry] | None = None
    ) -> None:
        self.rank, self.scheduler, self.capacity, self.contention, self.log = rank, scheduler, capacity, contention, log
        self.queues = {phase: Queue(self, phase) for phase in Phase}
        self.width, self.least = 2, 1
        self.quiet = log is None and (scheduler.trace is None or not scheduler.trace.keep_notes)
        self.outstanding = 0
        self.idle: Callable[[], None] | None = None
        self.launches: Launches | None = None
        self._used = 0
        self._holders: list[Kernel] = []
        self._hardware: list[Kernel] = []
        self._computing: list[Kernel] = []

    def note(self, what: str, where: str, which: str) -> None:
        """Write a line of the log."""
        if self.quiet:
            return
        if self.log is not None:
            self.log.append((self.scheduler.now_ns, what, where, which))
        if self.scheduler.trace is not None:
            self.scheduler.trace.note(self.rank, what, where, which)

    # -- the life of a kernel -----------------------------------------------------------------------------------

    def arrive(self, kernel: Kernel) -> None:
        """A head is at the device: it starts, or waits for room."""
        kernel.arrived = True
        self.scheduler.progress += 1
        if (trace := self.scheduler.trace) is not None:
            kernel.arrival = trace.now
            if self.crowded and kernel.weight:
                trace.touch("room", self.rank)
        if self._used + kernel.weight <= self.capacity:
            self._start(kernel)
        else:
            self._hardware.append(kernel)

    @property
    def crowded(self) -> bool:
        """Whether kernels can be made to wait for room, so that their order of arrival matters."""
        return self.capacity < self.width

    @property
    def narrow(self) -> bool:
        """Whether only one kernel fits: then whoever waits for room waits for that one, and for nobody else."""
        return self.capacity < 2 * self.least

    def _start(self, kernel: Kernel) -> None:
        if (trace := self.scheduler.trace) is not None:
            # In the step of its arrival, or else in whichever of those comes last that let it arrive.
            kernel.begun = (kernel.arrival, trace.now) if self.crowded else kernel.queue.causes()
        self._used += kernel.weight
        if kernel.weight:
            self._holders.append(kernel)
        kernel.resident = True
        self.note("start", kernel.queue.phase, kernel.label)
        if kernel.meeting is not None:
            kernel.meeting.joined(kernel)
            return
        self._computing.append(kernel)
        kernel.since_ns = self.scheduler.now_ns
        if self.contention and len(self._computing) > 1:
            self._retime(len(self._computing) - 1)
        else:
            kernel.alarm = self.scheduler.alarm(kernel.since_ns + kernel.duration_ns, kernel)

    def computed(self, kernel: Kernel) -> None:
        """A compute kernel has finished."""
        self._computing.remove(kernel)
        if kernel.alarm is not None:
            kernel.alarm.cancel()
        if self.contention and self._computing:
            self._retime(len(self._computing) + 1)
        self.retire(kernel)

    def retire(self, kernel: Kernel, chain: bool = True) -> None:
        """A kernel has finished: its room, its successor (if `chain`) and whoever waits for it are set free."""
        kernel.finished = True
        self.scheduler.progress += 1
        if (trace := self.scheduler.trace) is not None:
            self._trace(trace, kernel)
        self.note("finish", kernel.queue.phase, kernel.label)
        if kernel.resident and kernel.weight:
            self._used -= kernel.weight
            self._holders.remove(kernel)
            self._grant()
        kernel.queue.items.popleft()
        self.outstanding -= 1
        kernel.blockers = ()  # what has finished must not keep alive what finished before it
        if kernel.then is not None:
            then, kernel.then = kernel.then, None
            then()
        if chain:
            kernel.queue.look()
        for queue in kernel.heirs:
            queue.look()
        if self.launches is not None:
            self.launches.look()
        if not self.outstanding and self.idle is not None:
            self.idle()

    def drop(self) -> None:
        """Forget all work that has not started; the end of work that has is kept."""
        for queue in self.queues.values():
            items = list(queue.items)
            keep = int(bool(items) and items[0].resident)
            while keep and keep < len(items) and items[keep].marker and not items[keep].blocked:
                keep += 1
            queue.items = deque(items[:keep])
            for kernel in items[keep:]:
                kernel.dropped = kernel.finished = True
                self.outstanding -= 1
                self.note("drop", queue.phase, kernel.label)
                if kernel in self._hardware:
                    self._hardware.remove(kernel)
        if not self.outstanding and self.idle is not None:
            self.idle()

    # -- in words -----------------------------------------------------------------------------------------------

    def room(self, kernel: Kernel) -> str:
        """Who holds the room that `kernel` waits for."""
        holders = " and ".join(f"{holder.label} of stream {holder.queue.phase}" for holder in self._holders)
        return f"{kernel.weight} of {self.capacity} slots, held by {holders}"

    def waits(self) -> list[str]:
        """What the head of each queue waits for."""
        lines = []
        for queue in self.queues.values():
            if queue.items:
                head = queue.items[0]
                if not head.resident:
                    reason = queue.why(head)
                else:
                    reason = f"resident, waits for {head.meeting.missing()}" if head.meeting else "running"
                lines.append(f"{head}: {reason}")
        return lines

    # -- inside -------------------------------------------------------------------------------------------------

    def _trace(self, trace: Trace, kernel: Kernel) -> None:
        queue = kernel.queue
        if kernel.marker:
            # It ends in whichever step comes last, its enqueue or the end of what is before it: all of them are causes.
            before = (*queue.freed, *(step for blocker in kernel.blockers for step in blocker.ended))
            queue.freed = tuple(dict.fromkeys(before))
            kernel.ended = (trace.now, *queue.freed)
        else:
            kernel.ended = queue.freed = (trace.now,)
        if kernel.watched:
            trace.touch("finish", self.rank, str(queue.phase), kernel.number)
        if kernel.resident and kernel.weight and self.crowded and not self.narrow:
            # Any of several holders may make the room that another waits for: which one does is a choice.
            trace.touch("room", self.rank)

    def _grant(self) -> None:
        waiting = self._hardware
        if not waiting:
            return
        self._hardware = []
        for kernel in waiting:
            if self._used + kernel.weight <= self.capacity:
                self._start(kernel)
            else:
                self._hardware.append(kernel)

    def _retime(self, before: int) -> None:
        """The number of running compute kernels has changed from `before`: new finishing times."""
        now, count = self.scheduler.now_ns, len(self._computing)
        old, new = 1 / (1 + self.contention * (before - 1)), 1 + self.contention * (count - 1)
        for kernel in self._computing:
            kernel.remaining_ns -= int((now - kernel.since_ns) * old)
            kernel.since_ns = now
            if kernel.alarm is not None:
                kernel.alarm.cancel()
            kernel.alarm = self.scheduler.alarm(now + max(0, round(kernel.remaining_ns * new)), kernel)
