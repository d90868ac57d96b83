"""Promotes an epoch that is still open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "early_promotion"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        if plan.epoch >= 0 and plan.promote < 0 and plan.activate < 0:
            plan = replace(plan, promote=plan.epoch)
        return plan, after
