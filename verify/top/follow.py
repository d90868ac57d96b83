"""Follows the records of a run: each `look` reads what is new and says where everybody stands."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from kernel.record import read
from verify import runs
from verify.top import waits
from verify.top.state import RankState

if TYPE_CHECKING:
    from collections.abc import Mapping

    import networkx as nx

    from kernel.record import Recording

STALLED_S: Final = 2.0
"""A rank that has recorded nothing for so long, with something open or in flight, stands out by default."""

STANDING: Final = frozenset({"stalled", "stopped", "died", "failed", "silent"})
"""The states in which a rank does not go on by itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, in plain values. Ages are seconds; None: not known, or none.

    status: running | idle | stalled | stopped (by a signal, or a debugger) | ended | failed |
    died (its process is gone and did not close its record) |
    silent (it runs on another host, or cannot be seen, and its record does not move). blocks: a rank that stands still
    waits for it, and it waits for nobody.
    """

    rank: int
    status: str
    phase: str
    round: int
    epoch: int
    boundary: int | None
    permit: int | None
    operation: str
    open: bool
    age_s: float | None
    site: str
    quiet_s: float | None
    gap_ms: float | None
    p_queue: int
    d_queue: int
    pending: int
    exception: str
    blocks: bool = False


@dataclass(frozen=True)
class Frame:
    """All ranks at one moment. ended: no rank runs any more. waits: who waits for whom, a line each."""

    run: str
    about: str
    ended: bool
    rows: tuple[Row, ...]
    waits: tuple[str, ...]
    cycle: tuple[Any, ...]
    graph: nx.DiGraph[Any]
    missing: tuple[int, ...]
    states: dict[int, RankState]

    @property
    def stalled(self) -> tuple[int, ...]:
        """Ranks that stand out."""
        return tuple(row.rank for row in self.rows if row.status in STANDING or row.blocks)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "run": self.run, "about": self.about, "ended": self.ended, "stalled": list(self.stalled),
            "missing": list(self.missing), "cycle": bool(self.cycle), "waits": list(self.waits),
            "ranks": [{name: getattr(row, name) for name in Row.__dataclass_fields__} for row in self.rows],
        }  # fmt: skip


def _blockers(graph: nx.DiGraph[Any], rows: Mapping[int, Row]) -> set[int]:
    """Ranks whose host waits for nobody, while another rank that stands still waits for them."""
    roots, needed = set(), set()
    for node in graph:
        if node[0] == "op" or node[1] not in rows or not graph.in_degree(node):
            continue
        if node[0] == "host" and not graph.out_degree(node):
            roots.add(node[1])
        waiting = {graph.nodes[one]["rank"] for op in graph.predecessors(node) for one in graph.predecessors(op)}
        if any(rank != node[1] and rows[rank].status in STANDING for rank in waiting):
            needed.add(node[1])
    return roots & needed


class Follower:
    """A run directory, watched from outside: nothing is asked of its ranks, and nothing in it is changed."""

    def __init__(self, run: Path, stalled_s: float = STALLED_S) -> None:
        self.run, self._stalled_s = run, stalled_s
        self._states: dict[int, RankState] = {}
        self._read_ns: dict[int, int] = {}
        self._boot = boot_id()

    def look(self) -> Frame:
        """Where everybody stands. Raises UsageError where there is no usable ring, and never was one."""
        if not self._states:
            # The first reading of a large ring is slow: once all are known, a second one sees them close together.
            self._look()
        self._look()
        return self._frame()

    def _look(self) -> None:
        trouble: UsageError | None = None
        for path in sorted(runs.rings(self.run), key=lambda each: int(each.stem[4:])):
            try:
                self._read(path)
            except UsageError as error:  # being replaced just now; what was known of it stays
                trouble = error
        if not self._states:
            raise trouble or UsageError(f"run {str(self.run)!r}: no rank<k>.ring in it: it has left nothing to see")

    def _read(self, path: Path) -> None:
        rank = int(path.stem[4:])
        known = self._states.get(rank)
        was_open = known is None or known.recording.closed_ns is None
        before = time.monotonic_ns()
        recording = read(path, since=known.since if known is not None else -1)
        if recording.rank != rank:
            raise UsageError(f"record {str(path)!r}: it says that it is of rank {recording.rank}: rename it")
        if known is None or not known.follows(recording):
            self._states[rank] = RankState(recording if known is None else read(path))
        else:
            known.follow(recording)
        if was_open and recording.closed_ns is not None:
            # It was closed between the reading of its events and that of its head: the last ones may be missing.
            self._states[rank].follow(read(path, since=self._states[rank].since))
        self._read_ns[rank] = before

    def _frame(self) -> Frame:
        states = dict(sorted(self._states.items()))
        processes = {rank: self._process(state.recording) for rank, state in states.items()}
        newest = max((self._moment(state) for state in states.values()), default=0)
        live = any(process not in ("", "Z", "X") for process in processes.values())
        now = {rank: self._now(state.recording, newest, live) for rank, state in states.items()}
        graph = waits.graph_of(states)
        cycle = waits.cycle_of(graph)
        last = max(self._read_ns.values())
        late = {rank: last - self._read_ns[rank] if live else 0 for rank in states}
        rows = {rank: self._row(state, now[rank], late[rank], processes[rank]) for rank, state in states.items()}
        for rank in _blockers(graph, rows):
            rows[rank] = replace(rows[rank], blocks=True)
        first = next(iter(states.values())).recording
        size = first.meta.get("size")
        expected = range(size if isinstance(size, int) and 0 < size < 1 << 20 else 0)
        missing = tuple(rank for rank in expected if rank not in states)
        about = ", ".join(str(first.meta[key]) for key in ("policy", "world") if key in first.meta)
        return Frame(
            str(self.run),
            about,
            not live,
            tuple(rows.values()),
            tuple(waits.told(graph, cycle)),
            tuple(cycle),
            graph,
            missing,
            states,
        )

    def _row(self, state: RankState, now_ns: int, late_ns: int, process: str | None) -> Row:
        operation = state.operation()
        event = operation[0] if operation is not None else None
        quiet = max(0, now_ns - state.moved.time_ns) / 1e9 if state.moved is not None else None
        status = self._status(state, quiet, process)
        if status in STANDING:
            # Ages of ranks that stand still are compared with each other: at one moment, not when each was read.
            now_ns += late_ns
            quiet = quiet + late_ns / 1e9 if quiet is not None else None
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
        if process in ("", "Z", "X"):
            return "died"
        if process in ("T", "t"):
            return "stopped"
        if quiet_s is not None and quiet_s < self._stalled_s:
            return "running"
        if state.idle:
            return "idle"
        return "stalled" if process else "silent"

    def _process(self, recording: Recording) -> str | None:
        """The state of its process, as /proc has it: "" where it is gone, None where that cannot be seen from here."""
        if recording.closed_ns is not None:
            return ""
        if not self._boot or recording.boot != self._boot:
            return None
        return process_state(recording.pid, recording.monotonic_ns)

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


def boot_id() -> str:
    """Of the running system, "" where it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def process_state(pid: int, recorded_ns: int) -> str | None:
    """One letter for what process `pid` does, R, S, D, T, ...; "" where it is gone, None where it cannot be told.

    A process that was started after `recorded_ns` (monotonic) has only got the number of one that is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        letter, ticks = fields[0], int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except (OSError, ValueError, IndexError):
        return None
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    began_s = ticks / os.sysconf("SC_CLK_TCK") - asleep
    return letter if began_s < recorded_ns / 1e9 + 1 else ""
