"""The simulated model: tokens that depend on the context alone, a KV pool that notices misuse, costs that differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.driver import Driver
from kernel.errors import ModelError
from kernel.program import Program
from kernel.request import Phase, Row, Sampled, SamplingParams
from kernel.step import Step
from kernel.topology import World
from verify.sim.kernels import Kernel
from verify.sim.kv import SimKV, continuation, draw
from verify.sim.model import FREE, CostModel, SimModel
from verify.sim.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.sim.world import SimRank

GREEDY = SamplingParams(max_tokens=50)
DONE = Kernel("done")
DONE.finished = True


def feed(kv: SimKV, row: Row, phase: Phase = Phase.P) -> int:
    """Feed a row whose work ends at once."""
    context = kv.feed(phase, row)
    kv.enqueued(phase, row, DONE)
    return context


# -- KV ---------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.lists(st.integers(1, 40), max_size=4),
    st.integers(1, 8),
    st.booleans(),
)
def test_tokens_depend_on_the_context_alone(prompt: list[int], cuts: list[int], size: int, audit: bool) -> None:
    kv = SimKV(size, audit)
    blocks = tuple(reversed(range(100, 100 + 1 + (len(prompt) + 10) // size)))
    edges = sorted({0, len(prompt), *(cut for cut in cuts if cut < len(prompt))})
    for start, end in pairwise(edges):
        context = feed(kv, Row(3, tuple(prompt[start:end]), start, blocks, GREEDY))
    tokens = []
    for at in range(len(prompt), len(prompt) + 10):
        tokens.append(draw(context, GREEDY, 1000).token)
        kv.slots[3] = tokens[-1]
        context = feed(kv, Row(3, None, at, blocks, GREEDY), Phase.D)
    assert tokens == list(islice(continuation(prompt, GREEDY, 1000), 10))


def test_draws_spread_over_the_vocabulary_and_depend_on_order_and_seed() -> None:
    drawn = {next(continuation([a, b], GREEDY, 1_000_000)) for a in range(30) for b in range(30)}
    assert len(drawn) > 890
    warm = [replace(GREEDY, temperature=1.0, seed=seed) for seed in (1, 2)]
    assert next(continuation([1], warm[0], 10**6)) != next(continuation([1], warm[1], 10**6))
    cold = [replace(GREEDY, seed=seed) for seed in (1, 2)]
    assert next(continuation([1], cold[0], 10**6)) == next(continuation([1], cold[1], 10**6))


def test_a_continuation_ends_with_its_stop_token() -> None:
    tokens = list(continuation([1, 2, 3], GREEDY, 1000))
    stop = tokens[7]
    stopping = replace(GREEDY, stop_token_ids=(stop,))
    assert list(continuation([1, 2, 3], stopping, 1000)) == tokens[: tokens.index(stop) + 1]
    # Ids that were asked for end a turn also where the text's own end does not.
    assert list(continuation([1, 2, 3], replace(stopping, ignore_eos=True), 1000)) == tokens[: tokens.index(stop) + 1]


def test_misuse_of_blocks_is_noticed() -> None:
    kv = SimKV(4)
    prompt = tuple(range(10))
    feed(kv, Row(0, prompt, 0, (5, 6, 7), GREEDY))
    with pytest.raises(ModelError, match="slot 1 reads position 4, which was never written in block 8"):
        feed(kv, Row(1, (1,), 5, (5, 8), GREEDY))
    with pytest.raises(ModelError, match="reads block 6 as its 0-th: it holds another context"):
        feed(kv, Row(1, (1,), 8, (6, 5, 9), GREEDY))
    with pytest.raises(ModelError, match="feeds 3 tokens at 10 in 3 blocks"):
        feed(kv, Row(0, (1, 2, 3), 10, (5, 6, 7), GREEDY))
    with pytest.raises(ModelError, match="slot 9 decodes, but nothing was drawn in it"):
        feed(kv, Row(9, None, 10, (5, 6, 7), GREEDY))
    feed(kv, Row(1, (99,), 5, (5, 6), GREEDY))  # another turn writes into block 6, so its tail is lost
    with pytest.raises(ModelError, match="reads position 7, which was never written in block 6"):
        feed(kv, Row(0, (1,), 10, (5, 6, 7), GREEDY))


def test_the_other_phase_must_have_drained() -> None:
    kv, row = SimKV(4), Row(0, (1, 2, 3), 0, (5,), GREEDY)
    kv.feed(Phase.P, row)
    kv.slots[0] = 1
    decode = Row(0, None, 3, (5,), GREEDY)
    with pytest.raises(ModelError, match="slot 0 of D touches block 5 while P may still use it"):
        kv.feed(Phase.D, decode)
    running = Kernel("head")
    kv.enqueued(Phase.P, row, running)
    with pytest.raises(ModelError, match="while P may still use it"):
        kv.feed(Phase.D, decode)
    running.finished = True
    kv.feed(Phase.D, decode)
    with pytest.raises(ModelError, match="slot 1 of P touches block 5 while D may still use it"):
        kv.feed(Phase.P, Row(1, (7,), 0, (5,), GREEDY))


# -- forward ----------------------------------------------------------------------------------------------------------


def forward(
    world: World, phase: Phase, layers: int, rows: Sequence[Sequence[Row]], cost: CostModel = FREE
) -> tuple[SimWorld, list[list[Sampled | None]]]:
    """One forward of each replica's rows on every rank of a world; the world and what each rank drew."""
    program = Program(world, phase, layers)
    sizes = [sum(row.fed for row in each) for each in rows]
    if phase is Phase.D:
        bucket = -(-max(sizes) // world.atp) * world.atp
        sizes = [bucket] * world.adp
    simulated = SimWorld(world, collective_ns=cost.collective, contention=cost.contention)

    async def main(sim: SimRank) -> list[Sampled | None]:
        mine = rows[world.replica(sim.rank)]
        device, kv = sim.device, SimKV(4)
        if phase is Phase.D:
            for row in mine:
                feed(kv, row._replace(tokens=tuple(range(row.start)), start=0), Phase.D)
                kv.slots[row.slot] = row.start
        model = SimModel(world, device, layers, cost, kv)
        route = device.route() if program.world.route != "none" and phase is Phase.P else None
        step = Step(program, sim.rank, sizes, sum(r.fed for r in mine), device.collectives(phase), device.layout, route)
        driver = Driver(model.forward(step, mine), step, lambda: device.scope(phase))

        def work() -> list[Sampled | None]:
            if route is not None:
                route.reserve([call for call in program.calls if call.routed])
            driver.advance(1 << 30)
            assert driver.result is not None
            return driver.result

        return await device.stream(phase).submit(work, str(phase)).wait()

    return simulated, simulated.run(main)


WORLDS = [
    World(1),
    World(2),
    World(4, adp=2),
    World(4, adp=2, gather="flat"),
    World(4, adp=2, route="all"),
    World(4, adp=4, ep=4),
    World(8, adp=2, ep=8),
    World(8, adp=4, ep=2),
]


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_forward_runs_every_collective_of_its_program_on_every_rank(world: World, phase: Phase) -> None:
    rows: list[list[Row]] = []
    for replica in range(world.adp):  # the last replica is idle, and so would be the only one of a single replica
        count = 0 if replica and replica == world.adp - 1 else replica + 1
        blocks = [tuple(range(10 * i, 10 * i + 4)) for i in range(count)]
        fed = (1, 2, 3) if phase is Phase.P else None
        rows.append([Row(i, fed, 0 if fed else 5 + i, blocks[i], GREEDY) for i in range(count)])
    simulated, drawn = forward(world, phase, 3, rows)
    calls = [f"{call.op}" for call in Program(world, phase, 3).calls]
    ops = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    for sim in simulated.ranks:
        starts = [line[3].split()[1] for line in sim.log if line[1] == "enqueue" and "#" in line[3]]
        assert [ops[op] for op in starts] == [op.removesuffix("v") for op in calls]
        mine = rows[world.replica(sim.rank)]
        for row, sampled in zip(mine, drawn[sim.rank], strict=True):
            prompt = row.tokens if row.tokens is not None else (*range(row.start), row.start)
            assert sampled is not None
            assert sampled.token == next(continuation(prompt, GREEDY, 32_000))
            assert sampled.logprob < 0


def test_inner_chunks_draw_nothing() -> None:
    rows = [[Row(0, (1, 2, 3), 0, (0,), None), Row(1, (4,), 0, (1,), GREEDY)]]
    _, drawn = forward(World(1), Phase.P, 2, rows)
    assert drawn[0][0] is None
    assert drawn[0][1] is not None


def test_time_grows_with_tokens_context_and_layers_and_tells_the_phases_apart() -> None:
    world, cost = World(4, adp=2), CostModel()

    def took(phase: Phase, layers: int, fed: int, start: int = 0) -> int:
        blocks = tuple(range(1 + (start + fed) // 4))
        if phase is Phase.D:
            spread = [tuple(1000 * i + block for block in blocks) for i in range(fed)]
            rows = [[Row(i, None, start, spread[i], GREEDY) for i in range(fed)]] * 2
        else:
            rows = [[Row(0, tuple(range(fed)), 0, blocks, GREEDY)]] * 2
        simulated, _ = forward(world, phase, layers, rows, cost)
        return simulated.now_ns

    assert took(Phase.P, 4, 512) == pytest.approx(2 * took(Phase.P, 2, 512), rel=0.2)
    assert took(Phase.P, 2, 1024) > 1.5 * took(Phase.P, 2, 512)
    assert took(Phase.D, 2, 4, start=400) > took(Phase.D, 2, 4, start=40)
    assert took(Phase.D, 2, 8, start=40) < 1.2 * took(Phase.D, 2, 4, start=40)  # decode reads weights, not rows
    assert took(Phase.P, 2, 512) > 5 * took(Phase.D, 2, 4, start=40)


def test_a_wrong_row_count_is_named() -> None:
    program = Program(World(1), Phase.P, 1)

    async def main(sim: SimRank) -> None:
        step = Step(program, 0, [2], 2, sim.device.collectives(Phase.P), sim.device.layout)
        model = SimModel(World(1), sim.device, 1, FREE, SimKV(4))
        rows = [Row(0, (1, 2, 3), 0, (0,), GREEDY)]
        driver = Driver(model.forward(step, rows), step, lambda: sim.device.scope(Phase.P))
        await sim.device.stream(Phase.P).submit(lambda: driver.advance(9), "P").wait()

    with pytest.raises(ModelError, match=r"returned 2 rows where 3 are"):
        SimWorld(World(1)).run(main)
