"""A policy for bench/stretches.py: decode-only rounds in stretches that are alike but for one thing.

In each pair one stretch has it and the other has not, the first one in turn, so that a context which grows favours
neither. The CPU time of the rank's process is read at both ends of each: no other process is in it, and a machine that
slows down slows neighbours alike. It is told, at the end, in marks of the record: `stretch <with|without>`, in ns.

    record   the events of the record, or a recorder that writes nothing
    fine     plan and turn of `fine`, which multiplexes, or of `normal`, which does not
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel.record import NullRecorder
from kernel.sched.fine import Fine
from kernel.sched.normal import Normal

if TYPE_CHECKING:
    from kernel.sched.policy import Gate, Limits, Memory, Plan, RankView

WITH, WITHOUT = "stretch with", "stretch without"
RECORD, FINE = 0, 1


@dataclass(frozen=True, slots=True)
class StretchConfig:
    """what: RECORD or FINE. rows: of each replica. settle: rounds before it begins. length: of a stretch, pairs: of
    stretches."""

    what: int = RECORD
    rows: int = 8
    settle: int = 30
    length: int = 25
    pairs: int = 50

    @property
    def rounds(self) -> int:
        """All that a run needs."""
        return self.settle + 2 * self.length * self.pairs + 40


class Stretch(Fine):
    """See the module."""

    name = "stretch"
    Config = StretchConfig  # type: ignore[assignment]

    def __init__(self, limits: Limits, config: StretchConfig | None = None) -> None:
        super().__init__(limits)
        self.sizes, self._normal, self._null = config or StretchConfig(), Normal(limits), NullRecorder()
        self._began = self._cpu = -1
        self._real: Any = None
        self._taken: list[tuple[bool, int]] = []

    def has_it(self, round_: int) -> bool:
        """Whether this round is of a stretch that has it."""
        pair, second = divmod((round_ - self._began) // self.sizes.length, 2)
        outside = self._began < 0 or not 0 <= pair < self.sizes.pairs
        return outside or bool(second) == bool(pair % 2)

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        """That of `fine` or of `normal`."""
        if self.sizes.what != FINE or self.has_it(memory.round):
            return super().plan(views, memory)
        return self._normal.plan(views, memory)

    async def turn(self, gate: Gate) -> None:
        """That of `fine` or of `normal`; stretches begin and end in the same round on all ranks."""
        plan, sizes = gate.plan, self.sizes
        if self._began < 0 and not gate.p_active and set(plan.decode) == {sizes.rows}:
            self._began = plan.round + sizes.settle
        at = plan.round - self._began
        if self._began >= 0 <= at <= 2 * sizes.pairs * sizes.length and at % sizes.length == 0:
            self._edge(plan.round, gate._rank)  # type: ignore[attr-defined]
        if sizes.what != FINE or self.has_it(plan.round):
            await super().turn(gate)
        else:
            await self._normal.turn(gate)

    def _edge(self, round_: int, rank: Any) -> None:
        now, journal = time.process_time_ns(), rank._journal
        if self._cpu >= 0:
            self._taken.append((self.has_it(round_ - 1), now - self._cpu))
        self._real = self._real or journal._recorder
        if self.sizes.what == RECORD:
            journal._open(self._real if self.has_it(round_) else self._null)
        if len(self._taken) == 2 * self.sizes.pairs:
            for having, ns in self._taken:
                journal.mark(WITH if having else WITHOUT, ns)
        self._cpu = time.process_time_ns()
