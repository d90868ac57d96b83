"""When something happened on a GPU, in the host's monotonic nanoseconds. Pure: events are anything with `elapsed_time`.

A GPU's events tell only how far apart two of them are. One whose host time is known within bounds, the base, turns that
into a time. The two clocks drift (tens of microseconds a second), and the distance is a float32 of milliseconds, so
both base and bounds are renewed on the way: an event cannot have happened before the host submitted it, nor after the
host saw that it had.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_TRIES: Final = 8
_REBASE_NS: Final = 2_000_000_000
"""A float32 of milliseconds resolves about 0.1 microseconds at this distance."""
_DRIFT: Final = 10_000
"""The clocks drift apart by at most one part in so many."""


class DeviceClock:
    """Of one GPU. Thread-safe.

    mark: records a timing event on an idle stream, waits for it and returns it. now: the host's monotonic nanoseconds.
    """

    def __init__(self, mark: Callable[[], Any], now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now, self._lock = now, threading.Lock()
        tries = []
        for _ in range(_TRIES):
            before, event, after = now(), mark(), now()
            tries.append((after - before, before, after, event))
        _, self._low, self._high, self._base = min(tries, key=lambda found: found[0])
        # The device's own time counts from the first base; [low, high] is where the host's clock stood at its zero.
        self._base_ns = 0
        self._narrowed = self._high

    def at(self, event: Any, not_before_ns: int = 0) -> int:
        """Host time of `event`, which has completed; not_before_ns: host time before it was recorded, 0 if unknown."""
        with self._lock:
            now = self._now()
            device: int = self._base_ns + round(self._base.elapsed_time(event) * 1e6)
            self._narrow(device, not_before_ns, now)
            if device - self._base_ns > _REBASE_NS:
                self._base, self._base_ns = event, device
            offset: int = (self._low + self._high) // 2
            return min(now, max(not_before_ns, device + offset))

    def holds(self, event: Any) -> bool:
        """Whether `event` is the base, and so must not be recorded again."""
        return event is self._base

    def _narrow(self, device: int, not_before: int, now: int) -> None:
        slack = max(0, now - self._narrowed) // _DRIFT
        self._narrowed = max(now, self._narrowed)
        self._low, self._high = self._low - slack, min(self._high + slack, now - device)
        if not_before:
            self._low = max(self._low, not_before - device)
        if self._low > self._high:  # more drift than that: the newest bounds alone
            self._high = now - device
            self._low = not_before - device if not_before else self._high
