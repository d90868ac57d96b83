"""What moves bytes between the peers of an exchange, and the wire of a world of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kernel.device.worker import Completion
from kernel.errors import RankLost

if TYPE_CHECKING:
    from torch import Tensor

    from kernel.ports import Event

Matrix = Sequence[Sequence[int]]
"""Messages from each rank (first) to each rank (second)."""


class Wire(Protocol):
    """One phase's way to its peers. All peers call alike, in one order; blocking, except `announce`.

    label: what all of them must agree on. Raises RankLost when a peer is lost or the wire is closed, Divergence where
    a substrate can tell that peers call different things.
    """

    rank: int
    size: int

    def announce(self, counts: Sequence[int], label: str) -> Event[Matrix]:
        """Tell each peer how many messages it will get; everybody's counts when they are there. Never blocks."""

    def move(self, messages: Tensor, matrix: Matrix, label: str) -> Tensor:
        """uint8 [sent, width], in order of destination -> uint8 [received, width], in order of source."""

    def gather(self, messages: Tensor, label: str) -> Tensor:
        """uint8 [n, width] of every rank, n alike everywhere -> [ranks, n, width]."""

    def close(self) -> None:
        """Make calls in progress, and later ones, raise RankLost. Idempotent; callable from any thread."""


class LocalWire:
    """The only rank's: what it sends is what it receives."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._closed = False

    def announce(self, counts: Sequence[int], label: str) -> Completion[Any]:
        """Known at once."""
        done: Completion[Any] = Completion()
        done.succeed([list(counts)])
        return done

    def move(self, messages: Tensor, matrix: Matrix, label: str) -> Tensor:
        """The messages themselves."""
        self._open(label)
        return messages

    def gather(self, messages: Tensor, label: str) -> Tensor:
        """The messages, as one rank's."""
        self._open(label)
        return messages.unsqueeze(0)

    def close(self) -> None:
        """See `Wire`."""
        self._closed = True

    def _open(self, label: str) -> None:
        if self._closed:
            raise RankLost(f"rank 0 in {label} was given up: its exchange was closed")
