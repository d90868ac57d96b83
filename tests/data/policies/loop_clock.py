"""Asks its event loop for the time."""

from __future__ import annotations

import asyncio
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    def span(self, now: Any) -> Any:
        return 1 + int(asyncio.get_running_loop().time() * 1000) % 2
