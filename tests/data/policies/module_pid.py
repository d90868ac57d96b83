"""Decides by the number of the process that imported it."""

from __future__ import annotations

import os
from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees

CHOSEN = 1 + os.getpid() % 2


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def span(self, now: Any) -> Any:
        return CHOSEN
