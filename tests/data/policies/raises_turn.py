"""An exception in turn."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "raises_turn"

    async def turn(self, gate: Any) -> None:
        if gate.plan.round == 4:
            {}["rows"]
        await super().turn(gate)
