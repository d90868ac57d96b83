"""Trajectories, and a line of the file that they are read from.

A trajectory is one conversation: turns that depend on each other. Turn k's prompt is the whole context so far (the
previous prompt and the tokens generated for it) and `new_tokens` more, so lengths and waits are all that is recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST_MS: Final = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a trajectory, in tokens and milliseconds.

    new_tokens: what the turn appends to the context. output_tokens: how many are generated. wait_ms: from the end of
    the previous turn to the release of this one; on a first turn from the start of the replay. retained_tokens: context
    that an earlier request left behind, input_tokens: the whole prompt, both as recorded. arrival_ms: recorded arrival
    since the start of the trace, where the format has one.
    """

    new_tokens: int
    output_tokens: int
    wait_ms: float = 0.0
    retained_tokens: int = 0
    input_tokens: int = 0
    arrival_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Causally dependent turns, at least one."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def prompts(self) -> tuple[int, ...]:
        """Prompt tokens of each turn when the trajectory is replayed: the context so far and the new tokens."""
        lengths, context = [], 0
        for turn in self.turns:
            lengths.append(context + turn.new_tokens)
            context = lengths[-1] + turn.output_tokens
        return tuple(lengths)

    @property
    def longest(self) -> int:
        """Tokens of context at the end of the last turn."""
        return sum(turn.new_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace file. name: for titles. format: `paper` or `mooncake`. sha256: of the file's bytes."""

    name: str
    format: str
    sha256: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One JSON object of a trace, with the place to name when a field is wrong.

    Every accessor raises UsageError as `file:line: field 'name' ...`.
    """

    file: str
    at: int
    record: dict[str, Any]

    def integer(self, field: str, least: int) -> int:
        """An integer of at least `least`."""
        value = self._present(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(field, f"must be an integer of at least {least}")
        return value

    def wait(self, field: str, default: float | None = None) -> float:
        """A number of milliseconds that somebody may wait for: at most `LONGEST_MS`."""
        value = self.number(field, default)
        if value > LONGEST_MS:
            raise self.error(field, f"must be at most {LONGEST_MS:,} ms (seven days)")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number of at least 0, in the field's own unit; `default` where it is absent or null."""
        value = self.record.get(field)
        if value is None and default is not None:
            return default
        value = self._present(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.error(field, "must be a finite number of at least 0")
        return value

    def name(self, field: str) -> str:
        """An identifier: a string that is not empty, or an integer."""
        value = self._present(field)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise self.error(field, "must be an identifier (a string or an integer)")
        try:
            return str(value).encode().decode()
        except UnicodeEncodeError:
            raise self.error(field, "must be text: it holds half of a surrogate pair") from None

    def error(self, field: str, must: str) -> UsageError:
        """The error to raise about `field`."""
        seen = repr(self.record[field]) if field in self.record else "missing"
        return UsageError(f"{self.file}:{self.at}: field {field!r} is {seen[:60]}: it {must}")

    def _present(self, field: str) -> object:
        if field not in self.record:
            raise self.error(field, "is required")
        return self.record[field]


def counted(trajectories: Iterable[Trajectory]) -> tuple[int, int, int]:
    """(requests, input tokens as replayed, output tokens)."""
    requests = inputs = outputs = 0
    for trajectory in trajectories:
        requests += len(trajectory.turns)
        inputs += sum(trajectory.prompts)
        outputs += sum(turn.output_tokens for turn in trajectory.turns)
    return requests, inputs, outputs
