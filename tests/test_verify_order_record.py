"""The order certificate of recorded runs: whole, overwritten, cut off, wrong, and of real ranks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from kernel.journal import Journal, groups
from kernel.program import Program
from kernel.record import GraphCall, Kind, Recorder, Recording, read_run, ring_path
from kernel.request import Phase, SamplingParams
from kernel.topology import World
from tests.orders import is_valid
from verify.order import Orders, certify, from_program, from_record, turnstile_steps
from verify.waitgraph import Certainty, Class

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollout.ranks.nursery import Nursery
    from verify.order.program import Step


def record(
    run: Path, world: World, layers: int, steps: Sequence[Step], *, events: int = 4096, closed: bool = True,
    graphs: bool = False,
) -> dict[int, Recording]:  # fmt: skip
    """What ranks that enqueue `steps` write, with a rendezvous and the host's wait for D iteration n - 1 in round n."""
    states = [Program(world, phase, layers) for phase in Phase]
    for rank in range(world.size):
        recorder = Recorder(
            ring_path(run, rank), rank=rank, groups=groups(states, rank), capacity=events, strings=1 << 16
        )
        journal = Journal(recorder)
        number = 0
        for step in steps:
            if step is None:
                calls = states[0].calls
                if graphs:
                    graph = recorder.graph([GraphCall(call.op, f"D.{call.role}", 8) for call in calls])
                    recorder.event(Kind.GRAPH_LAUNCH, Phase.D, "D", a=number + 1, b=graph)
                else:
                    journal.submitted(f"D {number}", Phase.D, calls, 8, 8, 8)
                journal.exchange("post-d", leaves=False)
                if number and not graphs:
                    journal.wait(f"D {number - 1}", leaves=False)
                    journal.wait(f"D {number - 1}", leaves=True)
                journal.exchange("post-d", leaves=True)
                number += 1
            else:
                journal.submitted(f"P e0 [{step[0]},{step[1]})", Phase.P, states[1].segment(*step), *step, 32)
        if closed:
            journal.close()
    return read_run(run)


def device_part(orders: Orders) -> dict[tuple[int, str], list[str]]:
    return {
        (queue.rank, queue.name): [
            f"{orders.communicators[orders.comm[each]]} {orders.seq[each]}"
            for each in queue.calls
            if each not in orders.host
        ]
        for queue in orders.queues
        if queue.name in ("D", "P")
    }


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("route", ["paper", "none"])
def test_a_record_says_the_same_as_the_program(tmp_path: Path, route: str, graphs: bool) -> None:
    world, steps = World(4, 2, 4, "cross", route), turnstile_steps(3)
    orders = from_record(record(tmp_path, world, 3, steps, graphs=graphs))
    assert device_part(orders) == device_part(from_program(world, 3, steps=steps))
    result = certify(orders)
    assert result.proved
    assert not orders.open
    assert "overwritten" not in result.scope
    assert is_valid(result)
    assert graphs or any(edge.reason == "host wait for D 1" for edge in orders.edges)
    assert certify(from_record(tmp_path)).scope == result.scope


def test_a_wholly_routed_run_is_one_chain(tmp_path: Path) -> None:
    orders = from_record(record(tmp_path, World(4, 2, 4, "cross", "all"), 3, turnstile_steps(3)))
    room = certify(orders, 1).residency
    assert room is not None
    assert (room.rule, room.budgets, room.safe_from) == ("one chain", 1, 1)


def test_an_overwritten_ring_is_judged_as_far_as_it_reaches(tmp_path: Path) -> None:
    world = World(4, 2, 4, "cross", "paper")
    recordings = record(tmp_path, world, 3, turnstile_steps(3, epochs=4), events=128)
    assert all(recording.dropped for recording in recordings.values())
    early = replace(recordings[2], events=recordings[2].events[9:], dropped=recordings[2].dropped + 9)
    orders = from_record({**recordings, 2: early})
    result = certify(orders)
    assert result.proved
    assert orders.open
    assert f"rank 2 from event {early.dropped} on" in result.scope
    assert f"{len(orders.open)} are not whole in sight" in result.scope
    assert is_valid(result)


