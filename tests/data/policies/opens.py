"""Reads a file in plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "opens"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        Path(__file__).read_text()
        return plan, after
