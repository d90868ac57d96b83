"""A policy for bench_decode.py: `fine`, less the exchange of views in every other stretch of decode-only rounds.

A rank then answers itself, as if all had said what it says. That is wrong in general, and right as long as the ranks
are alike: equally many rows each, nobody waiting, nothing arriving. It shows what a decode loop would cost that never
asked the other ranks, in the same run, and is of no other use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel.errors import PolicyError
from kernel.sched.fine import Fine

if TYPE_CHECKING:
    from kernel.sched.policy import Gate, Limits

ON, OFF = "exchange on", "exchange off"


@dataclass(frozen=True, slots=True)
class SwitchConfig:
    """rows: of each replica before it begins. settle: rounds before that. length: of a stretch, pairs: of stretches."""

    rows: int = 8
    settle: int = 20
    length: int = 40
    pairs: int = 20


class Answers:
    """A rendezvous in which everybody says what this rank says, while `off`; else the real one."""

    def __init__(self, real: Any, size: int) -> None:
        self.real, self.size, self.off, self.count = real, size, False, 0

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """All payloads in rank order."""
        if not self.off:
            answers: list[bytes] = await self.real.exchange(tag, payload)
            return answers
        self.count += 1
        return [payload] * self.size

    def close(self) -> None:
        """Close the real one."""
        self.real.close()


class Switch(Fine):
    """See the module."""

    name = "switch"
    Config = SwitchConfig  # type: ignore[assignment]

    def __init__(self, limits: Limits, config: SwitchConfig | None = None) -> None:
        super().__init__(limits)
        self.sizes = config or SwitchConfig()
        self._began = -1
        self._answers: Answers | None = None

    async def turn(self, gate: Gate) -> None:
        """As `fine`; what is decided here follows from the plan alone, so that all ranks switch in the same round."""
        await super().turn(gate)
        sizes, plan, rank = self.sizes, gate.plan, gate._rank  # type: ignore[attr-defined]
        if self._answers is None:
            self._answers = Answers(rank.ports.rendezvous, self.limits.size)
            object.__setattr__(rank.ports, "rendezvous", self._answers)
        full = not gate.p_active and set(plan.decode) == {sizes.rows} and len(plan.decode) == self.limits.replicas
        if not full:
            self._began = -1 if self._began < 0 else self._began
            self._answers.off = False
            return
        self._began = plan.round if self._began < 0 else self._began
        at = plan.round - self._began - sizes.settle
        stretch, offset = divmod(at, sizes.length)
        off = 0 <= stretch < 2 * sizes.pairs and stretch % 2 == 1
        if at >= 0 and offset == 0 and stretch <= 2 * sizes.pairs:
            rank._journal.mark(OFF if off else ON, stretch)
            if stretch == 2 and self._answers.count < sizes.length - 1:
                raise PolicyError(
                    f"rank {rank.rank}: only {self._answers.count} of {sizes.length} exchanges could be left out:"
                    " the rank no longer asks its ports for each"
                )
        self._answers.off = off
