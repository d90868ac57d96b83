"""Rings that `turnstile.record.install` left, followed while the job goes on: what each rank does, and who stands.

An installed job has no rounds and no heartbeat of its own, so silence means nothing: a rank may compute, load data or
write a checkpoint for minutes, while all others wait for it. What makes a rank *stand* here is one of three things:

    it waits       its main thread is in a wait that the record shows; calls that block stay blocked
    it has ended   its process is gone, or its main thread has raised
    it is idle     its process shows for `patience_s` that nothing in it will go on by itself (`verify.live.idle`)

A ring of waits, a call that a rank which has ended will never make, and calls that differ need no more than that. That
a living rank is missing is told only when every rank of the job stands.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify.live.idle import Idle
from verify.live.process import GONE
from verify.live.threads import moves
from verify.readers.installed import of_rings
from verify.readers.installed_ring import Ring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.record import Recording
    from kernel.record.foreign import Call
    from verify.readers.found import Found
    from verify.readers.installed_call import Item

PATIENCE_S: Final = 5.0
"""How long a process has to be idle, and another thread silent, before it counts as one that does not go on."""


class LiveInstalled(Ring):
    """One rank's ring, taken again and again. process: what its process does (`verify.live.process`)."""

    process: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.idle = Idle(PATIENCE_S)

    @property
    def lost_graphs(self) -> bool:
        """Whether what it may wait for is not all in it."""
        # A record that was closed while the process goes on says nothing of what that does.
        return not self.whole or (self.recording.closed_ns is not None and self.process not in (None, *GONE))

    @property
    def ended(self) -> bool:
        """Whether its main thread does nothing any more."""
        if 0 in self.raised or (self.process is not None and self.process in GONE):
            return True
        return self.process is None and self.recording.closed_ns is not None

    @property
    def here(self) -> bool:
        """Whether its process runs here, as far as can be seen."""
        return self.process is not None and self.process not in GONE

    @property
    def hidden(self) -> bool:
        """Whether threads of its process that the record may not know can go on by themselves, and make calls."""
        now = moves(self.recording.pid) if self.here and self.recording.closed_ns is None else None
        return now is not None and bool(now.others)

    @property
    def waiting(self) -> bool:
        """Whether its main thread is in a wait that the record shows."""
        return 0 in self.waits or 0 in self._syncs or bool(self._hosts.get(0))

    @property
    def busy(self) -> bool:
        """Whether another thread of it may yet make a call, as far as the record knows them."""
        threads = {*self.waits, *self._syncs, *(thread for thread, open_ in self._hosts.items() if open_)}
        if len(threads) > 1:
            return True
        now = time.monotonic_ns()
        gone = {*threads, *self.over}
        others = [at for thread, at in self.moved.items() if thread not in gone and self.threads.get(thread) != WATCH]
        return any(now - at < PATIENCE_S * 1e9 for at in others)

    def look_idle(self) -> None:
        """Look at its process, where the record shows no wait."""
        last = self.newest.number if self.newest is not None else -1
        known = self.process is not None and self.process not in GONE
        if not known or self.ended or self.waiting or self.recording.closed_ns is not None:
            self.idle.forget()
        else:
            self.idle.look(self.recording.pid, last)

    @property
    def open(self) -> list[Item]:
        """Calls that are not over, oldest first."""
        return [item for item in self.items if not item.done]


WATCH: Final = "turnstile record"


def of_live(rings: Mapping[int, LiveInstalled], source: str) -> tuple[Found, frozenset[int], frozenset[int] | None]:
    """What a look found, the ranks that gave up because of another one, and those that are idle if all stand."""
    processes = {id(ring.recording): ring.process for ring in rings.values()}

    def running(recording: Recording) -> bool | None:
        process = processes[id(recording)]
        return None if process is None else process not in GONE

    found, gave_up = of_rings(rings, source, PATIENCE_S, running)
    idle = frozenset(rank for rank, ring in rings.items() if ring.idle.proven)
    stand = all(ring.ended or ring.waiting or rank in idle for rank, ring in rings.items())
    whole = not found.expected - found.present
    # What their processes show is that they will not come.
    found = replace(found, idle=found.idle - idle)
    return found, gave_up, idle if idle and stand and whole else None


def call_words(call: Call, group: str, number: int) -> str:
    """A call, as people say it: `all_reduce default_pg #8`, `recv from 2 on pp#1 #3`."""
    name = call.op
    if call.peer is not None:
        name += f" {'to' if call.op == 'send' else 'from'} {call.peer if call.peer >= 0 else 'anybody'} on"
    return f"{name} {group} #{number}"
