"""The ordered inbox: numbered entries, taken once and in order, whatever arrives meanwhile."""

from __future__ import annotations

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kernel.inbox import Abort, Entry, Inbox


class Arrivals(RuleBasedStateMachine):
    """One rank's copy against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = Inbox()
        self.sent: list[Entry] = []
        self.taken: list[Entry] = []

    @rule(count=st.integers(0, 4))
    def put(self, count: int) -> None:
        entries = [Abort(len(self.sent) + at) for at in range(count)]
        self.inbox.put(*entries)
        self.sent += entries

    @rule(upto=st.integers(0, 40))
    def take(self, upto: int) -> None:
        got = self.inbox.take(upto)
        assert got == self.sent[len(self.taken) : max(len(self.taken), upto)]
        self.taken += got

    @invariant()
    def counts(self) -> None:
        assert self.inbox.length == len(self.sent)
        assert self.taken == self.sent[: len(self.taken)]


TestArrivals = Arrivals.TestCase


async def test_beyond_waits_for_the_next_entry_and_for_no_other() -> None:
    inbox = Inbox()
    inbox.put(Abort(1))
    await inbox.beyond(0)
    waiting = asyncio.create_task(inbox.beyond(2))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    inbox.put(Abort(2))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done(), "two entries are not beyond two"
    inbox.put(Abort(3))
    await asyncio.wait_for(waiting, 10)