def test_a_run_that_was_cut_off_has_open_calls_and_a_closed_one_missing_calls(tmp_path: Path) -> None:
    world, steps = World(4, 2, 4, "cross", "paper"), turnstile_steps(3)
    for closed, cls in ((False, Class.NONE), (True, Class.MISSING)):
        recordings = record(tmp_path / str(closed), world, 3, steps, closed=closed)
        recordings[3] = replace(recordings[3], events=recordings[3].events[:-30])
        result = certify(from_record(recordings))
        assert result.verdict.cls is cls
        assert cls is Class.NONE or result.verdict.ranks == (3,)
    silent = record(tmp_path / "silent", world, 3, steps, closed=False)
    silent[3] = replace(silent[3], events=[])
    assert certify(from_record(silent)).proved
    missing = {rank: each for rank, each in record(tmp_path / "no", world, 3, steps).items() if rank != 1}
    assert "no ring of ranks [1]" in certify(from_record(missing)).scope


def test_a_rank_that_enqueues_in_another_order_is_found_with_its_line(tmp_path: Path) -> None:
    world = World(4, 2, 4, "cross", "paper")
    recordings = record(tmp_path, world, 3, turnstile_steps(3))
    events = list(recordings[1].events)
    calls = [n for n, event in enumerate(events) if event.kind is Kind.ENQUEUE and event.stream == "D"]
    one, other = next(pair for pair in pairwise(calls) if [events[n].phase for n in pair] == [Phase.P, Phase.D])
    events[one], events[other] = (
        events[other]._replace(site="model.py:9 forward"),
        events[one]._replace(site="model.py:7 forward"),
    )
    verdict = certify(from_record({**recordings, 1: replace(recordings[1], events=events)})).verdict
    assert (verdict.cls, verdict.certainty) == (Class.CYCLE, Certainty.CERTAIN)
    assert len(verdict.chain) == 2
    assert any("model.py:9 forward before model.py:7 forward" in line for line in verdict.chain)


def test_ranks_that_name_other_members_are_a_mismatch(tmp_path: Path) -> None:
    recordings = record(tmp_path, World(4, 2, 4, "cross", "paper"), 2, turnstile_steps(2))
    wrong = {**recordings[2].groups, "P.TP": (0, 1, 2)}
    verdict = certify(from_record({**recordings, 2: replace(recordings[2], groups=wrong)})).verdict
    assert verdict.cls is Class.MISMATCH
    assert "P.TP" in verdict.say


def test_a_record_without_collectives_is_unusable(tmp_path: Path) -> None:
    Recorder(ring_path(tmp_path, 0), rank=0, groups={}, capacity=8, strings=4096).close()
    with pytest.raises(UsageError, match="no ring of this run has a collective"):
        from_record(tmp_path)
    with pytest.raises(UsageError):
        from_record(tmp_path / "nothing")


def test_real_ranks_are_certified(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> None:
    """Four processes on the CPU; the order is the same under each policy, the room that it needs is not."""
    from models.tiny import write_checkpoint
    from rollout.engine import Engine

    base = tmp_path_factory.mktemp("order")
    write_checkpoint(base / "model")
    policies = ["normal", "global_enqueue", "fine"]

    async def run() -> None:
        world = World(4, 2, 4)
        async with Engine(base / "model", world, kv_tokens=8192, prefill_tokens=64, rows=16, nursery=nursery) as engine:
            for policy in policies:
                await engine.use_policy(policy, record=base / policy)
                params = SamplingParams(max_tokens=6, ignore_eos=True)
                sessions = [engine.session() for _ in range(6)]
                prompts = [list(range(3, 20 + 11 * n)) for n in range(len(sessions))]
                pairs = zip(sessions, prompts, strict=True)
                await asyncio.gather(*(session.generate(prompt, params) for session, prompt in pairs))
                for session in sessions:
                    await session.close()
                await engine.use_policy("normal")

    asyncio.run(run())
    for policy in policies:
        orders = from_record(base / policy)
        result = certify(orders)
        assert result.proved, result.verdict.say
        assert not orders.open
        assert {queue.name for queue in orders.queues} == {"D", "P", "host"}
        assert is_valid(result)
        assert certify(orders, 2).proved
        # `normal` drains each phase before the other: one kernel at a time is enough.
        assert certify(orders, 1).proved == (policy == "normal")
