"""Opens a socket in turn."""

from __future__ import annotations

import socket
from typing import Any

from kernel.sched.fine import Fine


class Wrong(Fine):
    name = "connects"

    async def turn(self, gate: Any) -> None:
        socket.create_connection(("127.0.0.1", 9))
        await super().turn(gate)
