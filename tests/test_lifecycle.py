"""Planner, replica and cache together, without an event loop: random trajectories on small pools.

Everything that the rank does with them is done here by hand, on two attention-TP peers a replica: with a pool of 1.2
times the largest trajectory every turn ends, nothing leaks, and the peers stay alike, whatever is aborted when.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.cache import KVCache
from kernel.replica import Output, Replica
from kernel.request import Request, Sampled, SamplingParams
from kernel.sched import registry
from kernel.sched.policy import Limits, Memory, Plan, RankView
from kernel.views import check_peers, decode, encode

BLOCK = 4
POLICIES = ("normal", "global_complete", "global_enqueue", "fine", "fine:span=3", "lean", "adaptive", "unordered")


@dataclass
class Peer:
    """One rank's pure state, advanced as `kernel.rank.Rank` would."""

    rank: int
    replica: Replica
    outputs: list[Output]
    epoch_rows: list[Any] = field(default_factory=list)
    epoch: int = -1
    open: bool = False
    seen: bool = False
    left: int = 0
    flights: deque[tuple[int, list[Any]]] = field(default_factory=deque)


def _token(request_slot: int, position: int) -> Sampled:
    return Sampled((request_slot * 7 + position * 13) % 50, -1.0)


class Cluster:
    """Replicas of two peers each under one policy."""

    def __init__(self, spec: str, replicas: int, blocks: int, rows: int, tokens: int) -> None:
        self.limits = Limits(2 * replicas, replicas, 3, tokens, rows, granule=2)
        self.policy = registry.create(spec, self.limits)
        self.memory = Memory()
        self.peers = []
        for rank in range(2 * replicas):
            outputs: list[Output] = []
            replica = Replica(rank, rank // 2, rows, KVCache(blocks, BLOCK), outputs.append)
            self.peers.append(Peer(rank, replica, outputs))
        self.plan = Plan(round=-1)
        self.rng = random.Random(0)

    def views(self) -> tuple[RankView, ...]:
        found = []
        for peer in self.peers:
            # Peers may see the end of an epoch at different times; the plan must not depend on who saw it first.
            peer.seen = peer.seen or (peer.left <= 0 and self.rng.random() < 0.7)
            complete = not peer.open or peer.seen
            sampled = [_token(r.slot, r.start + r.fed) if r.sample else None for r in peer.epoch_rows]
            view = RankView(
                rank=peer.rank,
                round=self.plan.round + 1,
                ready=len(peer.replica.ready()),
                promotable=peer.replica.promotable(sampled) if peer.open and complete else 0,
                slots=peer.replica.free_slots,
                free_blocks=peer.replica.cache.available,
                waiting=peer.replica.waiting(),
                queued=peer.replica.queued,
                epoch=peer.epoch,
                complete=complete,
                tokens=peer.replica.tokens_hash,
                busy=bool(peer.flights),
                paused=peer.replica.paused,
            )
            again, _, _ = decode(encode(view, 1, 2))
            assert again == view
            found.append(view)
        check_peers(found, 2)
        return tuple(found)

    def round(self) -> Plan:
        plan, self.memory = self.policy.plan(self.views(), self.memory)
        again, _ = self.policy.plan(self.views(), self.memory)
        assert again.round == plan.round + 1
        for peer in self.peers:
            mine = peer.replica.index
            if plan.promote >= 0:
                sampled = [_token(r.slot, r.start + r.fed) if r.sample else None for r in peer.epoch_rows]
                peer.replica.promote(sampled)
                peer.open, peer.epoch_rows = False, []
            if plan.activate >= 0:
                peer.epoch_rows = peer.replica.begin(plan.prefill[mine], plan.round)
                peer.epoch, peer.open, peer.seen, peer.left = plan.activate, True, False, 2
                assert sum(row.fed for row in peer.epoch_rows) <= self.limits.prefill_tokens
            peer.left -= 1
            if plan.bucket:
                assert plan.bucket >= plan.decode[mine]
                assert plan.bucket % 2 == 0
                peer.flights.append((plan.round, peer.replica.launch(plan.round, plan.decode[mine])))
        self.plan = plan
        return plan

    def end(self) -> None:
        for peer in self.peers:
            while peer.flights and peer.flights[0][0] <= self.plan.round - 1:
                _, rows = peer.flights.popleft()
                sampled = [_token(row.slot, row.start + 1) for _, row in rows]
                peer.replica.harvest([turn for turn, _ in rows], sampled)
            peer.replica.cache.check()

    def each(self, replica: int) -> list[Replica]:
        return [peer.replica for peer in self.peers if peer.replica.index == replica]

    def finished(self) -> dict[int, Output]:
        return {out.request: out for peer in self.peers for out in peer.outputs if out.finish}


@settings(max_examples=60)
@given(
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(3, 40),
    st.randoms(use_true_random=False),
)
def test_every_turn_ends_on_a_pool_of_little_more_than_the_largest(
    spec: str, replicas: int, rows: int, tokens: int, rng: random.Random
) -> None:
    trajectories = []
    for session in range(rng.randrange(1, 7)):
        turns = [(rng.randrange(1, 30), rng.randrange(1, 9)) for _ in range(rng.randrange(1, 4))]
        trajectories.append((session, turns))
    largest = max(sum(new + out for new, out in turns) for _, turns in trajectories)
    blocks = -(-int(1.2 * largest) // BLOCK) + 1
    cluster = Cluster(spec, replicas, blocks, rows, tokens)
    context: dict[int, list[int]] = {session: [] for session, _ in trajectories}
    at = dict.fromkeys(context, 0)
    current: dict[int, int] = {}
    wanted: dict[int, int] = {}
    aborted: set[int] = set()
    following = 1
    for _ in range(4000):
        done = cluster.finished()
        for session, turns in trajectories:
            replica = session % replicas
            turn = current.get(session)
            if turn is not None and turn not in done:
                if rng.random() < 0.02:
                    aborted.add(turn)
                    for each in cluster.each(replica):
                        each.abort(turn)
                continue
            if turn is not None:
                outputs = [o for p in cluster.peers if p.replica.index == replica for o in p.outputs]
                drawn = [o.token for o in outputs if o.request == turn and o.token >= 0]
                assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
                if done[turn].finish == "length":
                    assert len(drawn) == 2 * wanted[turn]
                else:
                    assert turn in aborted
                context[session] += drawn[: len(drawn) // 2]
                del current[session]
            if at[session] < len(turns):
                new, out = turns[at[session]]
                at[session] += 1
                context[session] += [rng.randrange(50) for _ in range(new)]
                params = SamplingParams(max_tokens=out, ignore_eos=True)
                request = Request(following, session, replica, tuple(context[session]), params)
                current[session], wanted[following] = following, out
                following += 1
                for each in cluster.each(replica):
                    each.submit(request)
        cluster.round()
        cluster.end()
        if not current and all(at[session] == len(turns) for session, turns in trajectories):
            break
    else:
        pytest.fail(f"turns {sorted(current.values())} did not end: {cluster.plan}")
    for _ in range(60):
        cluster.round()
        cluster.end()
    for peer in cluster.peers:
        assert peer.replica.cache.available == blocks
        assert peer.replica.free_slots == rows
        assert peer.replica.empty


def test_reuse_is_the_whole_context_but_the_last_token() -> None:
    cluster = Cluster("fine", 1, 100, 4, 64)
    prompt = list(range(10))
    for number in (1, 2, 3):
        request = Request(number, 5, 0, tuple(prompt), SamplingParams(max_tokens=6, ignore_eos=True))
        for each in cluster.each(0):
            each.submit(request)
        while number not in cluster.finished():
            cluster.round()
            cluster.end()
        outputs = [o for o in cluster.peers[0].outputs if o.request == number]
        assert outputs[-1].cached == (len(prompt) - 8 - 1 if number > 1 else 0)
        prompt += [o.token for o in outputs] + list(range(8))


def test_stop_token_ends_a_turn_and_its_surplus_row_is_dropped() -> None:
    cluster = Cluster("fine", 1, 100, 4, 64)
    drawn = [_token(0, position).token for position in range(4, 20)]
    params = SamplingParams(max_tokens=16, stop_token_ids=(drawn[3],))
    for each in cluster.each(0):
        each.submit(Request(1, 1, 0, (1, 2, 3, 4), params))
    launched = 0
    while 1 not in cluster.finished():
        launched += bool(cluster.round().bucket)
        cluster.end()
    outputs = [o for o in cluster.peers[0].outputs if o.request == 1]
    assert [o.token for o in outputs] == drawn[:4]
    assert outputs[-1].finish == "stop"
    assert launched == 4, "three iterations and the surplus one that the constant lag costs"


def test_an_ended_session_keeps_nothing_even_if_its_turn_was_in_flight() -> None:
    for when in (1, 3, 6, 40):
        cluster = Cluster("fine", 1, 100, 4, 64)
        prompt = tuple(range(10))
        for each in cluster.each(0):
            each.submit(Request(1, 5, 0, prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
        for at in range(60):
            if at == when:
                for each in cluster.each(0):
                    each.end_session(5)
            cluster.round()
            cluster.end()
        for each in cluster.each(0):
            assert each.cache.cached(5, [*prompt, 1]) == 0
            assert each.cache.available == 100
