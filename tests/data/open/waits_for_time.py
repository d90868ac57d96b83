"""Waits for a millisecond before its exchange."""

from __future__ import annotations

import asyncio
from typing import Any

from kernel.sched.fine import Fine


class Open(Fine):
    name = "open"

    async def turn(self, gate: Any) -> None:
        await gate.reached()
        await asyncio.sleep(0.001)
        await gate.rendezvous("pre-d")
        gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span)
