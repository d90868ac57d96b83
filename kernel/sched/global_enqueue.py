"""`global_enqueue`: whole-epoch host enqueue on all ranks, no device wait (paper section 7, the safe-PD ladder)."""

from __future__ import annotations

from typing import ClassVar

from kernel.sched.planner import Planner
from kernel.sched.policy import ALL, Gate, Guarantees


class GlobalEnqueue(Planner):
    """Ready D is enqueued, then a whole epoch of P behind it; the next D is acknowledged while P is incomplete."""

    name: ClassVar[str] = "global_enqueue"
    guarantees: ClassVar[Guarantees] = Guarantees(decode_bound="epoch")

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        starts = gate.plan.activate >= 0
        if starts:
            await gate.rendezvous("pre-d")
        gate.launch_decode()
        if starts:
            gate.release(ALL)
            await gate.enqueued()
        elif not gate.d_ready:
            await gate.completed()
