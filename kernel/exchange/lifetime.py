"""How long what both phases share lives: while a phase or a captured graph can reach it (paper section 5). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import StillHeld

if TYPE_CHECKING:
    from collections.abc import Callable


class Lifetime:
    """Shared initialisation of one rank (the process-level NVSHMEM runtime, a store), ended once by `end`.

    what: its name in messages. Holders are named: `P`, `D`, `graph D 64`. Destroying a buffer drops one holder and so
    never ends the runtime under another.
    """

    def __init__(self, rank: int, what: str, end: Callable[[], None]) -> None:
        self.rank, self.what = rank, what
        self._end = end
        self._holders: list[str] = []
        self.ended = False

    @property
    def holders(self) -> tuple[str, ...]:
        """Who can reach it, in order of arrival."""
        return tuple(self._holders)

    def hold(self, who: str) -> None:
        """`who` can reach it from now on. Raises StillHeld once it has ended, or when `who` holds it already."""
        if self.ended:
            raise self._error(f"{who} reaches for {self.what}, which has ended", "start a new process")
        if who in self._holders:
            raise self._error(f"{who} holds {self.what} twice", "drop it first, or give the second holder a name")
        self._holders.append(who)

    def drop(self, who: str) -> None:
        """`who` cannot reach it any more. Idempotent."""
        if who in self._holders:
            self._holders.remove(who)

    def end(self) -> None:
        """End it. Raises StillHeld while anybody holds it. Idempotent."""
        if self.ended:
            return
        if self._holders:
            raise self._error(
                f"{self.what} is finalised while {', '.join(self._holders)} can reach it",
                "destroy buffers and reset graphs first",
            )
        self.ended = True
        self._end()

    def _error(self, what: str, instead: str) -> StillHeld:
        return StillHeld(what, rank=self.rank, epoch=-1, layer=-1, instead=instead)
