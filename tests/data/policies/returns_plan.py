"""plan forgets the memory."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "returns_plan"

    def plan(self, views: Any, memory: Any) -> Any:
        return super().plan(views, memory)[0]
