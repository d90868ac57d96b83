"""Every single check of the invariants and of the plan, by a state that breaks it and nothing else."""

# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kernel.cache import Kept, KVCache
from kernel.replica import Replica, Turn
from kernel.request import Request, SamplingParams, State
from kernel.sched.policy import Memory, Plan, RankView
from kernel.turnstile import Snapshot, Status
from verify.blame import Class
from verify.trial.findings import Found
from verify.trial.invariants import RULES, Invariants
from verify.trial.monitor import RankMonitor

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS, SIZE, ROWS, BOUNDARIES, ROUND = 4, 4, 3, 3, 5
VIEW = RankView(rank=0, round=ROUND + 1, slots=ROWS - 1, free_blocks=BLOCKS - 2, complete=True)


class Held:
    """A rank in round 5, with one turn that decodes: two blocks, slot 0, and nothing in flight."""

    def __init__(self) -> None:
        self.cache = KVCache(BLOCKS, SIZE)
        self.replica = Replica(0, 0, ROWS, self.cache, lambda output: None)
        self.turn = self.add(7, 3)
        self.rank: Any = SimpleNamespace(
            rank=0, limits=SimpleNamespace(rows=ROWS), ports=SimpleNamespace(cache=self.cache), _replica=self.replica,
            _flights=deque(), _rows=[], _plan=Plan(round=ROUND), _epoch=None,
            _p=SimpleNamespace(program=SimpleNamespace(boundaries=BOUNDARIES)),
        )  # fmt: skip
        self.stands(-1, -1, 0, 0, Status.NONE)
        self.invariants = Invariants(cast("Any", self.rank))

    def add(self, number: int, output: int) -> Turn:
        request = Request(number, number, 0, (1, 2, 3), SamplingParams(max_tokens=output))
        (lease,) = self.cache.reserve([(number, number, request.prompt, request.longest)])
        turn = Turn(request, State.RUNNING, self.replica._slots.pop(), lease.blocks, written=3)
        self.replica._turns[number] = turn
        self.replica._running.append(turn)
        return turn

    def stands(
        self, epoch: int, reached: int, permit: int, boundaries: int = BOUNDARIES, status: Status = Status.OPEN
    ) -> None:
        self.rank.turnstile = SimpleNamespace(snapshot=Snapshot(epoch, reached, permit, boundaries, status))

    def open(self, reached: int, permit: int, asked: int, epoch: int = 0) -> None:
        """An epoch that has come so far, as the last exchange saw it."""
        self.invariants.released(epoch, asked)
        self.stands(epoch, reached, permit)
        self.invariants.exchange(VIEW)

    def flies(self, *rounds: int) -> None:
        self.rank._flights = deque(SimpleNamespace(round=round_, turns=[self.turn]) for round_ in rounds)

    def decodes(self, start: int = 3) -> None:
        self.rank._rows = [(self.turn, SimpleNamespace(start=start))]

    def epoch(self, *done: bool, ended: bool = True) -> None:
        events = [SimpleNamespace(done=lambda each=each: each) for each in done]
        self.rank._epoch = SimpleNamespace(number=3, _ended=ended, _events=events)


def tells(held: Held, **changes: Any) -> None:
    held.invariants.exchange(replace(VIEW, **changes))


