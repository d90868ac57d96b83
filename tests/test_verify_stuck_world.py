"""The wait-for graph of a stuck simulated world: class, chain in words, and where each host waits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kernel.inbox import Inbox
from kernel.request import Phase
from kernel.topology import Role, World
from verify.blame import Class
from verify.sim.errors import Deadlock, Standstill
from verify.sim.stuck import wait_graph
from verify.sim.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from verify.sim.world import SimRank

def standstill(main: Callable[[SimRank], Coroutine[Any, Any, Any]], world: World | None = None, **options: Any) -> Any:
    """The standstill of a program; by default on two ranks."""
    with pytest.raises(Deadlock) as caught:
        SimWorld(world or World(2), **options).run(main)
    found = caught.value.standstill
    assert isinstance(found, Standstill)
    assert (caught.value.cls, caught.value.chain) == (found.cls, found.chain)
    return found


def call(sim: SimRank, phase: Phase, role: Role = Role.TP, label: str = "work") -> Any:
    """Submit one all-reduce."""
    group = sim.device.collectives(phase)
    return sim.device.stream(phase).submit(partial(group.all_reduce, role, 1), label)


async def crossed(sim: SimRank) -> None:
    phases = [Phase.P, Phase.D] if sim.rank else [Phase.D, Phase.P]
    done = []
    for phase in phases:
        done.append(call(sim, phase))
        await asyncio.sleep(0)
    for event in done:
        await event.wait()


def test_two_kernels_in_each_others_room_are_a_cycle() -> None:
    found = standstill(crossed, capacity=1)
    assert (found.cls, found.ranks, found.ops) == (Class.CYCLE, (0, 1), ("D AR[TP] #0", "P AR[TP] #0"))
    assert found.kinds == ("D", "P", "room")
    assert found.conditional
    assert found.chain == (
        "rank 0: D AR[TP] #0 holds the only slot and waits for rank 1, where P AR[TP] #0 holds the only slot",
        "rank 1: P AR[TP] #0 holds the only slot and waits for rank 0, where D AR[TP] #0 holds the only slot",
    )
    assert [rank for rank, _ in found.hosts] == [0, 1]
    assert all("test_verify_stuck_world.py:" in text and "`await event.wait()`" in text for _, text in found.hosts)


def test_with_room_for_both_it_completes() -> None:
    SimWorld(World(2), capacity=2).run(crossed)


def test_room_of_several_slots_is_counted() -> None:
    found = standstill(crossed, capacity=3, weights=(2, 2))
    assert "holds 2 of 3 slots" in found.chain[0]
    assert found.kinds == ("D", "P", "room")


async def crossed_in_a_stream(sim: SimRank) -> None:
    roles = [Role.TP, Role.ATP] if sim.rank else [Role.ATP, Role.TP]
    events = [call(sim, Phase.D, role, f"D {number}") for number, role in enumerate(roles)]
    for event in events:
        await event.wait()


def test_two_orders_on_one_stream_are_a_cycle_whatever_the_room() -> None:
    found = standstill(crossed_in_a_stream, World(4, adp=2))
    assert (found.cls, found.kinds, found.conditional) == (Class.CYCLE, ("D", "queue"), False)
    assert set(found.ops) == {"D AR[ATP] #0", "D AR[TP] #0"}
    assert all("on stream D" in line for line in found.chain)


async def host_and_device(sim: SimRank) -> None:
    if sim.rank == 0:
        await call(sim, Phase.D).wait()
    await sim.rendezvous.exchange("pre-d", b"")
    if sim.rank == 1:
        await call(sim, Phase.D).wait()


def test_a_rendezvous_behind_device_work_that_needs_the_other_rank() -> None:
    found = standstill(host_and_device)
    assert (found.cls, found.kinds) == (Class.CYCLE, ("D", "host", "rendezvous"))
    start = "rank 0: D AR[TP] #0 runs on stream D and waits for rank 1: it has not enqueued it"
    assert found.chain[0].startswith(start)
    assert "the host waits in rendezvous 'pre-d' #0" in found.chain[1]
    assert "it has not come" in found.chain[1]
    assert "for D AR[TP] #0" in found.chain[1]


async def full_queue(sim: SimRank) -> None:
    if sim.rank == 1:
        await call(sim, Phase.P).wait()
        await call(sim, Phase.D).wait()
        await call(sim, Phase.D).wait()
        return
    call(sim, Phase.D, label="D 0")
    await asyncio.sleep(0)
    last = call(sim, Phase.D, label="D 1")
    await asyncio.sleep(0)
    await call(sim, Phase.P).wait()
    await last.wait()


def test_a_full_launch_queue_is_waited_for() -> None:
    SimWorld(World(2), depth=2).run(full_queue)
    found = standstill(full_queue, depth=1)
    assert (found.cls, found.kinds) == (Class.CYCLE, ("D", "P", "host", "launch")), found.chain
    full = "rank 0, which cannot launch it: the launch queue of stream D is full, and D AR[TP] #0 comes first"
    assert any(full in line for line in found.chain), found.chain


async def full_queue_at_once(sim: SimRank) -> None:
    if sim.rank == 1:
        await call(sim, Phase.P).wait()
        await call(sim, Phase.D).wait()
        await call(sim, Phase.D).wait()
        return
    for event in [call(sim, Phase.D), call(sim, Phase.D), call(sim, Phase.P)]:
        await event.wait()


def test_what_has_not_reached_its_stream_waits_for_the_full_queue() -> None:
    SimWorld(World(2), depth=2).run(full_queue_at_once)
    world = SimWorld(World(2), depth=1)
    world.scheduler.witnesses.clear()
    with pytest.raises(Deadlock) as caught:
        world.run(full_queue_at_once)
    found = caught.value.standstill
    assert found is not None
    assert (found.cls, found.kinds) == (Class.CYCLE, ("D", "P", "host", "launch")), found.chain


async def leaves_early(sim: SimRank) -> None:
    if sim.rank != 2:
        await sim.rendezvous.exchange("post-d", b"")


def test_a_rank_that_has_ended_is_missing() -> None:
    found = standstill(leaves_early, World(4, adp=2))
    assert (found.cls, found.ranks, found.kinds) == (Class.MISSING, (2,), ("end", "rendezvous"))
    assert found.chain == ("ranks 0, 1 and 3 wait in rendezvous 'post-d' #0 for rank 2, which has ended",)
    assert [rank for rank, _ in found.hosts] == [0, 1, 3]


async def never_called(sim: SimRank) -> None:
    if sim.rank != 1:
        await call(sim, Phase.P).wait()


def test_a_collective_that_a_rank_never_calls() -> None:
    found = standstill(never_called)
    assert (found.cls, found.kinds) == (Class.MISSING, ("collective", "end"))
    assert found.chain == ("rank 0 waits in P AR[TP] #0 for rank 1, which has ended",)


async def forgets(sim: SimRank) -> None:
    if sim.rank == 1:
        await asyncio.Event().wait()
    await sim.rendezvous.exchange("end", b"")


def test_a_rank_that_waits_for_what_nobody_will_do_is_missing() -> None:
    found = standstill(forgets)
    assert (found.cls, found.kinds) == (Class.MISSING, ("rendezvous", "unset"))
    assert "`await asyncio.Event().wait()`" in found.chain[0]
    assert "nothing left on that rank will do" in found.chain[0]


async def forgets_while_a_device_waits(sim: SimRank) -> None:
    if sim.rank == 1:
        waiter = asyncio.ensure_future(call(sim, Phase.D).wait())
        await asyncio.Event().wait()
        await waiter
    await sim.rendezvous.exchange("end", b"")
    await call(sim, Phase.D).wait()


def test_a_task_that_waits_for_a_device_sets_nothing() -> None:
    found = standstill(forgets_while_a_device_waits)
    assert (found.cls, found.kinds) == (Class.MISSING, ("rendezvous", "unset")), found.chain


async def reads_the_inbox(sim: SimRank) -> None:
    if sim.rank == 1:
        await Inbox().beyond(0)
    await sim.rendezvous.exchange("end", b"")


def test_a_rank_that_waits_for_its_inbox_is_missing() -> None:
    found = standstill(reads_the_inbox)
    assert (found.cls, found.kinds) == (Class.MISSING, ("inbox", "rendezvous"))
    assert "rank 1, which waits for its inbox" in found.chain[0]


async def only_the_inbox(sim: SimRank) -> None:
    await Inbox().beyond(0)


def test_everybody_waiting_for_the_outside() -> None:
    assert standstill(only_the_inbox).cls is Class.OUTSIDE


async def times_out(sim: SimRank) -> None:
    if sim.rank:
        for _ in range(1000):
            await asyncio.sleep(100)
    await sim.rendezvous.exchange("end", b"")


def test_only_timers_are_a_class_of_their_own() -> None:
    assert standstill(times_out).cls is Class.TIMEOUT


def through(how: str) -> Callable[[SimRank], Coroutine[Any, Any, Any]]:
    """Rank 0 waits in several ways for a task that waits for rank 1, which waits for rank 0's device work."""

    async def main(sim: SimRank) -> None:
        async def meets() -> None:
            await sim.rendezvous.exchange("pre-d", b"")

        if sim.rank == 1:
            await call(sim, Phase.D).wait()
            await meets()
            return
        match how:
            case "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(meets())
            case "gather":
                await asyncio.gather(meets(), asyncio.sleep(0))
            case "gather of shield":
                await asyncio.gather(asyncio.shield(asyncio.ensure_future(meets())))
            case "shield":
                await asyncio.shield(asyncio.ensure_future(meets()))
            case "wait":
                await asyncio.wait([asyncio.ensure_future(meets())])
            case "task":
                await asyncio.ensure_future(meets())
        await call(sim, Phase.D).wait()

    return main


@pytest.mark.parametrize("how", ["group", "gather", "gather of shield", "shield", "wait", "task"])
def test_waits_are_followed_through_tasks(how: str) -> None:
    found = standstill(through(how))
    assert (found.cls, found.kinds) == (Class.CYCLE, ("D", "host", "rendezvous")), found.chain


async def any_of(sim: SimRank) -> None:
    async def meets() -> None:
        await sim.rendezvous.exchange("pre-d", b"")

    async def ends() -> None:
        await call(sim, Phase.D).wait()

    if sim.rank == 0:
        tasks = [asyncio.ensure_future(meets()), asyncio.ensure_future(ends())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def test_any_of_is_an_or() -> None:
    world = SimWorld(World(2))
    seen: list[Any] = []

    def look() -> list[str]:
        seen.append(wait_graph(world))
        return []

    world.scheduler.witnesses.append(look)
    with pytest.raises(Deadlock) as caught:
        world.run(any_of)
    assert caught.value.cls is Class.MISSING
    modes = [data["mode"] for node, data in seen[-1].nodes(data=True) if node[0] == "task"]
    assert sorted(modes) == ["and", "and", "or"]
