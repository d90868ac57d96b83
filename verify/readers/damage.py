"""Rings that have lost events, and what may not be concluded from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verify.readers.found import Damage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.record import Recording


def damaged(recordings: Iterable[Recording]) -> tuple[Damage, ...]:
    """Those of some rings that have lost events, or may have."""
    return tuple(
        Damage(each.rank, each.damage or f"{each.torn} of its events cannot be read", bool(each.damage))
        for each in recordings
        if each.damage or each.torn
    )


def lines(recording: Recording) -> list[str]:
    """What a ring has lost, a line each."""
    found = [f"{recording.dropped} older events are overwritten"] if recording.dropped and not recording.damage else []
    if recording.damage:
        found.append(f"its ring is damaged ({recording.damage})")
    elif recording.torn:
        found.append(f"{recording.torn} events cannot be read")
    elif recording.truncated:
        found.append("its ring is cut off, behind its newest event")
    return found
