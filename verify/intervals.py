"""From the ranks' records to intervals: the form between the record and everything that shows or measures a run.

    P, D         work on the device: one segment of prefill, one iteration of decode
    wait         `decode`: rows were ready and their iteration had not started; `permit`: P stood at its endpoint
    rendezvous   an all-rank exchange on the CPU, from arrival to departure; the label is its tag

Times are monotonic ns of one host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kernel.record import Event, Kind, Recording
from kernel.request import Phase

Lane = Literal["P", "D", "wait", "rendezvous"]
DECODE: Final = "decode"
PERMIT: Final = "permit"


@dataclass(frozen=True, slots=True)
class Interval:
    """One stretch of one rank's lane. epoch: -1 where the work belongs to none."""

    rank: int
    lane: Lane
    label: str
    start_ns: int
    end_ns: int
    round: int = -1
    epoch: int = -1

    @property
    def ms(self) -> float:
        """Length in milliseconds."""
        return (self.end_ns - self.start_ns) / 1e6


def intervals(recording: Recording) -> list[Interval]:
    """Everything that one rank's record tells about its lanes. Work that never finished is left out."""
    reader = _Reader(recording.rank)
    for event in recording.events:
        reader.take(event)
    return reader.found


class _Reader:
    """Follows one rank's events in order."""

    def __init__(self, rank: int) -> None:
        self.found: list[Interval] = []
        self._rank = rank
        self._running: dict[tuple[Phase | None, str], Event] = {}
        self._entered: dict[int, Event] = {}
        # P: where the open epoch stands, segments that the device has still to do, and when it had last done all.
        self._stands: Event | None = None
        self._segments = 0
        self._idle_ns = 0
        # D: rows promoted since the last submission, and for each submission when its rows were ready.
        self._promoted: list[Event] = []
        self._ready_ns: dict[str, int | None] = {}
        self._decoded_ns: int | None = None

    def take(self, event: Event) -> None:
        match event.kind:
            case Kind.WORK_START:
                self._running[event.phase, event.site] = event
                if event.phase is Phase.D:
                    self._decode_wait(event)
            case Kind.WORK_FINISH:
                self._finish(event)
            case Kind.EXCHANGE_ENTER:
                self._entered[event.seq] = event
            case Kind.EXCHANGE_LEAVE:
                if entered := self._entered.pop(event.seq, None):
                    self._add("rendezvous", event.text, entered.time_ns, event)
            case Kind.BOUNDARY:
                self._stands = event
            case Kind.PERMIT:
                self._permit_wait(event)
            case Kind.PROMOTE if event.a:
                self._promoted.append(event)
            case Kind.SUBMIT if event.phase is Phase.D:
                self._submit_decode(event)
            case Kind.SUBMIT:
                self._segments += 1
            case _:
                pass

    def _finish(self, event: Event) -> None:
        if started := self._running.pop((event.phase, event.site), None):
            self._add("D" if event.phase is Phase.D else "P", event.site, started.time_ns, event)
        if event.phase is Phase.D:
            self._decoded_ns = event.time_ns
        else:
            # A record that has wrapped may begin with the end of a segment.
            self._segments = max(0, self._segments - 1)
            self._idle_ns = event.time_ns

    def _permit_wait(self, permit: Event) -> None:
        """P waited from the later of its arrival at the endpoint and the end of its work on the device."""
        stands = self._stands
        if stands is None or (stands.epoch, stands.a) != (permit.epoch, permit.a) or permit.a == permit.b:
            return
        since = permit.time_ns if self._segments else max(stands.time_ns, self._idle_ns)
        self._add("wait", PERMIT, since, permit)

    def _submit_decode(self, event: Event) -> None:
        # Rows beyond those just promoted were there before, and so ready as soon as the previous iteration had ended.
        promoted = sum(each.a for each in self._promoted)
        fresh = bool(self._promoted) and event.b <= promoted
        self._ready_ns[event.site] = self._promoted[0].time_ns if fresh else None
        self._promoted.clear()

    def _decode_wait(self, started: Event) -> None:
        ready = self._ready_ns.pop(started.site, None)
        moments = [moment for moment in (ready, self._decoded_ns) if moment is not None]
        if started.b and moments:
            self._add("wait", DECODE, max(moments), started)

    def _add(self, lane: Lane, label: str, start_ns: int, end: Event) -> None:
        start_ns = min(start_ns, end.time_ns)
        self.found.append(Interval(self._rank, lane, label, start_ns, end.time_ns, end.round, end.epoch))
