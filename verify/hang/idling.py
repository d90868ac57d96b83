"""What a thread is in that has nothing to do, or waits for somebody to give it something to do: one list of functions,
by who may let it go on.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final


class By(StrEnum):
    """Who ends a wait."""

    OWN = "own"
    """Another thread of its process, or the clock: nothing outside keeps it. A lock of the program is one, too."""
    LOOP = "loop"
    """An event loop: its own threads, the clock, and whatever it listens to outside."""
    ANYBODY = "anybody"
    """Whoever connects, or sends a signal."""


_NAMES: Final = {
    By.OWN: "wait|wait_for|get|join|_wait_for_tstate_lock|result|sleep|time_sleep",
    By.LOOP: "select|poll|epoll|epoll_wait|run_forever|run_until_complete",
    By.ANYBODY: "accept|pause|serve_forever",
}
_PATTERNS: Final = {by: re.compile(rf"(^|\.)({names})$") for by, names in _NAMES.items()}
_SLEEP: Final = re.compile(r"(^|\.|a )(time_)?sleep$")
_LOCK: Final = re.compile(r"(^|\.)acquire$|^a lock\b")
AT_ITS_END: Final = "the join of its other threads after the end of its program"
"""What a main thread is in that has come to the end of its program while others of its threads run."""
_CHILD: Final = re.compile(r"^(Popen|subprocess)\b")
"""Waits for a child have the same names: it is at work, as far as is known."""


def idles(what: str) -> By | None:
    """Who ends the wait that a function is, by its name, with its class or without; None for what is no such wait."""
    if _CHILD.search(what):
        return None
    if sleeps(what) or what == AT_ITS_END or _LOCK.search(what):
        return By.OWN
    return next((by for by, pattern in _PATTERNS.items() if pattern.search(what)), None)


def sleeps(what: str) -> bool:
    """Whether it is a wait for the clock alone."""
    return _SLEEP.search(what) is not None


def may_need_a_call(what: str) -> bool:
    """Whether a wait may end when a call of the rank does: by a callback of its future, or by a thread that makes it.
    No call ends a sleep, or a wait for what is outside of the process.
    """
    return not sleeps(what) and idles(what) in (By.OWN, By.LOOP)
