"""From the ranks' records to intervals (`rollout.lanes`)."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kernel.record import Event, Kind, Recording
from kernel.request import Phase
from rollout.lanes import DECODE, PERMIT, Interval, measure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.report_metrics import Metrics


def from_records(recordings: Iterable[Recording]) -> Metrics:
    """Waits and overlap of one run, from the records of its ranks; the keys are those of `rollout.lanes.measure`."""
    return measure(list(chain.from_iterable(map(intervals, recordings))))


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
            lane: str = event.phase or ""
            self._add("D" if lane == "D" else "P", event.site, started.time_ns, event)
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

    def _add(self, lane: str, label: str, start_ns: int, end: Event) -> None:
        start_ns = min(start_ns, end.time_ns)
        self.found.append(Interval(self._rank, lane, label, start_ns, end.time_ns, end.round, end.epoch))  # type: ignore[arg-type]
