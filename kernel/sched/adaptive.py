"""`adaptive`: `fine` with a span chosen each round from validated spans (paper sections 6 and 7, segment policy)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernel.errors import UsageError
from kernel.sched.fine import Fine

if TYPE_CHECKING:
    from kernel.sched.planner import Situation
    from kernel.sched.policy import Limits


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """spans: the validated spans, increasing. pressure: waiting prefill tokens a decoding row at which P wins a step.

    Few decoding rows and much waiting prefill favour long segments (fewer rounds for P); many rows and little prefill
    favour short ones (D waits less). Raises UsageError.
    """

    spans: tuple[int, ...] = (1, 2, 3, 4)
    pressure: float = 8.0

    def __post_init__(self) -> None:
        if not self.spans or list(self.spans) != sorted(set(self.spans)) or self.spans[0] < 1:
            raise UsageError(f"spans={self.spans}: give increasing spans of at least 1")
        if not self.pressure > 0:
            raise UsageError(f"pressure={self.pressure}: must be above 0")


class Adaptive(Fine):
    """Chooses the span by D occupancy and P pressure; the order of entry is that of `fine`."""

    name: ClassVar[str] = "adaptive"
    Config = AdaptiveConfig  # type: ignore[assignment]

    def __init__(self, limits: Limits, config: AdaptiveConfig | None = None) -> None:
        super().__init__(limits)
        self.config = config or AdaptiveConfig()

    def span(self, now: Situation) -> int:
        chunks = now.memory.chunks if now.open else ()
        at_hand = sum(chunk.tokens for replica in chunks for chunk in replica)
        pressure = (at_hand + now.waiting) / max(1, now.rows)
        spans: tuple[int, ...] = self.config.spans
        step = 0
        threshold = self.config.pressure
        while step + 1 < len(spans) and pressure >= threshold:
            step, threshold = step + 1, threshold * 4
        return spans[step]
