"""Blocks have one owner, leases are respected, reuse is exact, and what fits alone is never refused for ever."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernel.cache import KVCache
from kernel.errors import LeaseExpired, UsageError

TURN = st.tuples(
    st.integers(0, 4), st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 6), st.integers(0, 20)
)
"""Session, new tokens, longest output, how much of the session's history the prompt repeats."""


class Pool(RuleBasedStateMachine):
    """Sessions take turns on a small pool; a model remembers which tokens each block holds."""

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 4))
    def start(self, blocks: int, size: int) -> None:
        self.cache = KVCache(blocks, size)
        self.running: dict[int, tuple[int, list[int]]] = {}
        self.content: dict[int, list[int]] = {}
        self.history: dict[int, list[int]] = {}
        self.next = 0

    def _write(self, request: int, tokens: list[int]) -> None:
        blocks, size = self.cache.lease(request).blocks, self.cache.block_size
        for position, token in enumerate(tokens):
            self.content.setdefault(blocks[position // size], [0] * size)[position % size] = token

    @rule(turns=st.lists(TURN, min_size=1, max_size=3, unique_by=lambda turn: turn[0]))
    def admit(self, turns: list[tuple[int, list[int], int, int]]) -> None:
        """One plan admits several turns at once, in any order."""
        wanted = []
        for session, more, longest, keep in turns:
            prompt = [*self.history.get(session, [])[:keep], *more]
            wanted.append((self.next, session, prompt, len(prompt) + longest))
            self.next += 1
        fits = sum(self.cache.need(total) for *_, total in wanted) <= self.cache.available
        if not fits or not all(self.cache.idle(session) for _, session, *_ in wanted):
            before = self.cache.available
            with pytest.raises(UsageError):
                self.cache.reserve(wanted)
            assert self.cache.available == before
            assert not any(self.cache.holds(request) for request, *_ in wanted)
            return
        expected = [self.cache.cached(session, prompt) for _, session, prompt, _ in wanted]
        leases = self.cache.reserve(wanted)
        for (request, session, prompt, total), cached, lease in zip(wanted, expected, leases, strict=True):
            assert lease.cached == cached < len(prompt)
            assert len(lease.blocks) == self.cache.need(total)
            size = self.cache.block_size
            held = [self.content[lease.blocks[i // size]][i % size] for i in range(lease.cached)]
            assert held == prompt[: lease.cached], "reused KV is of other tokens"
            self.running[request] = (session, prompt + [9] * (total - len(prompt)))
        for request, *_ in wanted:
            self._write(request, self.running[request][1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        session, tokens = self.running.pop(request)
        known = tokens[: data.draw(st.integers(0, len(tokens)))]
        self.cache.release(request, known)
        self.history[session] = tokens
        if known:
            assert self.cache.cached(session, [*known, 1]) == len(known)
        with pytest.raises(LeaseExpired):
            self.cache.release(request, known)

    @rule(session=st.integers(0, 4))
    def forget(self, session: int) -> None:
        self.cache.forget(session)
        assert self.cache.cached(session, [1, 2, 3]) == 0

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            held = sum(len(self.cache.lease(request).blocks) for request in self.running)
            assert self.cache.available == self.cache.blocks - held


TestPool = Pool.TestCase


def test_turns_admitted_together_do_not_evict_each_other() -> None:
    cache = KVCache(blocks=6, block_size=2)
    for session in range(3):
        cache.reserve([(session, session, [1, 2, 3, 4], 4)])
        cache.release(session, [1, 2, 3, 4])
    first, second = cache.reserve([(10, 1, [1, 2, 3, 4, 5], 6), (11, 2, [1, 2, 3, 4, 5], 6)])
    assert (first.cached, second.cached) == (4, 4)
    assert cache.cached(0, [1, 2, 3, 4, 5]) == 0


def test_eviction_takes_the_tail_of_the_least_recently_used_session() -> None:
    cache = KVCache(blocks=4, block_size=2)
    for session in (7, 8):
        cache.reserve([(session, session, [1, 2, 3, 4], 4)])
        cache.release(session, [1, 2, 3, 4])
    cache.reserve([(9, 9, [5, 6], 2)])
    assert cache.cached(7, [1, 2, 3, 4, 5]) == 2
    assert cache.cached(8, [1, 2, 3, 4, 5]) == 4


def test_what_a_session_keeps_too_much_serves_those_before_it() -> None:
    """Session 0 keeps two blocks and its next turn takes one: the other is free for whoever is admitted with it."""
    cache = KVCache(blocks=2, block_size=4)
    cache.reserve([(1, 0, [0, 1, 2, 3, 4], 6)])
    cache.release(1, [0, 1, 2, 3, 4])
    other, own = cache.reserve([(2, 2, [9], 2), (3, 0, [0, 1, 2], 4)])
    assert (other.cached, own.cached) == (0, 2)
    cache.check()
