"""Asks for the name of its host."""

from __future__ import annotations

import platform
from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def span(self, now: Any) -> Any:
        return 1 + len(platform.node()) % 2
