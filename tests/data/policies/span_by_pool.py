"""Grants two boundaries where the pools of the replicas differ, and claims one."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    def plan(self, views: Any, memory: Any) -> Any:
        self.views = views
        return super().plan(views, memory)

    def span(self, now: Any) -> Any:
        return 1 + (self.views[0].free_blocks != self.views[-1].free_blocks)
