"""Starts a process in turn."""

from __future__ import annotations

import subprocess
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "starts"

    async def turn(self, gate: Any) -> None:
        subprocess.run(["true"])  # noqa: ASYNC221
        await super().turn(gate)
