"""Decides by the number of the process that imported it."""

from __future__ import annotations

import os
from typing import Any

from kernel.sched.fine import Fine

CHOSEN = 1 + os.getpid() % 2


class Wrong(Fine):
    name = "wrong"

    def span(self, now: Any) -> Any:
        return CHOSEN
