"""Whether `turn` compares plans first depends on the order of a set, which differs from process to process."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    async def turn(self, gate: Any) -> None:
        if next(iter({"north", "south"})) == "north":
            await super().turn(gate)
            return
        await gate.reached()
        gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span)
