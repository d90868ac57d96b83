"""What `turnstile top` shows: where all ranks stand at one moment, who waits for whom, and what is certainly wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from verify.top import waits

if TYPE_CHECKING:
    from collections.abc import Mapping

    import networkx as nx

    from verify.hang.diagnosis import Diagnosis
    from verify.live.check import Check
    from verify.live.rings import Look
    from verify.top.state import RankState

STALLED_S: Final = 2.0
"""A rank that has recorded nothing for so long, with something open or in flight, stands out by default."""

STANDING: Final = frozenset({"stalled", "stopped", "died", "failed", "silent", "unknown"})
"""The states in which a rank does not go on by itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, in plain values. Ages are seconds; None: not known, or none.

    status: running | idle | stalled | stopped (by a signal, or a debugger) | ended | failed |
    quiet (of an installed record: silent, and nothing shows that it waits) |
    died (its process is gone and did not close its record) |
    silent (it runs on another host, or cannot be seen, and its record does not move) |
    unknown (nothing is heard of its host any more). blocks: a rank that stands still waits for it, and it waits for
    nobody. waits, decision: of an installed record, what its main thread waits in and which other calls are open, and
    what it decided last.
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
    waits: str = ""
    decision: str = ""
    installed: bool = False


@dataclass(frozen=True)
class Frame:
    """All ranks at one moment. ended: no rank runs any more. waits: who waits for whom, a line each.

    cycle: a ring of waits that is certain, actor and operation in turn. check: the first fault that was certain.
    hosts: of a run on several hosts, those that are not heard of, a line each. stale: rings of another job that lie
    beside those of this one, a line each: none of them is a rank here. states: what is known of each rank's
    record, where it is read here.
    """

    run: str
    about: str
    ended: bool
    rows: tuple[Row, ...]
    waits: tuple[str, ...]
    cycle: tuple[Any, ...]
    graph: nx.DiGraph[Any]
    missing: tuple[int, ...]
    states: dict[int, RankState]
    check: Diagnosis | None = None
    hosts: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    @property
    def stalled(self) -> tuple[int, ...]:
        """Ranks that stand out."""
        return tuple(row.rank for row in self.rows if row.status in STANDING or row.blocks)

    @property
    def installed(self) -> bool:
        """Whether it shows a job that `turnstile.record.install` records: there are no rounds, epochs or queues."""
        return any(row.installed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "run": self.run, "about": self.about, "ended": self.ended, "stalled": list(self.stalled),
            "missing": list(self.missing), "cycle": bool(self.cycle), "waits": list(self.waits),
            "check": self.check.to_dict() if self.check is not None else None, "hosts": list(self.hosts),
            "stale": list(self.stale),
            "ranks": [{name: getattr(row, name) for name in Row.__dataclass_fields__} for row in self.rows],
        }  # fmt: skip


class View(Protocol):
    """What is shown: a run read here, or what the agents of several hosts tell. check: takes each look."""

    check: Check

    def look(self) -> Frame:
        """Where everybody stands now. Raises UsageError where there is nothing to see, and never was."""
        ...

    def read(self) -> Look:
        """The same without a picture, and without giving it to `check`."""
        ...


def frame_of(
    run: str,
    about: str,
    ended: bool,
    rows: Mapping[int, Row],
    look: Look,
    check: Check,
    size: int = 0,
    states: dict[int, RankState] | None = None,
    hosts: tuple[str, ...] = (),
) -> Frame:
    """A frame of what a look found; `check` takes the look. size: ranks that there should be, 0 where not known."""
    check.take(look, always=True)
    shown = dict(rows)
    graph = waits.shown(check.newest, check.ring) if check.newest is not None else waits.nothing()
    standing = {rank for rank, row in rows.items() if row.status in STANDING}
    for rank in waits.blockers(graph, standing) & rows.keys():
        shown[rank] = replace(shown[rank], blocks=True)
    return Frame(
        run,
        about,
        ended,
        tuple(row for _, row in sorted(shown.items())),
        tuple(waits.told(graph, check.ring)),
        tuple(check.ring),
        graph,
        tuple(rank for rank in range(size) if rank not in rows),
        states or {},
        check.diagnosis,
        hosts,
        look.stale,
    )
