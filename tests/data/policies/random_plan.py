"""A span by chance."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "random_plan"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        plan = replace(plan, span=random.randrange(1, 1000))
        return plan, after
