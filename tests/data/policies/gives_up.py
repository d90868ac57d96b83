"""Goes idle with requests waiting."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "gives_up"

    def prefill_now(self, now: Any) -> bool:
        return not now.memory.round > 4
