"""The soak of `bench/soak.py`, as short as a test must be: its checks hold, and memory stays where it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.soak import Sample, slope, soak
from kernel.topology import World

if TYPE_CHECKING:
    from rollout.ranks.nursery import Nursery

GROWTH_MIB = 24.0


@pytest.mark.slow
async def test_nothing_leaks_and_nothing_jams(nursery: Nursery) -> None:
    run = await soak(
        lambda run: sum(n for name, n in run.counts.items() if "episodes" in name) < 4, 1, nursery, World(2, 2, 2)
    )
    assert min(run.checks.values()) > 0
    assert run.counts["aborted"] > 0
    assert run.counts["closed in flight"] > 0
    assert run.counts["tiny"] >= 200
    assert run.counts["waited for the pool"] >= 16
    for first, last in zip(run.samples[0], run.samples[-1], strict=True):
        assert last.mib - first.mib < GROWTH_MIB


def test_the_fitted_line_is_that_of_the_samples() -> None:
    samples = [Sample(60.0 * minute, 100 + minute / 60 * 7, 5, 1, 1) for minute in range(30)]
    assert slope(samples) == pytest.approx(7)
    assert slope(samples[:1]) == slope([]) == 0
