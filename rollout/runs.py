"""What a command runs: a campaign, of one run for each policy and repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
