"""The four rules of residency against a search of all schedules, which shares no code with them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.program import Program
from kernel.request import Phase
from kernel.topology import EXCHANGES, World
from tests.statespace import Barrier, Enqueue, Job, Rank, Wait, random_job, search, with_capacity
from verify.blame import Certainty, Class, Verdict
from verify.events import Communicator
from verify.order import certify, from_notation, from_program
from verify.order.queues import Builder, Edge, Orders
from verify.order.residency import residency

if TYPE_CHECKING:
    from tests.statespace import Op

WIDE = 99


# ---- the oracle itself ----


def both(first: tuple[Op, ...], second: tuple[Op, ...], *capacities: int, depth: int | None = None) -> bool:
    job = with_capacity(Job((Rank((first,), depth=depth), Rank((second,), depth=depth))), *capacities)
    quick, slow = search(job), search(job, every=True)
    assert quick["deadlock"] == slow["deadlock"]
    assert quick["states"] <= slow["states"]
    return bool(slow["deadlock"])


def test_the_oracle_knows_the_simplest_cases() -> None:
    a, b = Enqueue("a", "s"), Enqueue("b", "t")
    assert not both((a, b), (a, b), 2)
    assert both((a, b), (a, b), 1), "arrival on two streams is in any order"
    assert not both((a, b), (b, a), 2)
    one_stream = Enqueue("b", "s")
    assert not both((a, one_stream), (a, one_stream), 1)
    assert both((a, one_stream), (one_stream, a), WIDE)
    assert both((a, Wait("a"), b), (b, Wait("b"), a), WIDE)
    assert not both((a, Wait("a"), b), (a, b), 2)
    assert both((a, Wait("a"), b), (a, b), 1), "rank 1 may take b first"
    assert not both((a, Wait("a"), b), (a, Wait("a"), b), 1)
    assert not both((a, Enqueue("b", "t", after=("a",))), (a, Wait("a"), b), 1)
    assert both((a, Wait("a"), Barrier("x"), b), (Barrier("x"), b, a), WIDE) is True
    assert both((a, Barrier("x"), b), (Barrier("x"), b, a), 2) is False
    assert both((Enqueue("a", "s", 3),), (Enqueue("a", "s", 3),), 2), "a kernel that never fits"
    assert not both((Enqueue("a", "s", 2), Enqueue("b", "t", 1)), (a, b), 3)
    assert both((Enqueue("a", "s", 2), Enqueue("b", "t", 1)), (a, b), 2, 1)
    assert not both((Enqueue(None, "s"), a), (a,), 1)


def test_the_oracle_waits_for_members_and_for_room_in_a_launch_queue() -> None:
    a, b = Enqueue("a", "s"), Enqueue("b", "t")
    lonely = Job((Rank(((a,),)), Rank(((),))), {"a": frozenset({0, 1})})
    assert search(lonely)["deadlock"]
    assert search(lonely)["stuck"].resident == {0}
    behind = (Enqueue("c", "s"), a, b)
    other = (b, Wait("b"), a, Enqueue("c", "u"))
    assert not both(behind, other, WIDE)
    assert both(behind, other, WIDE, depth=1), "the full queue keeps b from being enqueued"


def test_the_oracle_takes_threads_in_any_order() -> None:
    one, other = Enqueue("a", "s"), Enqueue("b", "s")
    racing = Job((Rank(((one,), (other,)), 2), Rank(((one, other),), 2)))
    assert search(racing)["deadlock"]
    assert not search(Job((Rank(((one, other),), 2), Rank(((one, other),), 2))))["deadlock"]


def test_taking_host_steps_at_once_loses_no_deadlock() -> None:
    seen: Counter[bool] = Counter()
    kinds = {"waits": 0.3, "events": 0.2, "computes": 0.1, "barriers": 0.4, "threads": 2}
    for seed in range(120):
        rng = random.Random(seed)
        job = random_job(rng, ranks=(2, 2), instances=(2, 3), **kinds)  # type: ignore[arg-type]
        tight = with_capacity(job, *(rng.choice([1, 2]) for _ in job.ranks))
        quick = search(tight)["deadlock"]
        assert quick == search(tight, every=True)["deadlock"]
        seen[quick] += 1
    assert min(seen.values()) > 20


# ---- the rules ----


def orders_of(job: Job) -> Orders:
    """The queues of a job; a barrier is an instance of hosts."""
    builder = Builder(roles=False)
    orders = builder.orders
    members: dict[str, set[int]] = {}
    for rank, each in enumerate(job.ranks):
        for op in (op for ops in each.threads for op in ops):
            name = op.name if isinstance(op, Barrier) else op.instance
            if name is not None:
                members.setdefault(name, set()).add(rank)

    def instance(name: str) -> int:
        return builder.instance(builder.communicator(Communicator(tuple(sorted(members[name])), name)), 0, name)

    for rank, each in enumerate(job.ranks):
        builder.rank(rank)
        for op in (op for ops in each.threads for op in ops):
            if isinstance(op, Wait):
                builder.wait(rank, instance(op.instance), "host wait")
            elif isinstance(op, Barrier):
                orders.host.add(instance(op.name))
                builder.enqueue(rank, ("host",), instance(op.name))
                builder.wait(rank, instance(op.name), "barrier")
            elif op.instance is not None:
                number = instance(op.instance)
                orders.weights[orders.comm[number]] = op.weight
                orders.edges += [Edge(instance(before), number, rank, "event") for before in op.after]
                builder.enqueue(rank, (op.stream,), number)
    return builder.finish()


def says(verdict: Verdict) -> bool | None:
    """Whether some schedule deadlocks; None: not decided."""
    return None if verdict.certainty is Certainty.UNDECIDED else verdict.cls is not Class.NONE


def compare(seed: int, tally: Counter[str], **kinds: object) -> None:
    """One random job at every room from its largest kernel on, and at a mixture."""
    rng = random.Random(seed)
    job = random_job(rng, **kinds)  # type: ignore[arg-type]
    orders = orders_of(job)
    largest = max(orders.weights)
    needed = residency(orders).safe_from if certify(orders).proved else 0
    rooms = [[room] for room in {largest, largest + 1, largest + 2, max(needed, largest), WIDE}]
    rooms.append([rng.choice([largest, largest + 1, WIDE]) for _ in job.ranks])
    for room in rooms:
        tight = with_capacity(job, *room)
        by_rank = {rank: each.capacity for rank, each in enumerate(tight.ranks)}
        truth = search(tight)["deadlock"]
        result = certify(orders, by_rank)
        said = says(result.verdict)
        rule = result.residency.rule if result.residency is not None else "cycle"
        assert said is None or said == truth, f"seed {seed}, room {room}: {truth}, {rule}: {result.verdict.say}"
        tally[f"{rule} {'undecided' if said is None else 'stuck' if said else 'safe'}"] += 1
        if said is None and kinds.get("weights") is None:
            assert any(largest < each < WIDE for each in by_rank.values()) or "rendezvous" in result.verdict.condition
        if result.residency is not None and result.residency.rule == "ring" and len(room) == 1:
            assert room[0] >= largest
        if needed and len(room) == 1 and room[0] >= needed:
            assert not truth


KINDS = {
    "streams": {"ranks": (2, 4), "instances": (2, 4)},
    "events": {"ranks": (2, 3), "instances": (2, 4), "events": 0.3, "computes": 0.2},
    "waits": {"ranks": (2, 3), "instances": (2, 5), "waits": 0.3},
    "weights": {"ranks": (2, 3), "instances": (2, 4), "weights": (1, 3)},
    "everything": {
        "ranks": (2, 3), "instances": (2, 4), "weights": (1, 2), "waits": 0.2, "events": 0.2, "computes": 0.1,
        "barriers": 0.6,
    },
    "nearly in order": {"ranks": (2, 3), "instances": (3, 4), "streams": (2, 3), "shuffled": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_agree_with_all_schedules(kind: str) -> None:
    """T1 and T2 (width), T3 (one chain), T4 (ring), and all rooms between: not one difference."""
    tally: Counter[str] = Counter()
    for seed in range(220):
        compare(seed * 31 + len(kind), tally, **KINDS[kind])
    assert tally["cycle stuck"] > 10
    assert tally["ring found stuck"] > 10
    assert tally["one chain safe"] + tally["budgets safe"] > 10
    undecided = sum(count for what, count in tally.items() if what.endswith("undecided"))
    assert undecided < tally.total() / 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_agree_with_all_schedules_of_many(kind: str) -> None:
    tally: Counter[str] = Counter()
    for seed in range(10_000, 11_500):
        compare(seed, tally, **KINDS[kind])
    rules = {what.rsplit(" ", 1)[0] for what, count in tally.items() if count}
    assert rules >= {"cycle", "one chain", "budgets", "ring found"}


def test_a_ring_needs_each_device_once() -> None:
    """Two kernels that nothing orders, but that share one device only: room for one is enough."""
    alone = from_notation("r0: s:a.AR{0,1} t:b.AR{0,2}; r1: s:a.AR{0,1}; r2: t:b.AR{0,2}")
    result = certify(alone, 1)
    assert result.proved
    assert result.residency is not None
    assert (result.residency.rule, result.residency.width, result.residency.safe_from) == ("ring", 2, 1)
    twice = from_notation("r0: s:a.AR{0,1} t:b.AR{0,1}; r1: s:a.AR{0,1} t:b.AR{0,1}")
    result = certify(twice, 1)
    assert (result.verdict.cls, result.verdict.certainty) == (Class.CYCLE, Certainty.CONDITIONAL)
    assert result.verdict.ranks == (0, 1)
    assert "room 1, unordered 2" in result.verdict.condition
    assert certify(twice, 2).proved


def test_a_ring_over_three_devices() -> None:
    text = "r0: s:a.AR{0,1} t:b.AR{0,2}; r1: s:a.AR{0,1} t:c.AR{1,2}; r2: s:b.AR{0,2} t:c.AR{1,2}"
    result = certify(from_notation(text), 1)
    assert len(result.verdict.chain) == 3
    assert result.residency is not None
    assert len({hop.rank for hop in result.residency.ring}) == 3
    # With room on one of them, its order is free and closes no ring.
    assert certify(from_notation(text), {0: 1, 1: 1, 2: 2}).proved


def test_the_three_bounds() -> None:
    """Three streams, of which a host wait orders two: width 2, though the budgets add up to 3."""
    text = "r0: s:a.AR{0,1} wait(s) t:b.AR{0,1} u:c.AR{0,1}; r1: s:a.AR{0,1} wait(s) t:b.AR{0,1} u:c.AR{0,1}"
    found = residency(from_notation(text))
    assert (found.largest, found.width, found.budgets, found.safe_from, found.rule) == (1, 2, 3, 2, "width")
    ordered = residency(from_notation(text.replace("t:b.AR{0,1}", "t:b.AR{0,1} wait(t)")))
    assert (ordered.width, ordered.budgets, ordered.safe_from, ordered.rule) == (1, 3, 1, "one chain")


def test_a_kernel_that_never_fits() -> None:
    orders = from_program(World(2), 2, weights=(1, 4))
    verdict = certify(orders, 3).verdict
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.DEVICE_STALL, Certainty.CERTAIN, (0, 1))


def test_a_search_that_is_cut_short_says_so() -> None:
    orders = from_program(World(4, 2, 4, "cross", "none"), 3)
    verdict = certify(orders, 1, budget=10).verdict
    assert (verdict.cls, verdict.certainty) == (Class.CYCLE, Certainty.UNDECIDED)
    assert "10 steps" in verdict.condition
    free = certify(orders, budget=10)
    assert free.proved
    assert free.residency is not None
    assert (free.residency.rule, free.residency.safe_from) == ("budgets", 2)


WORLDS = [
    World(size, adp, ep, gather)
    for size in (2, 4, 8)
    for adp in (1, 2, 4, 8)
    for ep in (1, 2, 4, 8)
    for gather in ("flat", "cross")
    if size % adp == 0 and size % ep == 0
]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_registered_set_is_what_must_be_routed(exchange: str) -> None:
    """With all of it on D's stream any room is enough; with none of it, one kernel of each phase must fit (paper
    section 4); under the paper's route that is so exactly where P has other collectives that cross D's."""
    for world in WORLDS:
        for route in ("all", "paper", "none"):
            routed = replace(world, route=route, exchange=exchange)
            program = Program(routed, Phase.P, 2)
            orders = from_program(routed, 2)
            unrouted = [call for call in program.registered if not call.routed]
            assert certify(orders, 2).proved
            assert certify(orders, 1).proved == (not unrouted), f"{routed}: {unrouted}"


@given(st.integers(1, 4), st.integers(1, 4))
def test_budgets_of_the_two_phases(d: int, p: int) -> None:
    """DeepEP's phases are never routed: what they need is the sum of their SM budgets, or one that lets no two in."""
    orders = from_program(World(4, 4, 4, route="all", exchange="split"), 2, weights=(d, p))
    found = residency(orders)
    assert (found.largest, found.budgets, found.width, found.safe_from) == (max(d, p), d + p, d + p, d + p)
    assert certify(orders, d + p).proved
    assert not certify(orders, d + p - 1).proved
