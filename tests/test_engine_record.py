"""What the record of real ranks must show of each rung of the ordering ladder (paper section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kernel.record import Event, Kind, Recording, read_run
from kernel.request import Phase, SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine
from tests.engines import trajectories

if TYPE_CHECKING:
    from rollout.ranks.nursery import Nursery

POLICIES = ["normal", "global_complete", "global_enqueue", "fine", "fine:span=2", "adaptive"]
WORLD = World(4, 2, 4)


@dataclass(frozen=True)
class Work:
    """A submission: when the host enqueued it, and when the device ran it."""

    label: str
    submitted: int
    started: int
    finished: int


def works(recording: Recording, phase: Phase) -> list[Work]:
    """All submissions of a phase that finished."""
    times: dict[str, dict[Kind, int]] = {}
    for event in recording.events:
        if event.phase is phase and event.kind in (Kind.SUBMIT, Kind.WORK_START, Kind.WORK_FINISH):
            times.setdefault(event.site, {})[event.kind] = event.time_ns
    return [
        Work(label, at[Kind.SUBMIT], at[Kind.WORK_START], at[Kind.WORK_FINISH])
        for label, at in times.items()
        if len(at) == 3
    ]


def started_inside(recording: Recording) -> int:
    """D iterations that were launched after a P segment and started while it ran."""
    segments = works(recording, Phase.P)
    return sum(
        any(p.submitted < d.submitted and p.started < d.started < p.finished for p in segments)
        for d in works(recording, Phase.D)
    )


def acknowledged(recording: Recording) -> int:
    """D launches that the host acknowledged while P was enqueued and incomplete."""
    segments = works(recording, Phase.P)
    return sum(any(p.submitted < d.submitted < p.finished for p in segments) for d in works(recording, Phase.D))


def together(recording: Recording) -> int:
    """Pairs of P and D that were on the device at once."""
    segments = works(recording, Phase.P)
    return sum(p.started < d.finished and d.started < p.finished for p in segments for d in works(recording, Phase.D))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> dict[str, dict[int, Recording]]:
    """One run under each policy, on ranks that stay up: a crowd of trajectories, then one with a replica idle."""
    import asyncio

    base = tmp_path_factory.mktemp("record")
    write_checkpoint(base / "model")

    async def run() -> dict[str, dict[int, Recording]]:
        found = {}
        async with Engine(base / "model", WORLD, kv_tokens=8192, prefill_tokens=64, rows=16, nursery=nursery) as engine:
            for number, policy in enumerate(POLICIES):
                out = base / f"run{number}"
                await engine.use_policy(policy, record=out)
                await trajectories(engine, count=8, turns=3, seed=number)
                session = engine.session()
                await session.generate(list(range(3, 40)), SamplingParams(max_tokens=4, ignore_eos=True))
                await session.close()
                await engine.use_policy("normal")
                found[policy] = read_run(out)
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("policy", ["global_enqueue", "fine", "fine:span=2", "adaptive"])
def test_prefill_and_decode_are_in_flight_together(policy: str, runs: dict[str, dict[int, Recording]]) -> None:
    for recording in runs[policy].values():
        assert together(recording) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_ranks_make_the_matched_calls(policy: str, runs: dict[str, dict[int, Recording]]) -> None:
    recordings = runs[policy]
    for phase in Phase:
        idle = {
            rank
            for rank, recording in recordings.items()
            if any(event.kind is Kind.NO_WORK and event.phase is phase for event in recording.events)
        }
        assert idle >= {0, 1} or idle >= {2, 3}, f"no replica was idle in {phase}"
    for name in {group for recording in recordings.values() for group in recording.groups if group.endswith(".TP")}:
        assert len({_count(recording, name) for recording in recordings.values()}) == 1


def _count(recording: Recording, group: str) -> int:
    return sum(1 for event in recording.events if event.kind is Kind.ENQUEUE and event.group == group)


def test_decode_starts_inside_a_running_segment_under_fine(runs: dict[str, dict[int, Recording]]) -> None:
    for policy in ("fine", "fine:span=2"):
        assert all(started_inside(recording) > 0 for recording in runs[policy].values())


def test_launches_are_acknowledged_with_prefill_incomplete_under_global_enqueue(
    runs: dict[str, dict[int, Recording]],
) -> None:
    assert all(acknowledged(recording) > 0 for recording in runs["global_enqueue"].values())


@pytest.mark.parametrize("policy", ["global_complete", "normal"])
def test_a_device_fence_allows_neither(policy: str, runs: dict[str, dict[int, Recording]]) -> None:
    for recording in runs[policy].values():
        assert works(recording, Phase.P)
        assert works(recording, Phase.D)
        assert started_inside(recording) == acknowledged(recording) == 0
        if policy == "normal":
            assert together(recording) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_enqueue_order_is_the_same_on_every_rank(policy: str, runs: dict[str, dict[int, Recording]]) -> None:
    """The host order of collectives, both phases together, up to which group a rank belongs to."""

    def order(recording: Recording) -> list[tuple[object, ...]]:
        events: list[Event] = recording.events
        return [(e.phase, e.stream, e.group, e.round, e.a) for e in events if e.kind is Kind.ENQUEUE]

    first, *others = (order(recording) for recording in runs[policy].values())
    assert first
    assert all(other == first for other in others)
