"""`unordered`: separate communicators and nothing else. The control that deadlocks (paper section 7, RQ3)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from kernel.sched.planner import Planner
from kernel.sched.policy import Gate, Guarantees

if TYPE_CHECKING:
    from kernel.sched.planner import Situation


class Unordered(Planner):
    """Each phase goes on as soon as its own last work has finished on this rank; no rank waits for another's order.

    So ranks may enqueue P and D in different orders, and no route joins their streams: with too little room on the
    device they wait for each other for ever. On one stream (`route=paper` or `all`) they do so at any capacity. Refused
    outside the simulated world unless asked for by name.
    """

    name: ClassVar[str] = "unordered"
    guarantees: ClassVar[Guarantees] = Guarantees(deadlock_free=False, epochs_complete=False, decode_bound="backlog")
    route: ClassVar[str | None] = "none"

    def span(self, now: Situation) -> int:
        return 1

    async def turn(self, gate: Gate) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._decode(gate), name="unordered D")
            both.create_task(self._prefill(gate), name="unordered P")

    async def _decode(self, gate: Gate) -> None:
        await gate.drained()
        gate.launch_decode()

    async def _prefill(self, gate: Gate) -> None:
        await gate.completed()
        gate.release(gate.plan.span)
