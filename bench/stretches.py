"""What one thing costs a decode round in CPU time, from stretches of one run with it and without (`stretch_policy`).

Runs of their own differ by several per cent on a machine that others use, whatever is compared; stretches of a fraction
of a second, next to each other in the same processes, differ by less, and there are many of them.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import measured
from bench.batches import batch
from bench.stretch_policy import WITH, WITHOUT, StretchConfig
from kernel.record import Kind, read_run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.engine import Engine


def pairs(marks: Iterable[tuple[str, int]]) -> tuple[list[float], list[float]]:
    """CPU nanoseconds of stretches with it and without, in order. Raises SystemExit where they are not pairs."""
    found: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for text, number in marks:
        if text in found:
            found[text].append(number)
    if not found[WITH] or len(found[WITH]) != len(found[WITHOUT]):
        raise SystemExit(f"the policy told of {len(found[WITH])} and {len(found[WITHOUT])} stretches: more tokens?")
    return found[WITH], found[WITHOUT]


async def measure(engine: Engine, run: Path, config: StretchConfig, prompt: int) -> dict[str, Any]:
    """One run on an engine that is up: microseconds of CPU time a round of all ranks, and per cent more with it."""
    file = Path(__file__).with_name("stretch_policy.py")
    options = ",".join(f"{name}={getattr(config, name)}" for name in config.__slots__)
    await engine.flush()
    await engine.use_policy(f"{file}:Stretch:{options}", record=run)
    await batch(engine, config.rows * engine.world.adp, prompt, config.rounds)
    await engine.use_policy("fine")
    with_, without = [], []
    for recording in read_run(run).values():
        each = pairs((event.text, event.a) for event in recording.events if event.kind is Kind.MARK)
        with_.append(each[0])
        without.append(each[1])
    sums = [[sum(ranks) for ranks in zip(*each, strict=True)] for each in (with_, without)]
    ratio = measured.paired(*sums)
    us = [statistics.median(each) / config.length / 1e3 for each in sums]
    return {
        "with_us": round(us[0], 1), "without_us": round(us[1], 1), "stretches_of": config.length, **ratio,
        "percent": measured.percent_more(ratio),
    }  # fmt: skip
