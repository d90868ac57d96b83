"""No permit in rounds without D."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "forgets_permit"

    async def turn(self, gate: Any) -> None:
        if gate.d_ready:
            await super().turn(gate)