BREAKS: dict[str, tuple[str, str, Callable[[Held], object]]] = {
    "a segment out of order": (
        "permit", "P e0 submits [1,2) after boundary 0",
        lambda h: (h.invariants.released(0, 2), h.invariants.segment(0, 1, 2)),
    ),
    "a segment without a permit": (
        "permit", "P e0 submits [0,2) with boundaries up to 1 granted",
        lambda h: (h.invariants.released(0, 1), h.invariants.segment(0, 0, 2)),
    ),
    "a segment before the last one stands": (
        "one dispatch", "P e0 submits [1,2) while it stands at boundary 0",
        lambda h: (h.open(0, 1, 2), h.invariants.segment(0, 0, 1), h.invariants.segment(0, 1, 2)),
    ),
    "a decode of an ended turn": (
        "lag", "D 5 decodes request 7, which is finished",
        lambda h: (h.decodes(), setattr(h.turn, "state", State.FINISHED), h.invariants.iteration()),
    ),
    "a decode beyond the output": (
        "lag", "D 5 decodes request 7 beyond its 3 tokens",
        lambda h: (h.decodes(), h.turn.tokens.extend([1, 2]), setattr(h.turn, "flying", 2), h.invariants.iteration()),
    ),
    "a decode beyond the reservation": (
        "lease", "D 5 writes position 6 of request 7", lambda h: (h.decodes(6), h.invariants.iteration())
    ),
    "a promotion of nothing": (
        "promotion", "epoch 3 is promoted where the open one is none", lambda h: h.invariants.promoted(3)
    ),
    "a promotion of another epoch": (
        "promotion", "epoch 2 is promoted where the open one is e3", lambda h: (h.epoch(), h.invariants.promoted(2))
    ),
    "an epoch before the last one": (
        "permit", "epoch 0 follows epoch 1", lambda h: (h.open(0, 1, 1, 1), h.stands(0, 0, 1), tells(h))
    ),
    "a permit that goes back": (
        "permit", "epoch 0 went from permit 2, boundary 1 back to permit 1, boundary 1",
        lambda h: (h.open(1, 2, 2), h.stands(0, 1, 1), tells(h)),
    ),
    "a boundary that goes back": (
        "permit", "epoch 0 went from permit 2, boundary 1 back to permit 2, boundary 0",
        lambda h: (h.open(1, 2, 2), h.stands(0, 0, 2), tells(h)),
    ),
    "a permit that nobody gave": (
        "permit", "epoch 0 has permit 2 where 1 was granted", lambda h: (h.open(0, 1, 1), h.stands(0, 0, 2), tells(h))
    ),
    "a permit past the end": (
        "permit", "epoch 0 has permit 3 where 3 was granted",
        lambda h: (h.invariants.released(0, 3), h.stands(0, 0, 3, 2), tells(h)),
    ),
    "a boundary past the permit": (
        "permit", "epoch 0 stands at boundary 2, permit 1", lambda h: (h.open(0, 1, 1), h.stands(0, 2, 1), tells(h))
    ),
    "tokens committed too late": (
        "lag", "the tokens of D 4 are still not committed in round 5", lambda h: (h.flies(4), tells(h, busy=True))
    ),
    "tokens of two rounds ago in pre-d": (
        "lag", "the tokens of D 3 are still not committed in round 5",
        lambda h: (h.flies(3), h.invariants.exchange(None)),
    ),
    "two iterations in flight": (
        "one dispatch", "D 5 and D 6 are pending together", lambda h: (h.flies(5, 6), tells(h, busy=True))
    ),
    "a lost block": ("kv", "is lost: neither free, kept nor leased", lambda h: (h.cache._free.pop(), tells(h))),
    "a block too many": (
        "kv", "belongs to the free list and to request 7",
        lambda h: (h.cache._free.append(h.turn.blocks[0]), tells(h)),
    ),
    "a block for another": (
        "kv", "belongs to the free list and to request 7",
        lambda h: (h.cache._free.__setitem__(0, h.turn.blocks[0]), tells(h)),
    ),
    "a block from nowhere": (
        "kv", "the free list holds KV block 99 of a pool of 4", lambda h: (h.cache._free.__setitem__(0, 99), tells(h))
    ),
    "a kept block of two sessions": (
        "kv", "belongs to session 4 and to session 5",
        lambda h: (h.cache._kept.update({4: Kept([1], [h.cache._free[0]], 1), 5: Kept([1], [h.cache._free.pop(0)], 2)}),
                   tells(h)),
    ),
    "kept blocks without tokens": (
        "kv", "session 4 keeps 1 blocks for 5 tokens",
        lambda h: (h.cache._kept.update({4: Kept([1] * 5, [h.cache._free.pop()], 1)}), tells(h)),
    ),
    "no lease": (
        "lease", "request 7 holds no lease of KV block",
        lambda h: (h.cache._leases.pop(7), h.cache._free.extend(h.turn.blocks), tells(h, free_blocks=4)),
    ),
    "blocks of another lease": (
        "lease", "of a lease of", lambda h: (setattr(h.turn, "blocks", h.turn.blocks[::-1]), tells(h))
    ),
    "writing past the blocks": (
        "lease", "request 7 has written 9 tokens past its blocks", lambda h: (setattr(h.turn, "written", 9), tells(h))
    ),
    "a slot that is free too": (
        "lease", "of request 7 is nobody's too", lambda h: (h.replica._slots.append(h.turn.slot), tells(h))
    ),
    "a slot of two turns": (
        "lease", "of request 8 is request 7's too",
        lambda h: (setattr(h.add(8, 3), "slot", h.turn.slot), tells(h, free_blocks=0, slots=1)),
    ),
    "a lost slot": ("lease", "1 of 3 slots are lost", lambda h: (h.replica._slots.pop(), tells(h, slots=1))),
    "a lease without its turn": (
        "lease", "the lease of request 7 has outlived its turn",
        lambda h: (h.replica._turns.clear(), h.replica._slots.append(h.turn.slot), tells(h, slots=3)),
    ),
    "an iteration in flight without a lease": (
        "lease", "and D 5 is in flight with it",
        lambda h: (h.flies(5), h.replica._turns.clear(), h.cache._leases.clear(), h.cache._free.extend(h.turn.blocks),
                   h.replica._slots.append(h.turn.slot), tells(h, busy=True, slots=3, free_blocks=4)),
    ),
    "a prefill in flight without a lease": (
        "lease", "and its prefill is in flight",
        lambda h: (h.replica._prefill.append(h.turn), h.replica._turns.clear(), h.cache._leases.clear(),
                   h.cache._free.extend(h.turn.blocks), h.replica._slots.append(h.turn.slot),
                   tells(h, slots=3, free_blocks=4)),
    ),
    "complete with a segment to come": (
        "promotion", "complete before it has finished", lambda h: (h.epoch(True, ended=False), tells(h))
    ),
    "complete with work on the device": (
        "promotion", "complete before it has finished", lambda h: (h.epoch(True, False), tells(h))
    ),
    "another number of free blocks": (
        "view", "the view tells 1 free KV blocks where 2 are", lambda h: tells(h, free_blocks=1)
    ),
    "another number of slots": ("view", "the view tells 1 free slots where 2 are", lambda h: tells(h, slots=1)),
    "busy with nothing": ("view", "the view tells busy=True with 0 iterations", lambda h: tells(h, busy=True)),
    "idle with something": (
        "view", "the view tells busy=False with 1 iterations", lambda h: (h.flies(5), tells(h, busy=False))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_an_invariant_is_found(name: str) -> None:
    rule, say, breaks = BREAKS[name]
    with pytest.raises(Found) as caught:
        breaks(Held())
    finding = caught.value.finding
    assert (finding.cls, finding.rule, finding.rank, finding.round) == (Class.INVARIANT, rule, 0, ROUND)
    assert say in finding.say
    assert finding.say.endswith("(rank 0, round 5)")


def test_every_invariant_is_broken_by_something() -> None:
    assert {rule for rule, _, _ in BREAKS.values()} == set(RULES)


def test_what_is_right_is_not_found() -> None:
    """The neighbours of what is found above."""
    held = Held()
    tells(held)
    held.open(0, 1, 1)
    held.invariants.segment(0, 0, 1)
    held.stands(0, 1, 2)
    held.invariants.released(0, 1)
    held.invariants.segment(0, 1, 2)
    tells(held)
    held.invariants.released(0, 9)
    held.stands(0, 3, 3)
    tells(held)
    held.open(0, 1, 1, epoch=1)
    held.invariants.segment(1, 0, 1)
    held.decodes(5)
    held.turn.tokens.append(1)
    held.turn.flying = 2
    held.invariants.iteration()
    held.flies(4)
    held.invariants.exchange(None)
    held.flies(5)
    tells(held, busy=True)
    held.epoch(True, True)
    held.invariants.promoted(3)
    tells(held, busy=True)
    held.epoch(False)
    tells(held, busy=True, complete=False)
    held.turn.written = 8
    tells(held, busy=True, complete=False)


# -- the plan ---------------------------------------------------------------------------------------------------

BEFORE = Memory(round=ROUND, inbox=2, epoch=3, open=True)
AFTER = Memory(round=ROUND + 1, inbox=3, epoch=3, open=True)
PLANNED = Plan(round=ROUND, inbox=3, bucket=1, decode=(1,), epoch=3)
TOLD = tuple(RankView(rank, ROUND, inbox=3, epoch=3, complete=True) for rank in range(2))

PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "another round": ("round", {"round": 4}, {"round": 5}, {}),
    "another round next": ("round", {}, {"round": 7}, {}),
    "entries taken back": ("inbox", {"inbox": 1}, {"inbox": 1}, {}),
    "entries that one rank has not": ("inbox", {"inbox": 4}, {"inbox": 4}, {}),
    "another number of entries kept": ("inbox", {}, {"inbox": 2}, {}),
    "promotion of another epoch": ("promotion", {"promote": 2}, {}, {}),
    "promotion before a rank has finished": ("promotion", {"promote": 3}, {}, {"complete": False}),
    "a second epoch": ("one epoch", {"activate": 4}, {}, {}),
    "idle with D": ("idle", {"idle": True, "epoch": -1}, {}, {}),
    "idle with P": ("idle", {"idle": True, "bucket": 0}, {}, {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_no_rank_can_follow_is_found(name: str) -> None:
    rule, plan, after, view = PLANS[name]
    monitor = RankMonitor(0, None)
    views = (TOLD[0], replace(TOLD[1], **view))
    with pytest.raises(Found) as caught:
        monitor.planned(views, BEFORE, replace(PLANNED, **plan), replace(AFTER, **after))
    assert (caught.value.finding.cls, caught.value.finding.rule) == (Class.RULE, rule)


def test_plans_that_ranks_can_follow_are_not_found() -> None:
    monitor = RankMonitor(0, None)
    monitor.planned(TOLD, BEFORE, PLANNED, AFTER)
    monitor.planned(TOLD, BEFORE, replace(PLANNED, promote=3, activate=4), AFTER)
    monitor.planned(TOLD, replace(BEFORE, open=False), replace(PLANNED, activate=4), AFTER)
    monitor.planned(TOLD, BEFORE, replace(PLANNED, inbox=2), replace(AFTER, inbox=2))
    monitor.planned(TOLD, BEFORE, replace(PLANNED, idle=True, bucket=0, epoch=-1), AFTER)
    assert monitor.findings == []


@pytest.mark.parametrize(
    "moves",
    [{"idle": True, "bucket": 0, "epoch": -1}, {"activate": 4, "promote": 3}, {"promote": 3}, {"inbox": 3}, None],
    ids=lambda moves: "nothing" if moves is None else next(iter(moves)),
)
def test_only_rounds_in_which_nothing_moves_count(moves: dict[str, Any] | None) -> None:
    monitor = RankMonitor(0, None, patience=2)
    still, kept = replace(PLANNED, inbox=2), replace(AFTER, inbox=2)

    def rounds() -> None:
        for _ in range(4):
            plan = replace(still, **(moves or {}))
            monitor.planned(TOLD, BEFORE, plan, replace(kept, inbox=plan.inbox))

    if moves is None:
        with pytest.raises(Found, match="rounds without progress") as caught:
            rounds()
        assert caught.value.finding.cls is Class.STARVATION
    else:
        rounds()


def test_launches_and_permits_are_progress_and_an_endless_run_is_not() -> None:
    monitor = RankMonitor(0, None, patience=1, longest=6)
    still, kept = replace(PLANNED, inbox=2), replace(AFTER, inbox=2)
    for number in range(6):
        monitor.planned(TOLD, BEFORE, still, kept)
        if number % 2:
            monitor.granted(3, 1)
        else:
            monitor.launches()
    with pytest.raises(Found, match="7 rounds: "):
        monitor.planned(TOLD, BEFORE, still, kept)
