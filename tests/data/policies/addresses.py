"""Decides by the address of an object."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def span(self, now: Any) -> Any:
        return 1 + int(repr(object())[-4:-1], 16) // 16 % 2
