"""`fine`: the rank-aligned segment turnstile (paper section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel.errors import UsageError
from kernel.sched.planner import Planner, Situation
from kernel.sched.policy import Gate, Guarantees, Limits


@dataclass(frozen=True, slots=True)
class FineConfig:
    """span: boundaries K that P may pass in a round. Raises UsageError below 1."""

    span: int = 1

    def __post_init__(self) -> None:
        if self.span < 1:
            raise UsageError(f"span={self.span}: a span is at least 1 boundary")


class Fine(Planner):
    """Each round: all ranks enqueue one D iteration in a common order, then P runs on by one segment of `span`."""

    name: ClassVar[str] = "fine"
    guarantees: ClassVar[Guarantees] = Guarantees(decode_bound="span")
    Config = FineConfig

    def __init__(self, limits: Limits, config: FineConfig | None = None) -> None:
        super().__init__(limits, config or FineConfig())

    def span(self, now: Situation) -> int:
        span: int = self.config.span
        return span

    async def turn(self, gate: Gate) -> None:
        if not gate.p_active:
            gate.launch_decode()
            return
        await gate.reached()
        await gate.rendezvous("pre-d")
        gate.launch_decode()
        if not gate.d_ready and gate.plan.activate < 0:
            # Nothing can become ready before this epoch ends, so there is nobody to make room for.
            await gate.completed()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span)
