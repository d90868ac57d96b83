"""An endless loop in plan."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "endless_plan"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        while True:
            plan = plan
        return plan, after
