"""Ready rows never decode."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "never_decodes"

    def decode_now(self, now: Any) -> bool:
        return False
