"""`adaptive`: `fine` with a span chosen for each epoch from validated ones (paper sections 6 and 7, segment policy)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernel.errors import UsageError
from kernel.sched.fine import Fine

if TYPE_CHECKING:
    from kernel.sched.planner import Situation
    from kernel.sched.policy import Limits, Plan


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """spans: the validated spans, increasing. pressures: waiting tokens a decoding row from which the next is taken.

    Few decoding rows and much prefill favour long segments (fewer rounds for P); many rows and little prefill favour
    short ones (D waits less). The defaults were chosen in the simulated world. Raises UsageError.
    """

    spans: tuple[int, ...] = (1, 2, 3, 4)
    pressures: tuple[float, ...] = (1.0, 4.0, 8.0)

    def __post_init__(self) -> None:
        if not self.spans or list(self.spans) != sorted(set(self.spans)) or self.spans[0] < 1:
            raise UsageError(f"spans={self.spans}: give increasing spans of at least 1")
        if len(self.pressures) != len(self.spans) - 1 or list(self.pressures) != sorted(self.pressures):
            raise UsageError(
                f"pressures={self.pressures}: give {len(self.spans) - 1} increasing ones, one a span but the first"
            )


class Adaptive(Fine):
    """Chooses the span by D occupancy and P pressure; the order of entry is that of `fine`."""

    name: ClassVar[str] = "adaptive"
    Config = AdaptiveConfig  # type: ignore[assignment]

    def __init__(self, limits: Limits, config: AdaptiveConfig | None = None) -> None:
        super().__init__(limits)
        self.config = config or AdaptiveConfig()

    def span(self, now: Situation) -> int:
        """One span an epoch, chosen when it starts by the waiting prefill tokens that stand against a decoding row."""
        spans: tuple[int, ...] = self.config.spans
        if now.open and now.memory.extra:
            return spans[int(now.memory.extra[0])]
        return spans[self._step(now)]

    def remember(self, now: Situation, plan: Plan) -> tuple[Any, ...]:
        """Which of the spans the open epoch has."""
        if not now.p_active:
            return ()
        return now.memory.extra if now.open and now.memory.extra else (self._step(now),)

    def _step(self, now: Situation) -> int:
        pressure = now.waiting / max(1, now.rows)
        return sum(pressure >= each for each in self.config.pressures)
