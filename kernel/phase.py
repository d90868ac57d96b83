"""State that one phase owns (paper section 5). A function given one phase's state cannot reach the other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.program import Program
from kernel.request import Phase

if TYPE_CHECKING:
    from kernel.ports import Collectives, Device, LowLatencyExchange, NormalExchange, Route, Stream
    from kernel.topology import World


@dataclass(frozen=True, slots=True)
class PhaseState:
    """One phase's stream, communicators, expert exchange and program; for P also its way onto D's launch stream.

    deferred: see `kernel.ports.Device`. normal, low_latency: P's and D's exchange, each None for the other phase and
    where there is none.
    """

    phase: Phase
    stream: Stream
    collectives: Collectives
    program: Program
    route: Route | None = None
    deferred: bool = False
    normal: NormalExchange | None = None
    low_latency: LowLatencyExchange | None = None


def own(device: Device, world: World, layers: int, phase: Phase) -> PhaseState:
    """The state that `phase` owns on `device`. Raises UsageError for a world that needs an exchange, without one."""
    exchange = device.expert_exchange if world.splits else None
    if world.splits and exchange is None:
        raise UsageError(f"world {world} needs an expert exchange, and its device has none: choose --exchange none")
    return PhaseState(
        phase=phase,
        stream=device.stream(phase),
        collectives=device.collectives(phase),
        program=Program(world, phase, layers),
        route=device.route() if phase is Phase.P and world.route != "none" else None,
        deferred=device.deferred,
        normal=exchange.normal if exchange is not None and phase is Phase.P else None,
        low_latency=exchange.low_latency if exchange is not None and phase is Phase.D else None,
    )
