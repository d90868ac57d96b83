"""A stateful machine over the kernel: users come and go, the real ranks go on by rounds, and a model says what must be.

The model knows nothing of plans, epochs or blocks: a turn's tokens follow from its context alone, it ends once and for
a reason that somebody gave, a pool loses nothing, and when nothing moves any more, everything has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)  # fmt: skip

from kernel.cache import KVCache
from kernel.inbox import Abort, EndSession, Entry, Flush, Inbox, Pause, Resume, Stop, Submit
from kernel.journal import Journal
from kernel.rank import Ports, Rank
from kernel.record import NullRecorder
from kernel.replica import Output, Replica
from kernel.request import Request, SamplingParams
from kernel.sched import registry
from kernel.sched.policy import Limits
from verify.sim.errors import Deadlock
from verify.sim.kv import SimKV, continuation
from verify.sim.model import FREE, SimModel
from verify.sim.world import SimRank, SimWorld
from verify.strategies import params, policies, schedules, worlds

if TYPE_CHECKING:
    from kernel.sched.policy import Memory, Plan, Policy, RankView
    from kernel.topology import World
    from verify.faults import Picks

VOCAB, SIZE = 1000, 4


@dataclass
class Wanted:
    """What the model knows of a turn. may_abort: somebody asked for its end. got: its tokens; finish: its end."""

    request: Request
    may_abort: bool = False
    got: list[int] = field(default_factory=list)
    finish: str = ""

    @property
    def tokens(self) -> list[int]:
        return list(continuation(self.request.prompt, self.request.params, VOCAB))


class Counted:
    """A policy that tells when its rank begins a round."""

    def __init__(self, policy: Policy, begins: Any) -> None:
        self._policy, self._begins = policy, begins
        self.turn, self.limits = policy.turn, policy.limits
        self.name, self.guarantees, self.route = policy.name, policy.guarantees, getattr(policy, "route", None)

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        plan, after = self._policy.plan(views, memory)
        self._begins(plan)
        return plan, after


class KernelMachine(RuleBasedStateMachine):
    """The real ranks on one simulated world."""

    @initialize(
        world=worlds(1, 4), policy=policies(), schedule=schedules(), segments=st.integers(1, 3),
        fed=st.integers(1, 8), rows=st.integers(1, 3), blocks=st.integers(3, 10),
    )  # fmt: skip
    def start(
        self, world: World, policy: str, schedule: Picks, segments: int, fed: int, rows: int, blocks: int
    ) -> None:
        self.world, self.blocks, self.rows = world, blocks, rows
        self.sim = SimWorld(world, choose=schedule.choose(), log=False, livelock=50_000)
        self.wanted: dict[int, Wanted] = {}
        self.paused = False
        self.left = 0
        self.plans: list[Plan] = []
        self.inboxes = [Inbox() for _ in self.sim.ranks]
        limits = Limits(world.size, world.adp, segments, fed, rows, granule=world.atp)
        self.models = [SimModel(world, each.device, segments, FREE, SimKV(SIZE), VOCAB) for each in self.sim.ranks]
        self.ranks = [self._rank(each, policy, limits) for each in self.sim.ranks]
        self.seen = [(-1, 0, -1)] * world.size
        for ports, rank in zip(self.sim.ranks, self.ranks, strict=True):
            task = ports.loop.create_task(rank.run(), name="main")
            task.add_done_callback(self.sim._ended)
            self.sim._mains.append(task)
        self.sim._unfinished = world.size
        self.settle()

    def _rank(self, sim: SimRank, spec: str, limits: Limits) -> Rank:
        ports = Ports(
            sim.device, sim.rendezvous, self.models[sim.rank], KVCache(self.blocks, SIZE), self.inboxes[sim.rank],
            Journal(NullRecorder()), self.emit, cast("Any", None),
        )  # fmt: skip
        policy = Counted(registry.create(spec, limits), partial(self.begins, sim.rank))
        return Rank(sim.rank, self.world, limits, cast("Any", policy), ports)

    # -- what the kernel tells --------------------------------------------------------------------------------------

    def begins(self, rank: int, plan: Plan) -> None:
        if rank == 0:
            self.plans.append(plan)
            self.left -= 1
            if self.left == 0:
                self.sim.scheduler.stop()
        elif plan.round < len(self.plans):
            assert plan == self.plans[plan.round], f"rank {rank} plans otherwise than rank 0"

    def emit(self, output: Output) -> None:
        turn = self.wanted[output.request]
        assert not turn.finish, f"request {output.request} goes on after its end: {output}"
        turn.finish = output.finish
        if output.token >= 0:
            turn.got.append(output.token)
            assert turn.got == turn.tokens[: len(turn.got)], f"request {output.request} drew {turn.got}"
        assert 0 <= output.cached < len(turn.request.prompt)
        others = [each for each in self.wanted.values() if each.request.session == turn.request.session]
        assert not output.cached or len(others) > 1, "nobody has been there whose KV could be used again"
        if output.finish == "abort":
            assert turn.may_abort, f"nobody asked for the end of request {output.request}"
        elif output.finish:
            assert turn.got == turn.tokens, f"request {output.request} ended early: {output}"
            stopped = turn.got[-1] in turn.request.params.stop_token_ids
            assert output.finish == ("stop" if stopped else "length")

    # -- what users do ----------------------------------------------------------------------------------------------

    def send(self, entry: Entry) -> None:
        for ports, inbox in zip(self.sim.ranks, self.inboxes, strict=True):
            ports.loop.call_soon(inbox.put, entry)

    @rule(length=st.integers(1, 12), sampling=params(6), replica=st.integers(0, 3), stops=st.booleans())
    def submit(self, length: int, sampling: SamplingParams, replica: int, stops: bool) -> None:
        number = len(self.wanted)
        prompt = tuple((7 * number + each) % VOCAB for each in range(length))
        self._submit(number, number, replica % self.world.adp, prompt, sampling, stops)

    @precondition(lambda self: any(turn.finish for turn in self.wanted.values()))
    @rule(data=st.data(), more=st.integers(1, 4), sampling=params(4), stops=st.booleans())
    def go_on(self, data: st.DataObject, more: int, sampling: SamplingParams, stops: bool) -> None:
        before = data.draw(st.sampled_from([turn for turn in self.wanted.values() if turn.finish]))
        request = before.request
        prompt = (*request.prompt, *before.got, *range(more))
        self._submit(len(self.wanted), request.session, request.replica, prompt, sampling, stops)

    def _submit(
        self, number: int, session: int, replica: int, prompt: tuple[int, ...], sampling: SamplingParams, stops: bool
    ) -> None:
        if stops:
            third = list(continuation(prompt, sampling, VOCAB))[:3][-1]
            sampling = SamplingParams(sampling.max_tokens, sampling.temperature, stop_token_ids=(third,),
                                      seed=sampling.seed, ignore_eos=True)  # fmt: skip
        request = Request(number, session, replica, prompt, sampling)
        if request.longest <= self.blocks * SIZE:
            self.wanted[number] = Wanted(request)
            self.send(Submit(request))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(list(self.wanted.values())))
        turn.may_abort = True
        self.send(Abort(turn.request.id))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([turn.request.session for turn in self.wanted.values()]))
        for turn in self.wanted.values():
            turn.may_abort |= turn.request.session == session
        self.send(EndSession(session))

    @rule()
    def flush(self) -> None:
        self.send(Flush())

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        self.send(Pause() if self.paused else Resume())

    # -- time goes on -----------------------------------------------------------------------------------------------

    @rule(rounds=st.integers(1, 6))
    def step(self, rounds: int) -> None:
        self.left = rounds
        self._run()

    @rule()
    def settle(self) -> None:
        """Until nothing moves: then whoever is not held back by a pause has ended."""
        self.left = -1
        self._run()
        assert self.plans[-1].idle
        assert not self.sim.hall.open, "ranks wait for each other for ever"
        assert not any(each.device.busy for each in self.sim.ranks)
        waiting = [number for number, turn in self.wanted.items() if not turn.finish]
        assert self.paused or not waiting, f"requests {waiting} wait for ever"
        assert not any(self.wanted[number].may_abort for number in waiting), "a pause does not hold back an abort"
        for rank in self.ranks:
            live = [turn for turn in self.wanted.values() if not turn.finish]
            held = sum(-(-turn.request.longest // SIZE) for turn in live)
            assert rank.ports.cache.available >= self.blocks - held
            if not live:
                assert rank.ports.cache.available == self.blocks
                assert rank._replica.free_slots == self.rows
        hashes = {rank._replica.index: rank._replica.tokens_hash for rank in self.ranks}
        assert all(rank._replica.tokens_hash == hashes[rank._replica.index] for rank in self.ranks)

    def _run(self) -> None:
        before = len(self.plans)
        try:
            self.sim.scheduler.run()
        except Deadlock:
            assert self.plans[-1].idle, "the ranks are stuck"
        assert len(self.plans) - before < 2000, "rounds without end"

    # -- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def no_block_is_lost_or_shared(self) -> None:
        for rank in getattr(self, "ranks", ()):
            cache = rank.ports.cache
            kept = [block for each in cache._kept.values() for block in each.blocks]
            leased = [block for each in cache._leases.values() for block in each.blocks]
            assert sorted([*cache._free, *kept, *leased]) == list(range(self.blocks))
            assert cache.available == self.blocks - len(leased)
            for lease in cache._leases.values():
                request = self.wanted[lease.request].request
                assert len(lease.blocks) == -(-request.longest // SIZE), "a lease is of the longest output"
                assert self.world.replica(rank.rank) == request.replica

    @invariant()
    def permits_only_grow(self) -> None:
        for rank in getattr(self, "ranks", ()):
            now = rank.turnstile.snapshot
            assert now.reached <= now.permit <= now.boundaries
            assert (now.epoch, now.permit, now.reached) >= self.seen[rank.rank]
            self.seen[rank.rank] = now.epoch, now.permit, now.reached

    @invariant()
    def no_more_decodes_than_there_are_rows(self) -> None:
        for rank in getattr(self, "ranks", ()):
            assert len(rank._flights) <= 2, "one iteration in flight, and the one whose tokens are due"
            assert all(len(flight.turns) <= self.rows for flight in rank._flights)

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        try:
            if self.paused:
                self.pause_or_resume()
            self.settle()
            self.send(Stop())
            self.sim.scheduler.run()
            assert self.sim._unfinished == 0, "a rank did not stop"
        finally:
            self.sim._close()
            for model in self.models:
                model.close()


TestKernelMachine = KernelMachine.TestCase
TestKernelMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def leaky(self: KVCache, request: int, tokens: Any) -> None:
    release(self, request, tokens)
    if self._free:
        self._free.pop()


def deaf(self: Replica, request: int) -> None:
    """Nobody is ever aborted."""


def forgetful(self: Replica, turns: Any, sampled: Any) -> None:
    harvest(self, turns[:-1] if len(turns) > 1 else turns, sampled[:-1] if len(turns) > 1 else sampled)


release, harvest = KVCache.release, Replica.harvest


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "say"),
    [
        (KVCache, "release", leaky, ""),
        pytest.param(Replica, "harvest", forgetful, "", marks=pytest.mark.slow),
        pytest.param(Replica, "abort", deaf, "a pause does not hold back an abort", marks=pytest.mark.slow),
    ],
    ids=["a block is lost", "a token is lost", "aborts are ignored"],
)
def test_the_machine_finds_faults_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: Any, say: str
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    quick = settings(max_examples=200, database=None, deadline=None, phases=[Phase.generate])
    with pytest.raises((Exception, ExceptionGroup), match=say or None):  # whoever notices first
        run_state_machine_as_test(KernelMachine, settings=quick)
