"""An endless loop that swallows whatever is thrown into it, once."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "endless_swallowed"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        try:
            while True:
                plan = plan
        except BaseException:
            pass
        return plan, after
