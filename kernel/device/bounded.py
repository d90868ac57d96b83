"""Calls into a driver that may never return, made so that nobody waits for them for ever."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def all_of(calls: Iterable[tuple[str, Callable[[], object]]], grace_s: float) -> list[str]:
    """Make all calls at once, each on a daemon thread of its name; the names of those not through after grace_s.

    At once, because one may wait for what another ends. What a call raises ends that call only.
    """
    threads = []
    for name, call in calls:
        thread = threading.Thread(target=_quietly, args=(call,), name=name, daemon=True)
        thread.start()
        threads.append(thread)
    end = time.monotonic() + grace_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        return  # something has failed before, or nobody would close; that is what is to be reported
