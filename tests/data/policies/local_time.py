"""Asks for the time of day."""

from __future__ import annotations

import time
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    def span(self, now: Any) -> Any:
        return 1 + time.localtime().tm_sec % 2
