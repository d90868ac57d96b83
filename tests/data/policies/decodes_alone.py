"""Decodes only while no prefill is open, and claims to wait for one epoch at most."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def decode_now(self, now: Any) -> Any:
        return not now.p_active
