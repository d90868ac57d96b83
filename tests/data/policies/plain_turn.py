"""turn is not a coroutine."""

from __future__ import annotations

from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "plain_turn"

    def turn(self, gate: Any) -> None:
        gate.launch_decode()
