"""`patient`: collects prompts before it interrupts decode, and keeps nobody waiting for ever.

Each prefill epoch costs decode a detour, however few tokens it carries. So while rows decode, this policy lets prompts
gather: an epoch starts when they fill it, or when somebody has waited for `patience` rounds. From then on it is `fine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernel.errors import UsageError
from kernel.sched.fine import Fine

if TYPE_CHECKING:
    from kernel.sched.planner import Situation
    from kernel.sched.policy import Limits, Plan


@dataclass(frozen=True, slots=True)
class PatientConfig:
    """span: boundaries that P passes in a round. patience: rounds for which a prompt waits at most for company."""

    span: int = 1
    patience: int = 4

    def __post_init__(self) -> None:
        if self.span < 1 or self.patience < 0:
            raise UsageError(f"span={self.span}, patience={self.patience}: at least 1, and at least 0")


class Patient(Fine):
    """Starts an epoch when nobody decodes, when it is full, or when a prompt has waited long enough."""

    name: ClassVar[str] = "patient"
    Config = PatientConfig  # type: ignore[assignment]

    def __init__(self, limits: Limits, config: PatientConfig | None = None) -> None:
        super().__init__(limits)
        self.config = config or PatientConfig()

    def prefill_now(self, now: Situation) -> bool:
        full = now.waiting >= self.limits.prefill_tokens * self.limits.replicas
        return not now.rows or full or self._waited(now) >= self.config.patience

    def remember(self, now: Situation, plan: Plan) -> tuple[Any, ...]:
        """For how many rounds prompts have been waiting; part of the digest, so all ranks count alike."""
        if plan.activate >= 0 or not now.waiting:
            return ()
        return (self._waited(now) + 1,)

    def _waited(self, now: Situation) -> int:
        return int(now.memory.extra[0]) if now.memory.extra else 0
