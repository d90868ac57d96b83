"""An endless loop in turn, once the gate has been passed."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "endless_turn"

    async def turn(self, gate: Any) -> None:
        await super().turn(gate)
        while gate.plan.round >= 3:
            pass
