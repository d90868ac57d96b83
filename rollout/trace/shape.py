"""Cutting a trace to a machine's size without breaking its dependencies, and the token ids that are fed.

Lengths and waits are scaled; which turn depends on which, and their order, never change.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from rollout.trace.trajectory import Trajectory, Turn, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.trace.trajectory import Trace


@dataclass(frozen=True, slots=True)
class Shape:
    """What is kept of a trace, and at what size.

    fraction: share of the trajectories, the first ones in the file's order (rounded, at least one). turns: at most so
    many of each trajectory (None: all). length_scale: factor on new and output tokens, each at least 1. time_scale:
    factor on waits (the paper's P1 to P4 are 0, 0.01, 0.03 and 0.10; 1 is the original). seed: of the prompts' ids.
    context_scale: another factor, on new tokens alone, which makes prefill a larger part of the work.
    Raises UsageError on values out of range.
    """

    fraction: float = 1.0
    turns: int | None = None
    length_scale: float = 1.0
    time_scale: float = 1.0
    seed: int = 0
    context_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UsageError(f"--fraction {self.fraction:g}: must be above 0 and at most 1")
        if self.turns is not None and self.turns < 1:
            raise UsageError(f"--turns {self.turns}: a trajectory keeps at least one turn")
        if not 0 < self.length_scale < math.inf:
            raise UsageError(f"--length-scale {self.length_scale:g}: must be a finite number above 0")
        if not 0 < self.context_scale < math.inf:
            raise UsageError(f"--context-scale {self.context_scale:g}: must be a finite number above 0")
        if not 0 <= self.time_scale < math.inf:
            raise UsageError(f"--time-scale {self.time_scale:g}: must be a finite number of at least 0")

    def apply(self, trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """The shaped slice. Recorded context lengths are replaced by those of the replay."""
        kept = max(1, math.floor(self.fraction * len(trajectories) + 0.5))
        return tuple(self._trajectory(trajectory) for trajectory in trajectories[:kept])

    def _trajectory(self, trajectory: Trajectory) -> Trajectory:
        turns: list[Turn] = []
        context = 0
        for turn in trajectory.turns[: self.turns]:
            new, output = self._length(turn.new_tokens * self.context_scale), self._length(turn.output_tokens)
            arrival = None if turn.arrival_ms is None else turn.arrival_ms * self.time_scale
            turns.append(Turn(new, output, turn.wait_ms * self.time_scale, context, context + new, arrival))
            context += new + output
        return Trajectory(trajectory.id, tuple(turns))

    def _length(self, tokens: float) -> int:
        return max(1, math.floor(tokens * self.length_scale + 0.5))

    def describe(self, trace: Trace) -> str:
        """One line for titles: which part of which trace, at what size."""
        kept = self.apply(trace.trajectories)
        requests, inputs, outputs = counted(kept)
        turns = "" if self.turns is None else f" --turns {self.turns}"
        context = "" if self.context_scale == 1 else f" --context-scale {self.context_scale:g}"
        return (
            f"{trace.name}: {len(kept)} of {len(trace.trajectories)} conversations, {requests} requests,"
            f" {inputs:,} input and {outputs:,} output tokens"
            f" ({turns.lstrip()}{' ' if turns else ''}--length-scale {self.length_scale:g}{context}"
            f" --time-scale {self.time_scale:g} --seed {self.seed})"
        )


def new_tokens(seed: int, trajectory: str, turn: int, count: int, vocabulary: int) -> tuple[int, ...]:
    """The ids that a turn appends: `count` draws from 0 .. vocabulary-1.

    They depend on (seed, trajectory, turn) alone: the same for every policy, and whatever else is replayed.
    """
    draw = random.Random(f"{seed}/{trajectory}/{turn}").random  # the one generator whose stream Python guarantees
    return tuple(int(draw() * vocabulary) for _ in range(count))
