"""`unordered`: separate communicators and nothing else. The control that deadlocks (paper section 7, RQ3)."""

from __future__ import annotations

from typing import ClassVar

from kernel.sched.planner import Planner
from kernel.sched.policy import ALL, Gate, Guarantees


class Unordered(Planner):
    """P enters the device as soon as it is planned, D whenever it is ready; no rank waits for another's order.

    Its ranks may enqueue P and D in different orders, and no route joins their streams: with too little room on the
    device they wait for each other for ever. Refused outside the simulated world unless asked for by name.
    """

    name: ClassVar[str] = "unordered"
    guarantees: ClassVar[Guarantees] = Guarantees(deadlock_free=False, epochs_complete=False, decode_bound="backlog")
    route: ClassVar[str | None] = "none"

    async def turn(self, gate: Gate) -> None:
        gate.launch_decode()
        if gate.plan.activate >= 0:
            gate.release(ALL)
        if gate.p_active and not gate.d_ready:
            await gate.completed()
