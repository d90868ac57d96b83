"""A span twice as long as it says."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "greedy_span"

    def span(self, now: Any) -> int:
        return 2 * self.config.span
