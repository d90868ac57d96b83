"""Programs and policies that fail, for tests of what is said about failures."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel.request import Phase
from kernel.sched.fine import Fine
from kernel.sched.policy import Guarantees
from kernel.topology import Role, World
from verify.sim.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.sched.policy import Gate, Limits
    from verify.sim.world import SimRank


def racing(ranks: int = 2, capacity: int = 1, rounds: int = 1, before: int = 0) -> Callable[..., Any]:
    """Each rank has a task for D and one for P, and no order between them: crossed, they hold each other's room.

    before: rendezvous before the first round.
    """

    def program(**options: Any) -> Any:
        async def main(sim: SimRank) -> None:
            for _ in range(before):
                await sim.rendezvous.exchange("views", b"")
            for number in range(rounds):
                await sim.rendezvous.exchange("end", b"")
                async with asyncio.TaskGroup() as both:
                    for phase in Phase:
                        both.create_task(_one(sim, phase, number), name=f"{phase} {number}")

        return SimWorld(World(ranks), capacity=capacity, **options).run(main)

    return program


async def _one(sim: SimRank, phase: Phase, number: int) -> None:
    group = sim.device.collectives(phase)
    label = f"D {number}" if phase is Phase.D else f"P e{number} [0,1)"
    await sim.device.stream(phase).submit(partial(group.all_reduce, Role.TP, 1), label).wait()


def on_ranks(policy: type[Fine]) -> Callable[[str, Limits], Any]:
    """Makes a policy that knows its rank, as none should."""
    made = 0

    def make(spec: str, limits: Limits) -> Any:
        nonlocal made
        one = policy(limits)
        one.rank, made = made % limits.size, made + 1  # type: ignore[attr-defined]
        return one

    return make


class Skips(Fine):
    """Rank 1 leaves pre-d out."""

    rank: int

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        await gate.reached()
        if self.rank != 1:
            await gate.rendezvous("pre-d")
        gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(1)


class Forgets(Fine):
    """Rank 1 waits for what nobody sets."""

    rank: int

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        await gate.reached()
        await gate.rendezvous("pre-d")
        gate.launch_decode()
        if self.rank == 1:
            await asyncio.Event().wait()
        await gate.rendezvous("post-d")
        gate.release(1)


class Late(Fine):
    """Rank 1 launches D after it has released P, and one await later. It claims no order, so that nothing stops it."""

    rank: int
    guarantees = Guarantees(deadlock_free=False)

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        await gate.reached()
        await gate.rendezvous("pre-d")
        if self.rank != 1:
            gate.launch_decode()
        gate.release(1)
        if self.rank == 1:
            await asyncio.sleep(0)
            gate.launch_decode()
        await gate.rendezvous("post-d")


class Fences(Fine):
    """Rank 0 waits on its device for D before it comes to the rendezvous that the others launch D after."""

    rank: int

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        if self.rank == 0:
            gate.launch_decode()
            await gate.drained()
        await gate.rendezvous("pre-d")
        if self.rank != 0:
            gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(1)
