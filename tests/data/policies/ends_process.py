"""Ends the process in `plan`."""

from __future__ import annotations

import os
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    def plan(self, views: Any, memory: Any) -> Any:
        os._exit(0)
