"""`normal`: strict prefill priority, no multiplexing. The paper's AInfer Normal."""

from __future__ import annotations

from typing import ClassVar

from kernel.sched.planner import Planner, Situation
from kernel.sched.policy import ALL, Gate, Guarantees


class Normal(Planner):
    """P runs whenever there is any, alone; D runs only in rounds without P, so it can wait for the whole backlog."""

    name: ClassVar[str] = "normal"
    guarantees: ClassVar[Guarantees] = Guarantees(decode_bound="backlog")

    def decode_now(self, now: Situation) -> bool:
        return not now.p_active

    async def turn(self, gate: Gate) -> None:
        if gate.p_active:
            await gate.drained()
            gate.release(ALL)
            await gate.completed()
        gate.launch_decode()
