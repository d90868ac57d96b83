"""Counts its rounds by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "counting_plan"

    def __init__(self, limits: Any) -> None:
        super().__init__(limits)
        self.rounds = []

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        self.rounds.append(plan.round)
        if plan.bucket:
            plan = replace(plan, span=1 + len(self.rounds) % 3)
        return plan, after
