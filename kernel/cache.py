"""Paged KV blocks of one replica: reservations (leases), prefix reuse across turns, eviction. Pure; paper section 6.

A turn reserves all its blocks at once, for its prompt and its longest output, or waits; so a running turn never needs
another block and nothing running is ever evicted. Between turns a session keeps the blocks of the tokens whose KV they
hold. Kept blocks are dropped from the tail, least recently used session first, when a reservation needs them. A block
belongs to at most one session, so reuse is by token, not by whole block.

Every operation is a function of the plan and of committed tokens, so the attention-TP peers of a replica stay alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel.errors import LeaseExpired, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(slots=True)
class Kept:
    """What an idle session still holds: `tokens[i]`'s KV is in `blocks[i // block_size]`."""

    tokens: list[int]
    blocks: list[int]
    used: int


@dataclass(slots=True)
class Lease:
    """A running turn's blocks. cached: prompt tokens whose KV was there already."""

    request: int
    session: int
    blocks: tuple[int, ...]
    cached: int


class KVCache:
    """The block pool of one replica.

    blocks: number of blocks. block_size: tokens a block. Raises UsageError for sizes below 1.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise UsageError(f"a KV pool of {blocks} blocks of {block_size} tokens: both must be at least 1")
        self.blocks, self.block_size = blocks, block_size
        self._free = list(range(blocks - 1, -1, -1))
        self._kept: dict[int, Kept] = {}
        self._leases: dict[int, Lease] = {}
        self._busy: dict[int, int] = {}
        self._clock = 0
        self._reusable = 0

    # -- what a view reports ------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that a reservation can have: free ones and those kept for idle sessions."""
        return len(self._free) + self._reusable

    def need(self, tokens: int) -> int:
        """Blocks that a context of `tokens` takes."""
        return -(-tokens // self.block_size)

    def fits(self, tokens: int) -> bool:
        """Whether a context of `tokens` fits the pool when it is alone."""
        return self.need(tokens) <= self.blocks

    def idle(self, session: int) -> bool:
        """Whether no lease of the session is held, so that its next turn may reserve."""
        return session not in self._busy

    def cached(self, session: int, prompt: Sequence[int]) -> int:
        """Leading prompt tokens whose KV the session keeps; at most all but one, since one must be fed."""
        kept = self._kept.get(session)
        if kept is None:
            return 0
        limit = min(len(kept.tokens), len(prompt) - 1)
        head = kept.tokens[:limit]
        if head == list(prompt[:limit]):
            return limit
        return next(i for i, (ours, theirs) in enumerate(zip(head, prompt, strict=False)) if ours != theirs)

    # -- leases -------------------------------------------------------------------------------------------------

    def reserve(self, wanted: Sequence[tuple[int, int, Sequence[int], int]]) -> list[Lease]:
        """Reserve for several turns at once: (request, session, prompt, longest context) each.

        All of them keep their own prefix: eviction takes from other sessions only. Raises UsageError, with nothing
        changed, when the blocks do not suffice, or a session or request already holds a lease.
        """
        sessions = [session for _, session, _, _ in wanted]
        total = sum(self.need(longest) for _, _, _, longest in wanted)
        if total > self.available:
            raise UsageError(f"{total} KV blocks reserved, {self.available} available: admit fewer turns")
        if len(set(sessions)) != len(sessions) or any(not self.idle(session) for session in sessions):
            raise UsageError(f"sessions {sessions}: one turn of a session at a time can hold KV")
        if any(request in self._leases for request, *_ in wanted):
            raise UsageError("a request reserves once; its lease is still held")
        # What a session keeps beyond its next context serves the others, whatever their order: it is free before any
        # of them is served.
        held = [self._claim(session, prompt, self.need(longest)) for _, session, prompt, longest in wanted]
        self._evict(total - sum(len(blocks) for blocks, _ in held) - len(self._free))
        leases = []
        for (request, session, _, longest), (own, matched) in zip(wanted, held, strict=True):
            blocks = (*own, *(self._free.pop() for _ in range(self.need(longest) - len(own))))
            lease = Lease(request, session, blocks, matched)
            self._leases[request] = lease
            self._busy[session] = request
            leases.append(lease)
        return leases

    def lease(self, request: int) -> Lease:
        """The lease that `request` holds. Raises LeaseExpired (its blocks may belong to another turn by now)."""
        lease = self._leases.get(request)
        if lease is None:
            raise LeaseExpired(f"request {request} holds no KV lease any more: its result is of an earlier life")
        return lease

    def holds(self, request: int) -> bool:
        """Whether `request` holds a lease."""
        return request in self._leases

    def release(self, request: int, tokens: Iterable[int]) -> None:
        """End a lease; the session keeps the blocks of `tokens`, the leading ones whose KV is written.

        Call only when no submitted work can write the blocks any more. Raises LeaseExpired.
        """
        lease = self.lease(request)
        del self._leases[request], self._busy[lease.session]
        kept = list(tokens)
        keep = self.need(len(kept))
        self._free.extend(reversed(lease.blocks[keep:]))
        if kept:
            self._clock += 1
            self._kept[lease.session] = Kept(kept, list(lease.blocks[:keep]), self._clock)
            self._reusable += keep

    def forget(self, session: int) -> None:
        """Drop what an idle session keeps. Nothing for an unknown one."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._free.extend(reversed(kept.blocks))
            self._reusable -= len(kept.blocks)

    def flush(self) -> None:
        """Drop what all idle sessions keep."""
        for session in list(self._kept):
            self.forget(session)

    def check(self) -> None:
        """Raise AssertionError unless every block has exactly one owner."""
        owned = [*self._free]
        for kept in self._kept.values():
            owned += kept.blocks
            assert len(kept.blocks) == self.need(len(kept.tokens)), kept
        for lease in self._leases.values():
            owned += lease.blocks
        assert sorted(owned) == list(range(self.blocks)), "a KV block is lost or shared"
        assert self._reusable == sum(len(kept.blocks) for kept in self._kept.values())
        assert sorted(self._busy.values()) == sorted(self._leases)

    # -- inside -------------------------------------------------------------------------------------------------

    def _claim(self, session: int, prompt: Sequence[int], need: int) -> tuple[list[int], int]:
        """Take at most `need` blocks that a session keeps, and how many prompt tokens they hold; the rest is free."""
        matched = self.cached(session, prompt)
        kept = self._kept.pop(session, None)
        if kept is None:
            return [], 0
        self._reusable -= len(kept.blocks)
        self._free.extend(reversed(kept.blocks[need:]))
        return kept.blocks[:need], matched

    def _evict(self, blocks: int) -> None:
        """Free at least `blocks` kept blocks, from the tail of the least recently used sessions."""
        for session, kept in sorted(self._kept.items(), key=lambda item: item[1].used):
            if blocks <= 0:
                return
            drop = min(blocks, len(kept.blocks))
            for _ in range(drop):
                self._free.append(kept.blocks.pop())
            blocks -= drop
            self._reusable -= drop
            del kept.tokens[len(kept.blocks) * self.block_size :]
            if not kept.blocks:
                del self._kept[session]
