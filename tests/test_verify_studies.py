"""Policy studies in virtual time, on the real rank: the span selector, and the paper's skew stress (section 7)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kernel.errors import Divergence
from kernel.request import Sampled, SamplingParams
from kernel.sched.adaptive import Adaptive
from kernel.sched.fine import Fine
from kernel.topology import World
from verify.sim.arrivals import SimTurn, Trajectory
from verify.sim.model import FREE, SimModel
from verify.sim.rendezvous import uniform_skew
from verify.sim.simulation import Engine, simulate

if TYPE_CHECKING:
    from kernel.sched.planner import Situation
    from kernel.sched.policy import Gate, Limits

WORLD = World(4, 2, 4)


def load(count: int, turns: int, new: float, out: float, wait_ms: float) -> list[Trajectory]:
    """Closed-loop trajectories with log-normal lengths around `new` and `out` tokens."""
    rng = random.Random(0)

    def turn(number: int) -> SimTurn:
        tokens = max(1, int(rng.lognormvariate(0, 0.5) * new))
        longest = max(2, int(rng.lognormvariate(0, 0.5) * out))
        prompt = tuple(rng.randrange(1000) for _ in range(tokens))
        wait = int(wait_ms * 1e6 * (rng.random() + 0.5)) if number else 0
        return SimTurn(prompt, SamplingParams(max_tokens=longest, ignore_eos=True), wait)

    return [Trajectory(session, tuple(turn(number) for number in range(turns))) for session in range(count)]


@pytest.mark.slow
def test_the_selector_picks_other_spans_at_other_loads_and_is_near_the_best() -> None:
    engine = Engine(layers=8, blocks=4000, audit=False)
    chosen = {}
    for name, trajectories in {
        "much prefill": load(16, 3, new=600, out=20, wait_ms=0),
        "little prefill": load(16, 2, new=20, out=40, wait_ms=20),
    }.items():
        spans: list[int] = []

        class Watched(Adaptive):
            async def turn(self, gate: Gate) -> None:
                if gate.p_active and gate.d_ready:
                    spans.append(gate.plan.span)  # noqa: B023 (called within this turn of the loop)
                await super().turn(gate)

        found = simulate(WORLD, "", trajectories, engine, log=False, make_policy=lambda _, limits: Watched(limits))
        fixed = [
            simulate(WORLD, f"fine:span={span}", trajectories, engine, log=False).makespan_ns for span in (1, 2, 3, 4)
        ]
        assert found.makespan_ns <= 1.01 * min(fixed), (name, found.makespan_ns, fixed)
        chosen[name] = max(set(spans), key=spans.count)
    assert chosen["much prefill"] > chosen["little prefill"]


@pytest.mark.slow
def test_skew_of_up_to_20_ms_does_not_stop_the_turnstile() -> None:
    """2,560 cycles over five seeds: rounds in which a D iteration met an open epoch."""
    wanted, total = 512, 0
    for seed in range(5):
        cycles = [0] * WORLD.size

        class Counted(Fine):
            async def turn(self, gate: Gate) -> None:
                met = gate.p_active and gate.d_ready
                await super().turn(gate)
                cycles[0] += met  # noqa: B023

        trajectories = load(110, 8, new=60, out=12, wait_ms=2)
        outcome = simulate(
            WORLD, "", trajectories, Engine(layers=10, audit=False), log=False,
            skew=uniform_skew(20_000_000, seed),
            make_policy=lambda _, limits: Counted(limits),
        )  # fmt: skip
        assert all(turn.finish == "length" for turn in outcome.turns.values())
        assert cycles[0] >= WORLD.size * wanted, cycles
        total += cycles[0] // WORLD.size
    assert total >= 2560


def test_a_rank_that_commits_another_token_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SimModel._draw
    drawn = []

    def one_differs(self: SimModel, row: object, context: int) -> Sampled | None:
        sampled = honest(self, row, context)  # type: ignore[arg-type]
        drawn.append(sampled)
        if len(drawn) == 30 and sampled is not None:
            return Sampled(sampled.token ^ 1, sampled.logprob)
        return sampled

    monkeypatch.setattr(SimModel, "_draw", one_differs)
    with pytest.raises(Divergence, match=r"rank \d, \d differs in tokens at round \d+: rank \d: \d+, rank \d: \d+"):
        simulate(WORLD, "fine", load(4, 2, new=10, out=10, wait_ms=0), Engine(cost=FREE))


def test_a_plan_that_depends_on_the_rank_stops_the_run() -> None:
    class Local(Fine):
        def __init__(self, limits: Limits) -> None:
            super().__init__(limits)
            self.mine = len(made)
            made.append(self)

        def span(self, now: Situation) -> int:
            return 2 if self.mine == 3 and now.p_active else 1

        async def turn(self, gate: Gate) -> None:
            if gate.p_active:
                await gate.reached()
                await gate.rendezvous("pre-d")
                launched.append(gate.plan.span)
            gate.launch_decode()
            gate.release(gate.plan.span)

    made: list[Local] = []
    launched: list[int] = []
    with pytest.raises(Divergence, match=r"rank 3 differs in span at round \d+"):
        simulate(
            WORLD,
            "",
            load(8, 3, new=30, out=20, wait_ms=1),
            Engine(layers=4, prefill_tokens=32),
            make_policy=lambda _, lim: Local(lim),
        )
    assert 2 not in launched, "the round's own pre-d must stop it before its D launch"
