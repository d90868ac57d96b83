"""Waits for a lock that nobody opens."""

from __future__ import annotations

import threading
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "locks"

    def __init__(self, limits: Any) -> None:
        super().__init__(limits)
        self.door = threading.Lock()
        self.door.acquire()

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def plan(self, views: Any, memory: Any) -> Any:
        plan, after = super().plan(views, memory)
        with self.door:
            pass
        return plan, after
