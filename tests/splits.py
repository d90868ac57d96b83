"""What a record says of P's dispatches: those that were enqueued, and those of which rows are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.program import Op
from kernel.record import Kind

if TYPE_CHECKING:
    from kernel.record import Recording


def told(recording: Recording) -> list[tuple[str, int]]:
    """Group and number of each list of rows, in order."""
    return [(event.group, event.seq) for event in recording.events if event.kind is Kind.SIZES]


def dispatches(recording: Recording) -> dict[tuple[str, int], int]:
    """P's dispatches that were enqueued -> rows of all replicas."""
    return {
        (event.group, event.seq): event.a
        for event in recording.events
        if event.kind is Kind.ENQUEUE and event.text == Op.DISPATCH and event.phase == "P"
    }
