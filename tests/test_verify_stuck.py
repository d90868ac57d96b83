"""What a simulated run says when it cannot end well: deadlock, livelock, orphans, leftovers."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.request import Phase
from kernel.topology import Role, World
from verify.sim.errors import Deadlock, Livelock, Mismatch, Orphan
from verify.sim.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from verify.sim.world import SimRank

FOUR = World(4, adp=2)


def fails(main: Callable[[SimRank], Coroutine[Any, Any, Any]], kind: type[BaseException], **options: Any) -> Any:
    """The error of a run on four ranks; nothing of it lives on to complain later."""
    with pytest.raises(kind) as caught:
        SimWorld(FOUR, **options).run(main)
    gc.collect()
    return caught.value


def test_a_wait_for_nothing_is_named_with_its_line() -> None:
    async def main(sim: SimRank) -> None:
        if sim.rank == 2:
            sim.loop.call_later(60, print).cancel()
            forgotten = asyncio.Event()
            await forgotten.wait()

    error = fails(main, Deadlock)
    assert (len(error.waits), error.at_ns, error.only_timers) == (1, 0, False)
    assert error.waits[0].startswith("rank 2: task 'main' waits at tests/test_verify_stuck.py:")
    assert "`await forgotten.wait()`" in error.waits[0]
    assert "\n" not in str(error)


def test_a_missing_rank_of_a_rendezvous_is_named() -> None:
    async def main(sim: SimRank) -> None:
        if sim.rank != 1:
            await sim.rendezvous.exchange("pre-d", b"")

    error = fails(main, Deadlock)
    assert "rendezvous 'pre-d' (number 0): rank 0, 2, 3 here, rank 1 missing" in error.waits
    assert sum("for rendezvous 'pre-d' (number 0)" in wait for wait in error.waits) == 3


def test_a_collective_that_one_member_never_enqueues_is_named() -> None:
    async def main(sim: SimRank) -> None:
        stream, group = sim.device.stream(Phase.D), sim.device.collectives(Phase.D)
        if sim.rank:
            stream.submit(lambda: group.all_reduce(Role.TP, 1), "D 0")

    error = fails(main, Deadlock)
    assert (
        "rank 1 stream D: D all_reduce TP #0: resident, waits for rank 0 (not enqueued there)" in error.waits
    )


def test_crossed_order_without_room_names_every_holder() -> None:
    async def main(sim: SimRank) -> None:
        d, p = sim.device.collectives(Phase.D), sim.device.collectives(Phase.P)
        for phase in (Phase.D, Phase.P) if sim.rank % 2 else (Phase.P, Phase.D):
            group = d if phase is Phase.D else p
            sim.device.stream(phase).submit(partial(group.all_reduce, Role.TP, 1), str(phase))
            await asyncio.sleep(0.001)

    error = fails(main, Deadlock, capacity=1)
    holder = "waits for 1 of 1 slots, held by D all_reduce TP #0 of stream D"
    assert f"rank 1 stream P: P all_reduce TP #0: {holder}" in error.waits
    SimWorld(FOUR, capacity=2).run(main)


def test_tasks_that_wait_for_tasks_are_told_apart() -> None:
    async def main(sim: SimRank) -> None:
        async def inner() -> None:
            await asyncio.get_running_loop().create_future()

        if sim.rank == 0:
            async with asyncio.TaskGroup() as group:
                child = group.create_task(inner(), name="child")
                await child

    error = fails(main, Deadlock)
    assert "for task 'child'" in error.waits[0]
    assert error.waits[1].startswith("rank 0: task 'child' waits at")


def test_a_watchdog_does_not_hide_a_deadlock() -> None:
    async def main(sim: SimRank) -> None:
        async def watchdog() -> None:
            while True:  # noqa: ASYNC110
                await asyncio.sleep(1)

        sim.loop.kept = sim.loop.create_task(watchdog())  # type: ignore[attr-defined]
        if sim.rank:
            await sim.rendezvous.exchange("pre-d", b"")

    error = fails(main, Deadlock, patience_s=30)
    assert error.only_timers
    assert 30e9 <= error.at_ns <= 32e9


def test_slow_progress_by_timers_is_not_a_deadlock() -> None:
    async def main(sim: SimRank) -> None:
        for _ in range(10):
            if sim.rank == 0:
                for _ in range(5):
                    await asyncio.sleep(5)
            await sim.rendezvous.exchange("pre-d", b"")

    world = SimWorld(FOUR, patience_s=30)
    world.run(main)
    assert world.now_ns == 250_000_000_000


def test_polling_without_waiting_is_a_livelock() -> None:
    async def main(sim: SimRank) -> None:
        event = sim.device.stream(Phase.D).submit(lambda: sim.device.compute("x", 1000), "D 0")
        while not event.done():  # noqa: ASYNC110
            await asyncio.sleep(0)

    error = fails(main, Livelock, livelock=1000)
    assert "rank 0: task 'main' waits at tests/test_verify_stuck.py" in error.waits[0]


def test_work_that_takes_no_time_is_not_a_livelock() -> None:
    async def main(sim: SimRank) -> None:
        for number in range(1000):
            await sim.rendezvous.exchange(f"round {number}", b"")

    world = SimWorld(FOUR, livelock=500)
    world.run(main)
    assert world.now_ns == 0
    assert world.scheduler.steps > 2000


def test_an_exception_in_an_orphan_task_fails_the_run() -> None:
    async def main(sim: SimRank) -> None:
        async def orphan() -> None:
            raise ValueError("lost")

        if sim.rank == 3:
            sim.loop.kept = sim.loop.create_task(orphan(), name="orphan")  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    assert "rank 3 task 'orphan' failed unseen: ValueError: lost" in str(fails(main, Orphan))


def test_an_exception_in_a_forgotten_task_and_in_a_callback_fail_the_run() -> None:
    async def main(sim: SimRank) -> None:
        async def orphan() -> None:
            raise ValueError("lost")

        task: asyncio.Task[None] | None = sim.loop.create_task(orphan())
        await asyncio.sleep(1)
        assert task is not None
        del task
        await asyncio.sleep(1)

    assert "lost" in str(fails(main, Orphan))

    async def calls(sim: SimRank) -> None:
        sim.loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    assert "rank 0: Exception in callback" in str(fails(calls, Orphan))


def test_device_work_that_failed_unseen_fails_the_run() -> None:
    async def main(sim: SimRank) -> None:
        event = sim.device.stream(Phase.D).submit(lambda: 1 // (sim.rank - 1), f"D {sim.rank}")
        if sim.rank == 0:
            assert await event.wait() == -1

    assert "D 1 on stream D of rank 1" in str(fails(main, Orphan))

    async def looks(sim: SimRank) -> str:
        event = sim.device.stream(Phase.D).submit(lambda: 1 // (sim.rank - 1), "D")
        try:
            return str(await event.wait())
        except ZeroDivisionError:
            return "seen"

    assert SimWorld(FOUR).run(looks) == ["-1", "seen", "1", "0"]


def test_a_failing_rank_is_named_and_ends_the_run_at_once() -> None:
    async def main(sim: SimRank) -> None:
        await asyncio.sleep(sim.rank + 1)
        if sim.rank == 1:
            raise KeyError("mine")
        await sim.rendezvous.exchange("pre-d", b"")

    error = fails(main, KeyError)
    assert error.__notes__ == ["raised on rank 1 at 2000.000 ms"]


def test_members_that_disagree_are_both_named_with_their_lines() -> None:
    async def main(sim: SimRank) -> None:
        group = sim.device.collectives(Phase.D)
        work = (lambda: group.all_gather(Role.ADP, 2)) if sim.rank == 3 else (lambda: group.all_reduce(Role.ADP, 2))
        await sim.device.stream(Phase.D).submit(work, "D").wait()

    message = str(fails(main, Mismatch))
    assert "call 0 on D ADP{1,3} is all_gather of 2 rows on stream D at tests/test_verify_stuck.py:" in message
    assert "all_reduce of 2 rows on stream D at tests/test_verify_stuck.py:" in message
    assert "on rank 1" in message


def test_leftover_tasks_are_cancelled_and_their_cleanup_runs() -> None:
    cleaned: list[int] = []

    async def main(sim: SimRank) -> int:
        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(sim.rank)

        sim.loop.kept = sim.loop.create_task(forever())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return sim.rank

    assert SimWorld(FOUR).run(main) == [0, 1, 2, 3]
    assert cleaned == [0, 1, 2, 3]


def test_a_run_ends_only_when_the_devices_are_idle() -> None:
    async def main(sim: SimRank) -> None:
        sim.device.stream(Phase.P).submit(lambda: sim.device.compute("long", 5_000_000), "P")

    world = SimWorld(FOUR)
    world.run(main)
    assert world.now_ns == 5_000_000


def test_a_world_runs_once_and_has_room_for_one_collective() -> None:
    async def main(sim: SimRank) -> None: ...

    world = SimWorld(FOUR)
    world.run(main)
    with pytest.raises(RuntimeError, match="runs once"):
        world.run(main)
    with pytest.raises(UsageError, match="could never start"):
        SimWorld(FOUR, capacity=1, weights=(1, 2))
