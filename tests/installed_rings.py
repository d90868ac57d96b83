"""Rings of programs that are not ours, written by hand, and what the diagnosis makes of them."""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

from kernel.record import Kind, Recorder, ring_path
from kernel.record.foreign import PROGRAM, Call, Group, thread_text
from verify.hang.diagnosis import diagnose_found
from verify.live.threads import Moves
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis

PROGRAM_LINE = "train.py:7 step"
KEPT: deque[Recorder] = deque(maxlen=64)
"""Rings that stay mapped, so that their writer, this process, is there as long as a test looks at them."""


class Rank:
    """The ring of one rank. ago_s: when everything in it happened."""

    def __init__(self, out: Path, rank: int, size: int = 2, ago_s: float = 60.0, capacity: int = 1000) -> None:
        self.rank = rank
        self.recorder = Recorder(
            ring_path(out, rank), rank=rank, groups={}, meta={"program": PROGRAM, "size": size}, capacity=capacity,
            clock=lambda: time.monotonic_ns() - int(ago_s * 1e9),
        )  # fmt: skip
        KEPT.append(self.recorder)
        self.at = 0
        self._groups = count(1)
        self._numbers: dict[Any, int] = {}

    def thread(self, number: int, name: str = "") -> Rank:
        """From here on, what thread `number` does; 0 is the main one."""
        self.at = number
        if number:
            self.recorder.site(thread_text(number, name or f"Thread-{number} (work)"))
        return self

    def group(self, name: str, *ranks: int, base: int = 0, certain: bool = True) -> Group:
        made = Group(next(self._groups), name, ranks, "gloo", base, certain)
        self.recorder.site(made.text())
        return made

    def call(
        self, group: Group, op: str = "all_reduce", size: int = 4, line: int = 7,
        ins: tuple[int, ...] = (), outs: tuple[int, ...] = (), **more: Any,
    ) -> int:  # fmt: skip
        said = {"dtype": "float32", "medium": "gloo", **more}
        call = Call(op, ins=len(ins) or 1, outs=len(outs) or 1, **said)
        key = (group.number, call.peer, call.op if call.peer is not None else "")
        number = self._numbers[key] = self._numbers.get(key, group.base if call.peer is None else 0) + 1
        if ins:
            self.recorder.sizes(group.number, number, ins, Kind.INPUTS)
        if outs:
            self.recorder.sizes(group.number, number, outs, Kind.OUTPUTS)
        return self.recorder.event(
            Kind.CALL, group=group.number, seq=number, round_=sum(outs) or size, epoch=self.at, a=sum(ins) or size,
            b=self.recorder.site(call.text()), site=self.recorder.site(f"train.py:{line} step"),
        )  # fmt: skip

    def wait(self, number: int) -> None:
        self.recorder.event(Kind.CALL_WAIT, epoch=self.at, a=number)

    def done(self, number: int, why: str = "", source: int = -1) -> None:
        self.recorder.event(Kind.CALL_DONE, seq=source, epoch=self.at, a=number, b=self.recorder.site(why))

    def over(self, *calls: int) -> None:
        for number in calls:
            self.wait(number)
            self.done(number)

    def text(self, kind: Kind, text: str, a: int = 0) -> None:
        self.recorder.event(kind, epoch=self.at, a=a, b=self.recorder.site(text), site=self.recorder.site(PROGRAM_LINE))


def told(out: Path, patience_s: float = 5.0, closed: bool = False) -> Diagnosis:
    """The diagnosis. closed: the processes run here, and nothing happens in them before one of their calls ends."""
    found = RecordReader(patience_s).read(out)
    return diagnose_found(found, look=lambda ranks: dict.fromkeys(ranks, Moves()) if closed else {})


def pair(out: Path, ago_s: float = 60.0, size: int = 2) -> list[tuple[Rank, Group]]:
    ranks = [Rank(out, rank, size, ago_s) for rank in range(size)]
    return [(rank, rank.group("world", *range(size))) for rank in ranks]
