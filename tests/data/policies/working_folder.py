"""Asks in which folder its process runs."""

from __future__ import annotations

import os
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    def span(self, now: Any) -> Any:
        return 1 + len(os.getcwd()) % 2
