"""Follows the records of a run: each `look` reads what is new and says where everybody stands."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from verify.live.check import Check
from verify.live.process import GONE, boot_id
from verify.live.rings import Look, Rings
from verify.top.frame import STALLED_S, STANDING, Frame, Row, frame_of
from verify.top.installed import row_of
from verify.top.state import RankState

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.record import Recording


class Follower:
    """A run directory, watched from outside: nothing is asked of its ranks, and nothing in it is changed."""

    def __init__(self, run: Path, stalled_s: float = STALLED_S) -> None:
        self.run, self.check = run, Check()
        self._stalled_s = stalled_s
        self._rings = Rings(run)
        self._states: dict[int, RankState] = {}
        self._read_ns: dict[int, int] = {}
        self._boot = boot_id()

    def look(self) -> Frame:
        """Where everybody stands. Raises UsageError where there is no usable ring, and never was one."""
        if not self._states:
            # The first reading of a large ring is slow: once all are known, a second one sees them close together.
            # It is also what makes a fault certain that is there already.
            self.check.take(self.read())
        look = self.read()
        ended, rows = self.rows(look)
        states = dict(self._states)
        return frame_of(str(self.run), self.about, ended, rows, look, self.check, self.size, states)

    def read(self) -> Look:
        """Read on in all rings. Raises UsageError as `look`."""
        look = self._rings.look()
        steps = self._rings.steps
        self._states = {rank: state for rank, state in self._states.items() if rank in steps}
        for rank, (recording, fresh) in steps.items():
            if fresh or rank not in self._states:
                self._states[rank] = RankState(recording)
            else:
                self._states[rank].follow(recording)
        self._states = dict(sorted(self._states.items()))
        self._read_ns = self._rings.read_ns
        return look

    @property
    def about(self) -> str:
        """Policy and world, as the run says."""
        if self._rings.installed:
            return "recorded by turnstile.record.install"
        meta = next(iter(self._states.values())).recording.meta
        return ", ".join(str(meta[key]) for key in ("policy", "world") if key in meta)

    @property
    def size(self) -> int:
        """How many ranks there should be, 0 where the run does not say."""
        size = next(iter(self._states.values())).recording.meta.get("size")
        return size if isinstance(size, int) and 0 < size < 1 << 20 else 0

    def recordings(self) -> dict[int, Recording]:
        """The newest reading of each ring."""
        return {rank: state.recording for rank, state in self._states.items()}

    def rows(self, look: Look) -> tuple[bool, dict[int, Row]]:
        """Whether the run has ended, and each rank in plain values."""
        states, facts = self._states, look.facts
        newest = max((self._moment(state) for state in states.values()), default=0)
        live = any(each.process not in GONE for each in facts.values())
        now = {rank: self._now(state.recording, newest, live) for rank, state in states.items()}
        last = max(self._read_ns.values())
        late = {rank: last - self._read_ns[rank] if live else 0 for rank in states}
        rows = {rank: self._row(state, now[rank], late[rank], facts[rank].process) for rank, state in states.items()}
        return not live, rows

    def _row(self, state: RankState, now_ns: int, late_ns: int, process: str | None) -> Row:
        operation = state.operation()
        event = operation[0] if operation is not None else None
        quiet = max(0, now_ns - state.moved.time_ns) / 1e9 if state.moved is not None else None
        status = self._status(state, quiet, process)
        ring = self._rings.installed.get(state.recording.rank)
        if ring is not None and status in ("stalled", "silent") and not (ring.waiting or ring.open):
            status = "quiet"
        if status in STANDING:
            # Ages of ranks that stand still are compared with each other: at one moment, not when each was read.
            now_ns += late_ns
            quiet = quiet + late_ns / 1e9 if quiet is not None else None
        if ring is not None:
            return row_of(ring, status, now_ns, quiet)
        return Row(
            rank=state.recording.rank,
            status=status,
            phase=state.phase,
            round=state.round,
            epoch=state.epoch,
            boundary=state.boundary,
            permit=state.permit,
            operation=_words(event) if event is not None else "",
            open=operation is not None and operation[1],
            age_s=round(max(0, now_ns - event.time_ns) / 1e9, 3) if event is not None else None,
            site=event.site if event is not None and event.group else "",
            quiet_s=round(quiet, 3) if quiet is not None else None,
            gap_ms=round(state.gap_ns / 1e6, 3) if state.gap_ns is not None else None,
            p_queue=len(state.flying_of("P")),
            d_queue=len(state.flying_of("D")),
            pending=state.pending,
            exception=state.exception.text if state.exception is not None else "",
        )

    def _status(self, state: RankState, quiet_s: float | None, process: str | None) -> str:
        if state.exception is not None:
            return "failed"
        if state.recording.closed_ns is not None:
            return "ended"
        if process is not None and process in GONE:
            return "died"
        if process in ("T", "t"):
            return "stopped"
        if quiet_s is not None and quiet_s < self._stalled_s:
            return "running"
        if state.idle:
            return "idle"
        return "stalled" if process else "silent"

    def _moment(self, state: RankState) -> int:
        """Wall time of the newest thing that is known of a rank."""
        times = [state.recording.monotonic_ns, state.recording.closed_ns or 0]
        if state.newest is not None:
            times.append(state.newest.time_ns)
        return state.recording.wall(max(times))

    def _now(self, recording: Recording, newest_wall_ns: int, live: bool) -> int:
        """The moment of the frame on a rank's own clock: now, or when the last rank of a finished run ended."""
        if live and self._boot and recording.boot == self._boot:
            return self._read_ns[recording.rank]
        wall = time.time_ns() if live else newest_wall_ns
        return wall - recording.wall_ns + recording.monotonic_ns


def _words(event: Any) -> str:
    match event.kind.name:
        case "EXCHANGE_ENTER":
            return f"rendezvous {event.text} #{event.seq}"
        case "HOST_WAIT_ENTER":
            return f"waits for {event.text}"
        case "WORK_FINISH":
            return str(event.site)
    return f"{event.text} {event.group} #{event.seq}"
