"""With room for every kernel an arrival is no step of its own, and what follows still knows all that it waited for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kernel.request import Phase
from kernel.topology import Role, World
from verify.explore.execution import execute
from verify.sim.world import WIDE, SimWorld

if TYPE_CHECKING:
    from verify.sim.world import SimRank


def two_after_each_other(capacity: int, **options: Any) -> Any:
    """Each of two ranks submits one collective in a step and another one in the next."""

    async def main(sim: SimRank) -> None:
        group = sim.device.collectives(Phase.D)
        for number in range(2):
            event = sim.device.stream(Phase.D).submit(partial(group.all_reduce, Role.TP, 1), f"D {number}")
            await asyncio.sleep(0)
        await event.wait()

    return SimWorld(World(2), capacity=capacity, **options).run(main)


@pytest.mark.parametrize("capacity", [1, WIDE])
def test_an_end_comes_after_each_enqueue_whoever_lets_the_kernel_arrive(capacity: int) -> None:
    trace = execute(partial(two_after_each_other, capacity), notes=True).trace
    enqueued = {(note.rank, note.which): note.step for note in trace.notes if note.what == "enqueue"}
    ended = {(note.rank, note.which): note.step for note in trace.notes if note.what == "finish"}
    for call in ("D all_reduce TP #0", "D all_reduce TP #1"):
        for rank in range(2):
            for other in range(2):
                assert trace.ordered(enqueued[rank, call], ended[other, call]), (call, rank, other)
    assert not trace.races
    own = [name for name in trace.names if "stream" in name]
    assert bool(own) is (capacity == 1)


def test_the_later_enqueue_came_before_the_earlier_end() -> None:
    """Otherwise the test above would show nothing."""
    trace = execute(partial(two_after_each_other, WIDE), notes=True).trace
    enqueued = [note.step for note in trace.notes if note.what == "enqueue" and "#1" in note.which]
    ended = [note.step for note in trace.notes if note.what == "finish" and "#0" in note.which]
    assert min(enqueued) < min(ended)
    assert not trace.ordered(min(enqueued), min(ended))
