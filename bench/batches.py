"""Batches of equal requests on an engine that stays up, for benches that compare runs of one kind with another."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.request import SamplingParams
from rollout.ranks.launcher import Launcher

if TYPE_CHECKING:
    from rollout.engine import Engine

SHAPE: Final[dict[str, int]] = {
    "vocab": 512, "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 32, "experts": 8, "top_k": 2,
    "expert_width": 128,
}  # fmt: skip
"""Of the model: that of bench_engine.py."""


def cpu_s(engine: Engine) -> float:
    """CPU time of all threads of an engine's ranks so far, where these are this host's."""
    assert isinstance(engine._launcher, Launcher)
    total = 0
    for rank in engine._launcher._ranks:
        for task in Path(f"/proc/{rank.process.pid}/task").iterdir():
            with suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


async def batch(
    engine: Engine, requests: int, prompt: int, output: int, seed: int = 0
) -> tuple[list[tuple[int, ...]], float]:
    """Submit them all while the engine is paused, so that they start together; tokens in order, and seconds."""
    draws = random.Random(seed)
    await engine.pause()
    sessions = [engine.session() for _ in range(requests)]
    vocabulary = engine.config.vocab_size
    turns = [
        each.generate(draws.choices(range(vocabulary), k=prompt), SamplingParams(max_tokens=output, ignore_eos=True))
        for each in sessions
    ]
    await asyncio.sleep(0.1)  # until all ranks have heard of them
    start = time.perf_counter()
    await engine.resume()
    done = await asyncio.gather(*turns)
    seconds = time.perf_counter() - start
    for each in sessions:
        await each.close()
    return [each.tokens for each in done], seconds
