"""What must hold on every rank at every exchange, whatever the schedule. Read from the rank, never written to it.

Each rule is checked from its own data, not by the kernel's own checks: a change that breaks the kernel and its check
alike must still be seen here. Everything read belongs to the rank whose exchange it is, so nothing here orders ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.request import State
from verify.blame import Class
from verify.trial.findings import Finding, Found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

    from kernel.cache import KVCache
    from kernel.prefill import Epoch
    from kernel.rank import Rank
    from kernel.replica import Turn
    from kernel.sched.policy import RankView

RULES = {
    "kv": "a KV block has exactly one owner: it is free, kept for an idle session, or leased (section 6)",
    "lease": "submitted work touches only blocks of a lease that is still held; slots are held by one turn (section 6)",
    "permit": "P passes only boundaries that were granted, each once, in order (section 4)",
    "one dispatch": "at most one P segment and one D iteration are pending on a rank (section 5)",
    "promotion": "an epoch is promoted once all of it has finished, on all ranks (section 6)",
    "lag": "tokens are committed one round after their D iteration was launched; ended turns decode no more",
    "view": "a view says what its rank holds",
}
"""What `Finding.rule` of class invariant means."""


def broken(rank: Rank, rule: str, say: str, cls: Class = Class.INVARIANT) -> NoReturn:
    """Raise Found: an invariant does not hold on `rank`."""
    round_ = rank._plan.round
    raise Found(Finding(cls, rule, f"{say} (rank {rank.rank}, round {round_})", rank.rank, round_))


class Invariants:
    """One rank's checks. asked: boundaries that releases have granted to the newest epoch, told by `granted`."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._epoch, self._permit, self._reached = -1, 0, -1
        self._asked: dict[int, int] = {}
        self._end: tuple[int, int] = (-1, 0)

    # -- what the rank does -------------------------------------------------------------------------------------

    def released(self, epoch: int, span: int) -> None:
        """A turn lets P of `epoch` go on by `span` boundaries."""
        boundaries = self.rank._p.program.boundaries
        self._asked[epoch] = min(boundaries, self._asked.get(epoch, 0) + span)

    def segment(self, epoch: int, start: int, end: int) -> None:
        """P's segment [start, end) is about to be submitted."""
        rank = self.rank
        last = self._end[1] if self._end[0] == epoch else 0
        if start != last:
            broken(rank, "permit", f"P e{epoch} submits [{start},{end}) after boundary {last}")
        if end > self._asked.get(epoch, 0):
            granted = self._asked.get(epoch, 0)
            broken(rank, "permit", f"P e{epoch} submits [{start},{end}) with boundaries up to {granted} granted")
        if rank.turnstile.snapshot.reached < start:
            reached = rank.turnstile.snapshot.reached
            broken(rank, "one dispatch", f"P e{epoch} submits [{start},{end}) while it stands at boundary {reached}")
        self._end = epoch, end

    def data(self, epoch: int, layer: int) -> None:
        """P submits the data of a dispatch that its peers were notified of."""
        rank = self.rank
        boundary, granted = layer * rank.world.cuts + 1, self._asked.get(epoch, 0)
        if boundary >= granted:
            say = f"P e{epoch} submits data of layer {layer}, behind boundary {boundary}"
            broken(rank, "exchange", f"{say}, with boundaries up to {granted} granted", Class.RULE)

    def iteration(self) -> None:
        """This round's D iteration is about to be submitted."""
        rank = self.rank
        for turn, row in rank._rows:
            request = turn.request
            if turn.state is not State.RUNNING:
                broken(rank, "lag", f"D {rank._plan.round} decodes request {request.id}, which is {turn.state}")
            if len(turn.tokens) + turn.flying > request.params.max_tokens:
                most = request.params.max_tokens
                broken(rank, "lag", f"D {rank._plan.round} decodes request {request.id} beyond its {most} tokens")
            if row.start >= request.longest:
                broken(rank, "lease", f"D {rank._plan.round} writes position {row.start} of request {request.id}")

    def promoted(self, epoch: int) -> None:
        """The results of `epoch` are about to become decodable."""
        rank, own = self.rank, self.rank._epoch
        if own is None or own.number != epoch:
            have = f"e{own.number}" if own is not None else "none"
            broken(rank, "promotion", f"epoch {epoch} is promoted where the open one is {have}")

    # -- at an exchange -----------------------------------------------------------------------------------------

    def exchange(self, view: RankView | None) -> None:
        """All that must hold now. view: what this rank tells the others, None where it tells no view."""
        self._turnstile()
        self._flights(at_end=view is not None)
        free = self._blocks(self.rank.ports.cache)
        self._turns(self.rank.ports.cache)
        if view is not None:
            self._honest(view, free)

    def _turnstile(self) -> None:
        now, rank = self.rank.turnstile.snapshot, self.rank
        if now.epoch < self._epoch:
            broken(rank, "permit", f"epoch {now.epoch} follows epoch {self._epoch}")
        if now.epoch > self._epoch:
            self._epoch, self._permit, self._reached = now.epoch, 0, -1
            self._asked = {e: n for e, n in self._asked.items() if e >= now.epoch}
        if now.permit < self._permit or now.reached < self._reached:
            say = f"epoch {now.epoch} went from permit {self._permit}, boundary {self._reached} back to"
            broken(rank, "permit", f"{say} permit {now.permit}, boundary {now.reached}")
        if now.permit > self._asked.get(now.epoch, 0) or now.permit > now.boundaries:
            granted = self._asked.get(now.epoch, 0)
            broken(rank, "permit", f"epoch {now.epoch} has permit {now.permit} where {granted} was granted")
        if now.reached > now.permit:
            broken(rank, "permit", f"epoch {now.epoch} stands at boundary {now.reached}, permit {now.permit}")
        self._permit, self._reached = now.permit, now.reached

    def _flights(self, at_end: bool) -> None:
        rank = self.rank
        round_ = rank._plan.round
        rounds = [flight.round for flight in rank._flights]
        if rounds and rounds[0] < round_ - (not at_end):
            broken(rank, "lag", f"the tokens of D {rounds[0]} are still not committed in round {round_}")
        if len(rounds) > 1:
            broken(rank, "one dispatch", f"D {rounds[0]} and D {rounds[1]} are pending together")

    def _blocks(self, cache: KVCache) -> int:
        """Every block has one owner; how many are free or kept."""
        owned = [*cache._free]
        for kept in cache._kept.values():
            owned += kept.blocks
        free = len(owned)
        for lease in cache._leases.values():
            owned += lease.blocks
        if len(owned) != cache.blocks or set(owned) != set(range(cache.blocks)):
            self._name(cache)
        for session, kept in cache._kept.items():
            if len(kept.blocks) != -(-len(kept.tokens) // cache.block_size):
                say = f"session {session} keeps {len(kept.blocks)} blocks for {len(kept.tokens)} tokens"
                broken(self.rank, "kv", say)
        return free

    def _name(self, cache: KVCache) -> NoReturn:
        """Say which block is lost, shared or unheard of."""
        owners: dict[int, str] = {}
        for blocks, who in _holders(cache):
            for block in blocks:
                if block in owners:
                    broken(self.rank, "kv", f"KV block {block} belongs to {owners[block]} and to {who}")
                if not 0 <= block < cache.blocks:
                    broken(self.rank, "kv", f"{who} holds KV block {block} of a pool of {cache.blocks}")
                owners[block] = who
        lost = next(block for block in range(cache.blocks) if block not in owners)
        broken(self.rank, "kv", f"KV block {lost} is lost: neither free, kept nor leased")

    def _turns(self, cache: KVCache) -> None:
        rank, replica = self.rank, self.rank._replica
        slots = dict.fromkeys(replica._slots, "nobody")
        for turn in replica._turns.values():
            if turn.blocks:
                self._leased(cache, turn, f"which is {turn.state}")
                if turn.slot in slots:
                    broken(rank, "lease", f"slot {turn.slot} of request {turn.request.id} is {slots[turn.slot]}'s too")
                slots[turn.slot] = f"request {turn.request.id}"
        if len(slots) != rank.limits.rows:
            broken(rank, "lease", f"{rank.limits.rows - len(slots)} of {rank.limits.rows} slots are lost")
        for request in cache._leases:
            if request not in replica._turns:
                broken(rank, "lease", f"the lease of request {request} has outlived its turn")
        for flight in rank._flights:
            for turn in flight.turns:
                self._leased(cache, turn, f"and D {flight.round} is in flight with it")
        for turn in replica._prefill:
            self._leased(cache, turn, "and its prefill is in flight")

    def _leased(self, cache: KVCache, turn: Turn, why: str) -> None:
        request, lease = turn.request.id, cache._leases.get(turn.request.id)
        if lease is None:
            block = turn.blocks[0] if turn.blocks else -1
            broken(self.rank, "lease", f"request {request} holds no lease of KV block {block}, {why}")
        if lease.blocks != turn.blocks:
            broken(self.rank, "lease", f"request {request} uses blocks {turn.blocks} of a lease of {lease.blocks}")
        if turn.written > len(turn.blocks) * cache.block_size:
            broken(self.rank, "lease", f"request {request} has written {turn.written} tokens past its blocks")

    def _honest(self, view: RankView, free: int) -> None:
        rank = self.rank
        if view.complete and rank._epoch is not None and not _finished(rank._epoch):
            broken(rank, "promotion", f"the view tells epoch {view.epoch} complete before it has finished")
        if view.free_blocks != free:
            broken(rank, "view", f"the view tells {view.free_blocks} free KV blocks where {free} are")
        if view.slots != len(rank._replica._slots):
            broken(rank, "view", f"the view tells {view.slots} free slots where {len(rank._replica._slots)} are")
        if view.busy is not bool(rank._flights):
            broken(rank, "view", f"the view tells busy={view.busy} with {len(rank._flights)} iterations in flight")


def _holders(cache: KVCache) -> Iterator[tuple[list[int] | tuple[int, ...], str]]:
    yield cache._free, "the free list"
    for session, kept in cache._kept.items():
        yield kept.blocks, f"session {session}"
    for request, lease in cache._leases.items():
        yield lease.blocks, f"request {request}"


def _finished(epoch: Epoch) -> bool:
    # By asking `done()`, an access that the explorer counts: where nothing has waited for the end, it is a race.
    return epoch._ended and all(event.done() for event in epoch._events)
