"""A call of an installed record, and how far it got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kernel.record.foreign import Call, Group

UNCOUNTED: Final = frozenset({"dispatch", "combine", "low-latency dispatch", "low-latency combine"})
"""Operations whose members bring as much as they have."""


@dataclass(eq=False)
class Item:
    """A call. number: of its event. place: of a call in a graph launch. key: what it is counted on, and its count."""

    number: int
    thread: int
    call: Call
    group: Group
    sequence: int
    sizes: tuple[tuple[int, ...], ...] | None
    outputs: tuple[tuple[int, ...], ...] | None
    stream: str
    site: str
    time_ns: int = 0
    place: int = 0
    also: tuple[str, ...] = ()
    done: bool = False
    failed: str = ""
    source: int = -1
    together: int | None = None

    @property
    def medium(self) -> str:
        """Its backend."""
        return self.call.medium

    @property
    def own(self) -> str:
        """A queue that it has for itself, to be waited for."""
        return f"call {self.number}.{self.place}"

    @property
    def key(self) -> tuple[object, ...]:
        """Calls with the same key meet, on ranks that are members."""
        return (self.group.name, self.group.ranks, self.call.peer is None, self.sequence)

    @property
    def arguments(self) -> tuple[object, ...]:
        """What members must agree in."""
        even = self.call.op not in ("all_to_all", "gather", "scatter", *UNCOUNTED) and self.call.peer is None
        return (self.call.op, self.call.dtype, self.call.root, self.call.reduce, self.sizes if even else None)
