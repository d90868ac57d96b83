"""The ordered inbox: everything from outside that can change what a rank enqueues.

Every rank receives every entry, in one order. Views carry how many a rank has; the plan takes the minimum, and entries
up to it take effect at the end of that round on all ranks, before the next views are made.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.errors import TurnstileError
    from kernel.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """A new turn."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End a turn; what it has drawn so far is its result. Unknown and finished ids are ignored."""

    request: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """Abort the session's turn, if any, and drop its KV."""

    session: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Drop the KV that idle sessions keep."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Admit and decode nothing more until Resume; an open prefill epoch runs to its end."""


@dataclass(frozen=True, slots=True)
class Resume:
    """End a pause."""


@dataclass(frozen=True, slots=True)
class UsePolicy:
    """Go on under another policy, with a record of its own, as soon as nothing is in flight on any rank.

    spec: as in `--policy`. record: directory of the new record, "" for none.
    """

    spec: str
    record: str = ""


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Load a checkpoint of the same shape in place, as soon as nothing is in flight on any rank (see Pause).

    KV kept for idle sessions is dropped; turns that are paused keep theirs and go on under the new weights.
    """

    path: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort everything and end the ranks once nothing is in flight."""


Entry = Submit | Abort | EndSession | Flush | Pause | Resume | UsePolicy | UpdateWeights | Stop


class Inbox:
    """One rank's copy of the ordered inbox. Entries are numbered from 1; `length` of them have arrived."""

    def __init__(self) -> None:
        self.length = 0
        self._taken = 0
        self._pending: list[Entry] = []
        self._grown = asyncio.Event()
        self._failed: TurnstileError | None = None

    def fail(self, error: TurnstileError) -> None:
        """No entry will come any more: whoever waits for one, or will, gets `error`. Call on the rank's loop."""
        self._failed = error
        self._grown.set()

    def put(self, *entries: Entry) -> None:
        """Append entries. Call on the rank's loop."""
        self._pending.extend(entries)
        self.length += len(entries)
        self._grown.set()

    def take(self, upto: int) -> list[Entry]:
        """The entries numbered up to `upto` that were not taken before."""
        if upto <= self._taken:
            return []
        count = upto - self._taken
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._taken += len(taken)
        return taken

    async def beyond(self, length: int) -> None:
        """Wait until more than `length` entries have arrived. Raises what `fail` was given."""
        while self.length <= length:
            if self._failed is not None:
                raise self._failed
            self._grown.clear()
            await self._grown.wait()
