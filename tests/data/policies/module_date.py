"""Decides by the day on which it was imported."""

from __future__ import annotations

import datetime
from typing import Any

from kernel.sched.fine import Fine

CHOSEN = datetime.datetime.now().toordinal() % 2 + 1


class Wrong(Fine):
    name = "wrong"

    def span(self, now: Any) -> Any:
        return CHOSEN
