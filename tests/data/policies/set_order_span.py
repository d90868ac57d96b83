"""The span depends on the order of a set, which differs from process to process."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    def span(self, now: Any) -> Any:
        return 1 + (next(iter({"a", "b", "c"})) == "a")
