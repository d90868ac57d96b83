"""The span depends on the order of a set, which differs from process to process."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def span(self, now: Any) -> Any:
        return 1 + (next(iter({"a", "b", "c"})) == "a")
