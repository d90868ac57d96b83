"""Lets a task that nobody waits for release P."""

from __future__ import annotations

import asyncio
from typing import Any

from kernel.sched.fine import Fine


class Open(Fine):
    name = "open"

    async def turn(self, gate: Any) -> None:
        async def later() -> None:
            gate.release(gate.plan.span)

        await gate.reached()
        await gate.rendezvous("pre-d")
        gate.launch_decode()
        asyncio.get_running_loop().create_task(later())
        await gate.rendezvous("post-d")
