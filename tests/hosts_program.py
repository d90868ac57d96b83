"""Run under torchrun by `test_hosts`: a few greedy trajectories on the world given, their tokens as one JSON line."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from kernel.topology import World
from rollout.engine import Engine
from rollout.ranks.torchrun import place
from rollout.ranks.worker import join_world
from tests.engines import trajectories


async def generate(model: str, world: World) -> list[list[list[int]]]:
    """Tokens of each turn of each trajectory."""
    async with Engine(model, world, kv_tokens=4096, prefill_tokens=48, rows=8) as engine:
        done = await trajectories(engine, count=4, turns=2, seed=3)
    return [[list(turn.done.tokens) for turn in each] for each in done]


def main() -> int:
    """The launcher's part on rank 0, a rank's on the others."""
    here = place()
    if here is not None and here.rank:
        return join_world()
    model, out, *sizes = sys.argv[1:]
    size, adp, ep = map(int, sizes[:3])
    world = World(size, adp, ep, exchange=sizes[3] if sizes[3:] else "none")
    Path(out).write_text(json.dumps(asyncio.run(generate(model, world))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
