"""The rank-shared plan that all shipped policies have in common; a policy adds three small decisions and a turn.

Everything here is a pure function of views and memory, so every rank computes the same plan (paper section 3 and 6).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kernel.sched import hooks
from kernel.sched.policy import ALL, Chunk, Gate, Guarantees, Limits, Memory, Plan, RankView


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy decides on.

    ready: decodable rows of each replica, those promoted in this round included. open: an epoch is open. activating:
    one starts in this round. waiting: new tokens of the requests that the views describe, over all replicas. memory:
    from the last round.
    """

    ready: tuple[int, ...]
    open: bool
    activating: bool
    waiting: int
    memory: Memory

    @property
    def p_active(self) -> bool:
        """An epoch is open in this round."""
        return self.open or self.activating

    @property
    def rows(self) -> int:
        """Decodable rows, all replicas together."""
        return sum(self.ready)


class Planner:
    """Base of the shipped policies: admits prefill first come, first served within tokens, slots and KV blocks.

    limits: sizes fixed at start. config: the policy's own dataclass, or None.
    """

    name: ClassVar[str] = "planner"
    guarantees: ClassVar[Guarantees] = Guarantees()
    route: ClassVar[str | None] = None
    """Overrides the world's route where it is left at its default."""

    def __init__(self, limits: Limits, config: Any = None) -> None:
        self.limits, self.config = limits, config

    # -- what a policy decides ----------------------------------------------------------------------------------

    def prefill_now(self, now: Situation) -> bool:
        """Whether a new epoch may start in this round (none is open, and some request fits)."""
        return True

    def decode_now(self, now: Situation) -> bool:
        """Whether ready rows decode in this round."""
        return True

    def span(self, now: Situation) -> int:
        """Boundaries that this round's release grants."""
        return ALL

    def remember(self, now: Situation, plan: Plan) -> tuple[Any, ...]:
        """The policy's own memory for the next round."""
        return now.memory.extra

    async def turn(self, gate: Gate) -> None:
        """One round's order of entry; see `kernel.sched.policy.Policy`."""
        raise NotImplementedError(f"policy {self.name} defines no turn")

    # -- the common plan ----------------------------------------------------------------------------------------

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        """See `kernel.sched.policy.Policy.plan`."""
        leaders = views[:: len(views) // self.limits.replicas]
        inbox = min(view.inbox for view in views)
        complete = memory.open and all(view.epoch == memory.epoch and view.complete for view in views)
        still_open = memory.open and not complete
        paused, busy, waiting, seen = False, False, 0, inbox == memory.inbox
        for view in views:
            paused |= view.paused
            busy |= view.busy
            seen &= view.inbox == inbox
        ready = []
        for view in leaders:
            ready.append(view.ready + (view.promotable if complete and not view.paused else 0))
            for each in view.waiting:
                waiting += each.new_tokens
        now = Situation(tuple(ready), still_open, False, waiting, memory)
        chunks: tuple[tuple[Chunk, ...], ...] = ()
        if not still_open and not paused and self.prefill_now(now):
            chunks = tuple([self._admit(view) for view in leaders])
        activating = any(chunks)
        if activating:
            now = replace(now, activating=True)
        rows = max(ready)
        decode = now.ready if rows and self.decode_now(now) else ()
        epoch = memory.epoch + activating
        bucket = self.limits.bucket(rows) if decode else 0
        open_ = still_open or activating
        # Without a D iteration P may run to its end, unless rows are only kept back: they go on when it resumes.
        span = self._checked_span(now) if bucket or paused else ALL
        # By place, since names take twice as long in every round: the order is that of the fields.
        plan = Plan(
            memory.round, inbox, decode, bucket, epoch if activating else -1, chunks if activating else (),
            epoch if open_ else -1, span, memory.epoch if complete else -1,
            seen and not (open_ or bucket or complete or busy),
        )  # fmt: skip
        permit = 0 if activating else memory.permit
        if open_:
            permit = min(self.limits.boundaries, permit + span)
        return plan, Memory(
            memory.round + 1, inbox, epoch, open_, chunks if activating else memory.chunks, permit,
            self.remember(now, plan),
        )  # fmt: skip

    def _checked_span(self, now: Situation) -> int:
        """What `span` grants. Raises PolicyError where that is no number of boundaries."""
        granted: object = self.span(now)
        try:
            span = operator.index(granted)  # type: ignore[arg-type]
        except TypeError:
            span = 0
        if span < 1:
            what = f"returned {granted!r:.60}: it must return a whole number of boundaries, at least 1"
            raise hooks.wrong(self, "span", what, f"round {now.memory.round}")
        return span

    def _admit(self, view: RankView) -> tuple[Chunk, ...]:
        """One replica's chunks, in order of service. A request that does not fit holds back those behind it."""
        tokens, blocks, slots = self.limits.prefill_tokens, view.free_blocks, view.slots
        chunks = []
        for each in view.waiting:
            if tokens == 0 or each.blocks > blocks or (each.blocks and not slots):
                break
            fed = min(tokens, each.new_tokens)
            chunks.append(Chunk(each.request, fed, fed == each.new_tokens))
            tokens -= fed
            blocks -= each.blocks
            slots -= bool(each.blocks)
        return tuple(chunks)
