"""Asks at the terminal."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "asks"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        input("span? ")
        return plan, after
