"""Where one rank stands, from its record's events: taken one after the other, so that a live run can be followed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kernel.record import Event, Kind
from kernel.record.foreign import PROGRAM
from kernel.request import Phase

if TYPE_CHECKING:
    from kernel.record import Recording

GAP: Final = "longest loop gap, ns"
"""The remark in which a rank notes its event loop's longest gap."""
RECENT: Final = 4096
"""Events that are kept to draw what happened lately."""
_ENDS: Final = frozenset({Kind.FINISH, Kind.WORK_FINISH})


class RankState:
    """One rank, up to the newest event taken.

    open: device collectives that have started and not finished, by group and number, oldest first. started, enqueued:
    the highest number of each group. exchange, wait: the rendezvous or host wait that the loop is in. exchanges: how
    many rendezvous it has entered. flying: submissions of each phase that the device has not finished, each with its
    collectives that are still to finish. gap_ns: the event loop's longest. moved, recent: the last event and the last
    ones that are more than a remark, which a loop can make that only waits.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.newest: Event | None = None
        self.moved: Event | None = None
        self.open: dict[tuple[str, int], Event] = {}
        self.started: dict[str, int] = {}
        self.enqueued: dict[str, int] = {}
        self.exchange: Event | None = None
        self.exchanges = 0
        self.wait: Event | None = None
        self.flying: dict[Phase, dict[str, set[tuple[str, int]]]] = {phase: {} for phase in Phase}
        self.round, self.epoch = -1, -1
        self.boundary: int | None = None
        self.permit: int | None = None
        self.finished: Event | None = None
        self.exception: Event | None = None
        self.gap_ns: int | None = None
        self.recent: deque[Event] = deque(maxlen=RECENT)
        self._labels: dict[Phase, str] = {}
        self._read(recording)

    def follow(self, recording: Recording) -> None:
        """Take the events of a later reading, which are all new (`kernel.record.RingFollower`)."""
        self.recording = recording
        self._read(recording)

    def _read(self, recording: Recording) -> None:
        for event in recording.events:
            self._take(event)
            if event.kind is not Kind.MARK:
                self.moved = event
                self.recent.append(event)
            if self.newest is None or event.number > self.newest.number:
                self.newest = event

    def _take(self, event: Event) -> None:
        phase = event.phase or Phase.D
        call = (event.group, event.seq)
        match event.kind:
            case Kind.SUBMIT:
                self.flying[phase][event.site] = set()
                self._labels[phase] = event.site
            case Kind.ENQUEUE:
                self.enqueued[event.group] = max(event.seq, self.enqueued.get(event.group, 0))
                self.flying[phase].get(self._labels.get(phase, ""), set()).add(call)
            case Kind.START:
                self.open[call] = event
                self.started[event.group] = max(event.seq, self.started.get(event.group, 0))
            case Kind.FINISH:
                self.open.pop(call, None)
                for calls in self.flying[phase].values():
                    calls.discard(call)
            case Kind.WORK_FINISH:
                self.flying[phase].pop(event.site, None)
            case Kind.EXCHANGE_ENTER:
                self.exchange, self.exchanges = event, max(event.seq, self.exchanges)
            case Kind.EXCHANGE_LEAVE:
                self.exchange = None
            case Kind.HOST_WAIT_ENTER:
                self.wait = event
            case Kind.HOST_WAIT_LEAVE:
                self.wait = None
            case Kind.EXCEPTION if event.epoch == 0 or self.recording.meta.get("program") != PROGRAM:
                # Of any other thread of a program, which goes on.
                self.exception = event
            case Kind.MARK if event.text == GAP:
                self.gap_ns = max(event.a, self.gap_ns or 0)
            case _:
                self._turnstile(event)
        if event.kind in _ENDS:
            self.finished = event

    def _turnstile(self, event: Event) -> None:
        match event.kind:
            case Kind.PLAN:
                self.round = event.round
                if event.epoch >= 0:
                    self.epoch, self.boundary, self.permit = event.epoch, None, None
            case Kind.BOUNDARY:
                self.epoch, self.boundary = event.epoch, event.a
            case Kind.PERMIT:
                self.permit = event.b
            case Kind.PROMOTE if event.epoch == self.epoch:
                self.boundary, self.permit = None, None
            case _:
                pass

    # -- what people ask ------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the device has in flight: `P+D`, `P`, `D` or nothing."""
        return "+".join(str(phase) for phase in (Phase.P, Phase.D) if self.flying[phase])

    @property
    def pending(self) -> int:
        """Collectives that were enqueued and have not finished."""
        return sum(len(calls) for phase in self.flying.values() for calls in phase.values())

    @property
    def idle(self) -> bool:
        """Whether it waits for requests, with nothing in flight: standing still is no stall then."""
        waits = self.wait is not None and self.wait.text == "inbox"
        return waits and not self.phase and not self.open

    def operation(self) -> tuple[Event, bool] | None:
        """The operation that has been open longest, and True; where none is open the one that finished last."""
        still = [*self.open.values(), *(one for one in (self.exchange, self.wait) if one is not None)]
        if still:
            return min(still, key=lambda event: event.time_ns), True
        return (self.finished, False) if self.finished is not None else None

    def flying_of(self, phase: str) -> list[str]:
        """Submissions of P or D that the device has not finished, oldest first."""
        return list(self.flying[Phase(phase)])
