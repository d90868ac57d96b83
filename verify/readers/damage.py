"""Rings that were cut off or changed since they were made: what they show is past, and what they lack may have been.

A file that is shorter than it was made has lost its newest events, perhaps; one in which no slot is whole though its
slots were written has lost all of them. A single event that cannot be read may have been any call of its rank, until a
later one in the same group shows how many there were.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernel.record import Recording


def newest_gap(recording: Recording) -> int:
    """The number of the newest event that cannot be read between others; -1 where there is none."""
    if not recording.torn:
        return -1
    numbers = [event.number for event in recording.events]
    return max((after - 1 for before, after in pairwise(numbers) if after - before > 1), default=-1)


def doubtful(recording: Recording, groups: Iterable[str], newest: Mapping[str, int], lost: bool = False) -> set[str]:
    """Those of some groups in which the rank may have made calls that its ring does not show any more.

    newest: group -> the number of the newest event that is a call in it. lost: there are calls that could be read in
    part only.
    """
    if recording.cut or lost:
        return set(groups)
    gap = newest_gap(recording)
    return {group for group in groups if gap > newest.get(group, -1)} if gap >= 0 else set()


def told(recording: Recording) -> str:
    """What is damaged, to come after the name of the rank; "" where nothing is."""
    unread = f"{recording.torn} event{'s' * (recording.torn != 1)} cannot be read" if recording.torn else ""
    if recording.truncated:
        return "its ring is damaged: the file is cut off" + f", and {unread}" * bool(unread)
    if recording.cut:
        return "its ring is damaged: no event in it can be read"
    return unread
