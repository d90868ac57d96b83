"""How a simulated run can fail, apart from the errors of the code under test.

    TurnstileError
    ├── Stuck           nothing can go on and something is unfinished
    │   ├── Deadlock    nothing is enabled (or only timers of the ranks are)
    │   └── Livelock    ranks run for ever without the clock moving
    ├── Outside         a rank reached for something that does not exist in the simulated world
    ├── Mismatch        members of a communicator met in different collectives
    └── Orphan          an exception that nobody was there to receive

Each message is one line; `Stuck.waits` has one line for each thing that waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel.errors import TurnstileError
from verify.blame import Class

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN = 6
"""Waits that a one-line message names; `waits` has all of them."""


@dataclass(frozen=True)
class Standstill:
    """Why nothing can go on.

    cls: cycle, missing (somebody waits for a rank that has ended or waits for nobody), timeout (only timers of the
    ranks could fire), outside (everybody waits for what the world does not have). chain: a shortest cycle, or what
    leads to the missing one, a line for each rank. hosts: where each unfinished rank's own code waits, by rank. ranks:
    in the chain. ops: collectives and rendezvous in the chain, in its words. kinds: how each waits for the next
    (`room`, `queue`, `host`, `end`, ...) and which phases take part; the same for the same kind of standstill,
    whatever its size.
    """

    cls: Class
    chain: tuple[str, ...] = ()
    hosts: tuple[tuple[int, str], ...] = ()
    ranks: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def conditional(self) -> bool:
        """Whether it needs a device without room for all kernels at once."""
        return "room" in self.kinds


class Stuck(TurnstileError):
    """Nothing can go on and something is unfinished. waits: who waits for what. at_ns: virtual time."""

    def __init__(self, what: str, waits: Sequence[str], at_ns: int) -> None:
        more = f"; and {len(waits) - SHOWN} more" if len(waits) > SHOWN else ""
        super().__init__(f"{what} at {at_ns / 1e6:.3f} ms: {'; '.join(waits[:SHOWN]) or 'nothing waits'}{more}")
        self.waits, self.at_ns = tuple(waits), at_ns


class Deadlock(Stuck):
    """Nothing is enabled. only_timers: only timeouts of the ranks' own code could still fire.

    standstill: who waits for whom, from a `verify.sim.world.SimWorld`; None where no world was looked at.
    """

    standstill: Standstill | None = None

    def __init__(self, waits: Sequence[str], at_ns: int, only_timers: bool = False) -> None:
        super().__init__("only timers make progress, a deadlock" if only_timers else "deadlock", waits, at_ns)
        self.only_timers = only_timers

    @property
    def cls(self) -> Class:
        """Cycle, missing, timeout or outside."""
        if self.standstill is not None:
            return self.standstill.cls
        return Class.TIMEOUT if self.only_timers else Class.CYCLE

    @property
    def chain(self) -> tuple[str, ...]:
        """The cycle, or what leads to the missing rank, in words."""
        return self.standstill.chain if self.standstill is not None else ()


class Livelock(Stuck):
    """Ranks run for ever without the clock moving, as in a polling loop around `sleep(0)`."""

    def __init__(self, waits: Sequence[str], at_ns: int, steps: int) -> None:
        super().__init__(f"livelock, {steps} steps without the clock moving,", waits, at_ns)


class Outside(TurnstileError):
    """A rank reached for a socket, a thread, a signal or another thing that the simulated world does not have."""


class Mismatch(TurnstileError):
    """Members of a communicator met in collectives that differ in operation, size or stream."""


class Orphan(TurnstileError):
    """A task or a piece of device work failed and nobody was there to receive its exception."""
