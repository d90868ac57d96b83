"""An endless loop in C code."""

from __future__ import annotations

import itertools
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "loops_in_c"

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        sum(itertools.repeat(0))
        return plan, after
