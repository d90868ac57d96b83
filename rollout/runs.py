"""What a command runs: a campaign, of one run for each policy and repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout.report.files import slug

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from models.config import DecoderConfig
    from rollout.args import Options
    from rollout.replay import Row
    from rollout.trace.trajectory import Trajectory
    from verify.intervals import Interval


@dataclass(slots=True)
class Run:
    """One policy, one repeat. folder: holds `record/rank<k>.ring`. rows, intervals: filled as the run goes."""

    policy: str
    repeat: int
    folder: Path
    rows: list[Row] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Campaign:
    """A checked command, ready to run."""

    options: Options
    out: Path
    model: Path
    config: DecoderConfig
    title: str
    trajectories: tuple[Trajectory, ...]
    runs: tuple[Run, ...]
    fingerprint: str
    held: int
    """Keeps other runs out of the directory."""
    made: tuple[Path, ...] = ()
    """Directories that were made for it, the innermost first."""


def runs_of(policies: Sequence[str], repeat: int, out: Path) -> tuple[Run, ...]:
    """Repeats outermost. A lone run keeps its record in `out/record`, several keep theirs in a folder each."""
    runs = []
    for number in range(repeat):
        for at, policy in enumerate(policies):
            name = slug(policy)
            if [slug(each) for each in policies].count(name) > 1:
                name = f"{name}-{at}"
            several = len(policies) * repeat > 1
            folder = out / (f"{name}-{number}" if repeat > 1 else name) if several else out
            runs.append(Run(policy, number, folder))
    return tuple(runs)
