"""An exception in plan."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "raises_plan"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        if plan.round == 4:
            raise ValueError("too many\nrows")
        return plan, after
