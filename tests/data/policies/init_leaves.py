"""What the first object leaves in another module decides for all of its process."""

from __future__ import annotations

import os
import types
from typing import Any

from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees

types.turnstile_chosen = getattr(types, "turnstile_chosen", 1 + os.getpid() % 2)


class Wrong(Fine):
    name = "wrong"
    guarantees = Guarantees(decode_bound="epoch")

    def span(self, now: Any) -> Any:
        return types.turnstile_chosen
