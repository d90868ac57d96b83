"""`global_complete`: a whole-P device fence between D iterations (paper section 7, the safe-PD ladder)."""

from __future__ import annotations

from typing import Any, ClassVar

from kernel.sched.planner import Planner, Situation
from kernel.sched.policy import ALL, Gate, Guarantees, Plan


class GlobalComplete(Planner):
    """Rounds alternate: one epoch of P, which finishes on every device, then one D iteration."""

    name: ClassVar[str] = "global_complete"
    guarantees: ClassVar[Guarantees] = Guarantees(decode_bound="epoch")

    def prefill_now(self, now: Situation) -> bool:
        return not now.rows or now.memory.extra != ("prefilled",)

    def decode_now(self, now: Situation) -> bool:
        return not now.p_active

    def remember(self, now: Situation, plan: Plan) -> tuple[Any, ...]:
        if plan.bucket:
            return ()
        return ("prefilled",) if now.p_active else now.memory.extra

    async def turn(self, gate: Gate) -> None:
        if gate.p_active:
            gate.release(ALL)
            await gate.completed()
            return
        await gate.rendezvous("pre-d")
        gate.launch_decode()
