"""What a runner is asked and what it answers: one tool on one protocol, in a process of its own.

    RUNNER RANKS SEGMENTS ITERATIONS VARIANT BOUND LIMIT        BOUND is a number, or `none`; LIMIT is in seconds

The answer is one JSON object on the last line of stdout. Like protocol.py, this imports the standard library only.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """One question. `bound` limits the tool's search in the tool's own measure; none means every schedule."""

    ranks: int
    segments: int
    iterations: int
    variant: str
    bound: int | None
    limit: float

    def argv(self) -> list[str]:
        """As `read` takes it."""
        bound = "none" if self.bound is None else str(self.bound)
        return [str(self.ranks), str(self.segments), str(self.iterations), self.variant, bound, str(self.limit)]


@dataclass(frozen=True, slots=True)
class Answer:
    """`verdict` is proved, deadlock or unfinished; `scope` says for which schedules a proof holds.

    `seconds` excludes the interpreter's start and imports. `says` is the first line of the tool's own words.
    """

    verdict: str
    executions: int
    seconds: float
    scope: str
    says: str = ""

    def print(self) -> None:
        """For the process that asked."""
        print(json.dumps(asdict(self)))


def read() -> Cell:
    """The question on this process's command line."""
    ranks, segments, iterations, variant, bound, limit = sys.argv[1:]
    found = None if bound == "none" else int(bound)
    return Cell(int(ranks), int(segments), int(iterations), variant, found, float(limit))
