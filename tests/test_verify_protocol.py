"""The core idea in miniature, on the simulated world: five orders of entry, with room for one or two collectives.

The programs here are written for these ten outcomes alone; the kernel's own policies are in test_verify_simulation.py.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kernel.program import Program
from kernel.request import Phase
from kernel.topology import Role, World
from verify.sim.errors import Deadlock
from verify.sim.rendezvous import uniform_skew
from verify.sim.world import SimRank, SimWorld

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.sim.scheduler import Actor

FOUR = World(4, adp=2)
ROUTED = next(call for call in Program(FOUR, Phase.P, 1).calls if call.routed)
LAYERS, ROUNDS = 3, 3


@dataclass
class Protocol:
    """turnstile: rounds with two rendezvous and a permit; otherwise P and D enter as soon as they are ready."""

    turnstile: bool
    routed: bool
    span: int = 1

    async def run(self, sim: SimRank, late: Any) -> None:
        device, route = sim.device, sim.device.route()
        d, p = device.collectives(Phase.D), device.collectives(Phase.P)
        moved, reached, permit, ended = asyncio.Condition(), -1, 0, False

        def all_reduce() -> None:
            if self.routed:
                route.reserve([ROUTED])
                route.run(ROUTED, lambda: p.all_reduce(Role.TP, 1))
            else:
                p.all_reduce(Role.TP, 1)

        async def prefill() -> None:
            nonlocal reached, ended
            for layer in range(LAYERS):
                await asyncio.sleep(late(sim.rank))
                async with moved:
                    reached = layer
                    moved.notify_all()
                    while self.turnstile and layer >= permit:
                        await moved.wait()
                device.stream(Phase.P).submit(all_reduce, f"P {layer}")
            async with moved:
                ended = True
                moved.notify_all()

        def launch(round_: int) -> None:
            device.stream(Phase.D).submit(lambda: d.all_gather(Role.ADP, 1), f"D {round_}")

        async def decode() -> None:
            nonlocal permit
            for round_ in range(ROUNDS):
                await asyncio.sleep(late(sim.rank))
                if not self.turnstile:
                    launch(round_)
                    continue
                async with moved:
                    while not ended and reached < permit:
                        await moved.wait()
                await sim.rendezvous.exchange("pre-d", b"")
                launch(round_)
                await sim.rendezvous.exchange("post-d", b"")
                async with moved:
                    permit += self.span
                    moved.notify_all()
            async with moved:
                permit = 1 << 30
                moved.notify_all()

        await asyncio.gather(prefill(), decode())


UNSAFE = Protocol(turnstile=False, routed=False)
ROUTE_ONLY = Protocol(turnstile=False, routed=True)
TURNSTILE_ONLY = Protocol(turnstile=True, routed=False)
FINE_1 = Protocol(turnstile=True, routed=True, span=1)
FINE_2 = Protocol(turnstile=True, routed=True, span=2)

TEN = [
    (UNSAFE, 1, True),
    (UNSAFE, 2, False),
    (ROUTE_ONLY, 1, True),
    (ROUTE_ONLY, 2, True),
    (TURNSTILE_ONLY, 1, True),
    (TURNSTILE_ONLY, 2, False),
    (FINE_1, 1, False),
    (FINE_1, 2, False),
    (FINE_2, 1, False),
    (FINE_2, 2, False),
]


def deadlocks(protocol: Protocol, slots: int, *, permute: bool, runs: int = 30) -> int:
    """How many of so many random schedules get stuck."""
    stuck = 0
    for seed in range(runs):
        draws = random.Random(seed)

        def choose(options: Sequence[Actor], draws: random.Random = draws) -> int:
            return draws.randrange(len(options))

        def late(rank: int, draws: random.Random = draws) -> float:
            return 0.0 if permute else draws.randrange(20) / 1e3

        world = SimWorld(FOUR, capacity=slots, choose=choose, permute=permute, collective_ns=lambda *_: 2_000_000)
        try:
            world.run(lambda sim, late=late: protocol.run(sim, late))  # type: ignore[misc]
        except Deadlock:
            stuck += 1
    return stuck


@pytest.mark.parametrize(("protocol", "slots", "can"), TEN)
def test_ten_outcomes_when_ready_work_runs_in_any_order(protocol: Protocol, slots: int, can: bool) -> None:
    assert (deadlocks(protocol, slots, permute=True) > 0) is can


@pytest.mark.parametrize(("protocol", "slots", "can"), TEN)
def test_ten_outcomes_in_production_order_when_work_is_ready_at_any_time(
    protocol: Protocol, slots: int, can: bool
) -> None:
    assert (deadlocks(protocol, slots, permute=False) > 0) is can


def test_a_skew_of_twenty_milliseconds_delays_the_turnstile_and_nothing_else() -> None:
    """The paper's model-free stress, small: every cycle of five seeds completes (section 7, RQ3)."""
    makespans = set()
    for seed in range(5):
        world = SimWorld(FOUR, capacity=1, skew=uniform_skew(20_000_000, seed))
        world.run(lambda sim: FINE_1.run(sim, lambda _: 0.0))
        leaves = [line for sim in world.ranks for line in sim.log if line[1] == "leave"]
        assert len(leaves) == 2 * ROUNDS * 4
        makespans.add(world.now_ns)
        assert world.now_ns <= 2 * ROUNDS * 20_000_000
    assert len(makespans) == 5
