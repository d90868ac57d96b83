"""What a rank that ended without a word was doing, from its record: the ring outlives the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.journal import standing
from kernel.record import Kind, read, ring_path
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.record import Event

NEWEST = 4096
"""Events at the end of a record in which submissions that have not finished are looked for."""


def of(record: str, rank: int) -> str:
    """A clause such as ` with P e3 [4,8) and D 17 in flight, in exchange 41 (post-d)`; "" where nothing is recorded."""
    if not record:
        return ""
    try:
        recording = read(ring_path(record, rank))
    except UsageError:
        return ""
    return clause(recording.events[-NEWEST:])


def clause(events: Iterable[Event]) -> str:
    """The same, from the events themselves: what was submitted and has not finished, P first, the oldest of each; the
    exchange that the rank was in; or that it waited for work.
    """
    flying: dict[Phase, list[str]] = {Phase.P: [], Phase.D: []}
    exchange: tuple[int, str] | None = None
    owner, empty = "", True
    for event in events:
        empty = False
        if event.kind is Kind.EXCHANGE_ENTER:
            exchange = event.seq, event.text
        elif event.kind is Kind.EXCHANGE_LEAVE:
            exchange = None
        elif event.kind is Kind.HOST_WAIT_ENTER:
            owner = event.text
        elif event.kind is Kind.HOST_WAIT_LEAVE:
            owner = ""
        if event.phase is None:
            continue
        if event.kind is Kind.SUBMIT:
            flying[event.phase].append(event.site)
        elif event.kind is Kind.WORK_FINISH and event.site in flying[event.phase]:
            flying[event.phase].remove(event.site)
    return "" if empty else standing([labels[0] if labels else "" for labels in flying.values()], exchange, owner)
