"""Sleeps in turn."""

from __future__ import annotations

import time
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "sleeps"

    async def turn(self, gate: Any) -> None:
        time.sleep(0.001)  # noqa: ASYNC251
        await super().turn(gate)
