"""Decides by chance when it is imported."""

from __future__ import annotations

import random
from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees

CHOSEN = random.choice((1, 2))


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def span(self, now: Any) -> Any:
        return CHOSEN
