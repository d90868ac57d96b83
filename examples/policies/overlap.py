"""`overlap`: `fine` that lets prefill's collectives run wherever they like. Wrong; can you see why?

Under `fine`, prefill's all-reduce over all ranks takes its place in decode's stream and waits there. It looks like a
good idea to spare that wait: all ranks still enqueue everything in one common order. It passes every test that runs it.
"""

from __future__ import annotations

from typing import ClassVar

from kernel.sched.fine import Fine


class Overlap(Fine):
    """No collective of prefill waits behind decode."""

    name: ClassVar[str] = "overlap"
    route: ClassVar[str | None] = "none"
