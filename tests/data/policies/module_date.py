"""Decides by the day on which it was imported."""

from __future__ import annotations

import datetime
from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees

CHOSEN = datetime.datetime.now().toordinal() % 2 + 1


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def span(self, now: Any) -> Any:
        return CHOSEN
