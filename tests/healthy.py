"""Jobs of four ranks that work, looked at while they do: each rank's dump and stack at a moment of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fr_dumps import Recorder
from tests.stuck_jobs import GROUPS, NAMES, OPS, RANKS, collective, transfer
from verify.events import Site
from verify.matching import Launch
from verify.readers.found import Stack

if TYPE_CHECKING:
    from random import Random

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
SYNC = "synchronize"
"""The host waits for all that it has called."""


@dataclass
class Op:
    """One operation of the job. called: who has. ended: who has seen its end. begun: it can end."""

    group: str
    operation: str
    members: tuple[int, ...]
    blocking: bool
    peer: tuple[int, int] | None = None
    called: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    @property
    def begun(self) -> bool:
        return self.called >= set(self.members)


def program(chance: Random, length: int, pairs: bool) -> list[Op]:
    """An order that all ranks follow. Hosts wait for some of the calls."""
    found = []
    for _ in range(length):
        if pairs and not chance.randrange(4):
            source, target = chance.sample(range(RANKS), 2)
            found.append(Op("0", "send", (source, target), bool(chance.randrange(2)), (source, target)))
        elif not chance.randrange(4):
            found.append(Op("", SYNC, tuple(range(RANKS)), True))
        else:
            group = chance.choice(NAMES)
            found.append(Op(group, chance.choice(OPS), GROUPS[group][1], bool(chance.randrange(2))))
    return found


class Working:
    """The job as it goes on, a rank or a device at a time. slow: a rank that is much slower than the others.

    recorders: what each rank has recorded so far. A collective ends on no member before all have called it, and then
    on each at its own time; a rank whose host waits goes on after that.
    """

    def __init__(self, chance: Random, ops: list[Op], backend: str, slow: int | None, swapped: bool) -> None:
        self.chance, self.backend, self.slow = chance, backend, slow
        self.lanes = [[op for op in ops if rank in op.members] for rank in range(RANKS)]
        if swapped:
            # Opposite order without a host wait in between is no fault where the device has room for both.
            for lane in self.lanes:
                for n in range(len(lane) - 1):
                    one, two = lane[n : n + 2]
                    if not one.blocking and not two.blocking and one.group != two.group and chance.randrange(2):
                        lane[n : n + 2] = [two, one]
        self.at = [0] * RANKS
        self.recorders = [Recorder(rank, GROUPS, backend) for rank in range(RANKS)]
        self.entries: dict[tuple[int, int], list[int]] = {}
        self.now = START

    def step(self) -> bool:
        """Something happens; False when all is done."""
        self.now += self.chance.randrange(1, 20 * SECOND)
        able = [(rank, None) for rank in range(RANKS) if self.at[rank] < len(self.lanes[rank]) and not self.waits(rank)]
        if self.slow is not None and len(able) > 1 and self.chance.randrange(8):
            able = [each for each in able if each[0] != self.slow] or able
        ends = [(rank, op) for lane in self.lanes for op in lane for rank in op.members if self._may_end(rank, op)]
        moves = [*able, *ends]
        if not moves:
            return False
        rank, op = self.chance.choice(moves)
        if op is None:
            self._call(rank, self.lanes[rank][self.at[rank]])
        else:
            op.ended.add(rank)
            for n in self.entries.get((rank, id(op)), ()):
                done = {"retired": True} if self.backend == "gloo" else {
                    "retired": True, "state": "completed", "time_discovered_completed_ns": self.now
                }  # fmt: skip
                self.recorders[rank].entries[n] = {**self.recorders[rank].entries[n], **done}
        return True

    def _may_end(self, rank: int, op: Op) -> bool:
        # A sender may be through before its receiver has come.
        early = op.peer is not None and op.peer[0] == rank and self.backend == "gloo"
        return rank in op.called and rank not in op.ended and (op.begun or early)

    def waits(self, rank: int) -> bool:
        """Whether the host of a rank waits for its last call."""
        last = self.lanes[rank][self.at[rank] - 1] if self.at[rank] else None
        if last is None or not last.blocking:
            return False
        before = self.lanes[rank][: self.at[rank]]
        return any(rank not in op.ended for op in (before if last.operation == SYNC else (last,)))

    def _call(self, rank: int, op: Op) -> None:
        self.at[rank] += 1
        op.called.add(rank)
        if op.operation == SYNC:
            op.ended.add(rank)
            return
        if op.peer is not None and self.backend == "gloo":
            return  # what gloo does not record
        name = op.operation
        if op.peer is not None:
            name = f"send {rank}->{op.peer[1]}" if op.peer[0] == rank else f"recv {rank}<-{op.peer[0]}"
        n = len(op.members)
        taken, out = {"all_gather": (8, 8 * n), "reduce_scatter": (8 * n, 8)}.get(op.operation, (8, 8))
        recorder = self.recorders[rank]
        recorder.call(op.group, name, size=taken, out=out, state="scheduled", time_created_ns=self.now, retired=False)
        self.entries.setdefault((rank, id(op)), []).append(len(recorder.entries) - 1)

    def dump(self, rank: int, keep: int | None, active: bool) -> Recorder:
        """What a dump of a rank holds now. keep: entries of its ring. active: open ones only."""
        mine = self.recorders[rank]
        copy = Recorder(rank, GROUPS, self.backend)
        copy.entries = list(mine.entries if keep is None else mine.entries[-keep:])
        if active:
            copy.entries = [each for each in copy.entries if each["state"] != "completed" and not each["retired"]]
        return copy

    def launches(self, rank: int) -> list[Launch]:
        """What a rank has called so far, and what it has seen end."""
        found = []
        for op in self.lanes[rank][: self.at[rank]]:
            if op.operation != SYNC:
                call = transfer(*op.peer)[rank] if op.peer is not None else collective(op.group, op.operation)[rank]
                found.append(Launch(call, len(found), done=rank in op.ended))
        return found

    def stack(self, rank: int) -> Stack:
        """Where its main thread stands: in the call that it waits for, else in the work of its own."""
        if self.waits(rank):
            inside = Site("/lib/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
            if self.lanes[rank][self.at[rank] - 1].operation == SYNC:
                inside = Site("/lib/site-packages/torch/cuda/__init__.py", 9, "synchronize")
            return Stack(rank, "MainThread", (inside, Site("train.py", 7, "step")))
        own = self.chance.choice(("read", "sleep", "acquire", "wait"))
        where = "threading.py" if own in ("acquire", "wait") else "/lib/python3.12/gzip.py"
        return Stack(rank, "MainThread", (Site(where, 3, own), Site("data.py", 5, "load")))
