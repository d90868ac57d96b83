"""State that one phase owns (paper section 5). A function given one phase's state cannot reach the other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel.program import Program
from kernel.request import Phase

if TYPE_CHECKING:
    from kernel.ports import Collectives, Device, Route, Stream
    from kernel.topology import World


@dataclass(frozen=True, slots=True)
class PhaseState:
    """One phase's stream, communicators and program; for P also its way onto D's launch stream."""

    phase: Phase
    stream: Stream
    collectives: Collectives
    program: Program
    route: Route | None = None


def own(device: Device, world: World, layers: int, phase: Phase) -> PhaseState:
    """The state that `phase` owns on `device`."""
    return PhaseState(
        phase=phase,
        stream=device.stream(phase),
        collectives=device.collectives(phase),
        program=Program(world, phase, layers),
        route=device.route() if phase is Phase.P and world.route != "none" else None,
    )
