"""Which calls of a rank are kept of those that a ring shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from verify.events import State

if TYPE_CHECKING:
    from verify.events import Event

KEEP: Final = 20_000
"""Finished collectives of a rank that are kept, the newest ones; unfinished ones always are."""


def newest(calls: list[Event]) -> list[Event]:
    """All unfinished ones and the newest `KEEP` of the others, in their order."""
    excess = sum(call.state is State.COMPLETED for call in calls) - KEEP
    kept = []
    for call in calls:
        if excess > 0 and call.state is State.COMPLETED:
            excess -= 1
        else:
            kept.append(call)
    return kept
