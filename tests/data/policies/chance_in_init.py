"""Decides by chance when it is made."""

from __future__ import annotations

import random
from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def __init__(self, limits: Any, config: Any = None) -> None:
        super().__init__(limits, config)
        self.chosen = random.choice((1, 2))

    def span(self, now: Any) -> Any:
        return self.chosen
