"""Decodes in one round of four while a prefill is open."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "wrong"

    def decode_now(self, now: Any) -> Any:
        return now.memory.round % 4 == 0 or not now.p_active
