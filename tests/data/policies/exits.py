"""Ends the process from plan."""

from __future__ import annotations

import sys
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "exits"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        if plan.round == 2:
            sys.exit(3)
        return plan, after
