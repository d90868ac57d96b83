"""The permit state machine of one rank: epoch e, reached boundary r, permitted endpoint p. Pure; paper section 4.

P stops at boundary p. `release` moves p on; the producer publishes boundaries as P's host enqueue reaches them. Every
misuse has its own error, which names rank, epoch and boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernel.errors import BeyondPermit, DuplicateEpoch, MissingProducer, NonMonotoneBoundary, ProtocolError, StaleEpoch


class Status(StrEnum):
    """Of the newest epoch."""

    NONE = "none"
    OPEN = "open"
    ENQUEUED = "enqueued"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at one moment, for records and messages."""

    epoch: int
    reached: int
    permit: int
    boundaries: int
    status: Status


class Turnstile:
    """One rank's turnstile over successive epochs.

    An epoch has boundaries 0 .. boundaries-1; the endpoint `boundaries` means its end. Epoch numbers increase.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._epoch, self._reached, self._permit, self._boundaries = -1, -1, 0, 0
        self._status = Status.NONE

    @property
    def snapshot(self) -> Snapshot:
        """The current state."""
        return Snapshot(self._epoch, self._reached, self._permit, self._boundaries, self._status)

    @property
    def newest(self) -> tuple[int, int]:
        """The newest epoch, and the boundary that it has reached."""
        return self._epoch, self._reached

    @property
    def open(self) -> bool:
        """An epoch has been activated and has not completed."""
        return self._status in (Status.OPEN, Status.ENQUEUED)

    @property
    def at_endpoint(self) -> bool:
        """P stands at its permitted endpoint, or its host enqueue has ended, or there is none."""
        return self._status is not Status.OPEN or self._reached >= self._permit

    def activate(self, epoch: int, boundaries: int, permit: int = 0) -> None:
        """Open `epoch` with an initial permit (0: ready D goes first; K: D is already enqueued).

        Raises StaleEpoch, DuplicateEpoch, BeyondPermit (a permit past the end).
        """
        if epoch < self._epoch:
            raise self._error(StaleEpoch, f"epoch {epoch} activated after epoch {self._epoch}", epoch, -1)
        if epoch == self._epoch or self.open:
            raise self._error(DuplicateEpoch, f"epoch {epoch} activated while epoch {self._epoch} is known", epoch, -1)
        if not 0 <= permit <= boundaries:
            raise self._error(BeyondPermit, f"initial permit {permit} of {boundaries} boundaries", epoch, permit)
        self._epoch, self._reached, self._permit, self._boundaries = epoch, -1, permit, boundaries
        self._status = Status.OPEN

    def publish(self, epoch: int, boundary: int) -> None:
        """P's host enqueue stands at `boundary`.

        Raises StaleEpoch, MissingProducer, NonMonotoneBoundary, BeyondPermit.
        """
        self._check(epoch, boundary, "published")
        if self._status is not Status.OPEN:
            raise self._error(
                MissingProducer, f"boundary {boundary} published by a {self._status} epoch", epoch, boundary
            )
        if boundary <= self._reached:
            raise self._error(
                NonMonotoneBoundary, f"boundary {boundary} published after {self._reached}", epoch, boundary
            )
        if boundary > self._permit:
            raise self._error(
                BeyondPermit, f"boundary {boundary} published with permit {self._permit}", epoch, boundary
            )
        self._reached = boundary

    def release(self, epoch: int, span: int) -> tuple[int, int]:
        """p += span, capped at the end; the segment [old p, new p) that P may now enqueue.

        An epoch that has ended keeps its permit (the matched no-work call): the segment is empty then.
        Raises StaleEpoch, MissingProducer, ProtocolError (a span below 1).
        """
        self._check(epoch, self._permit, "released")
        if span < 1:
            raise self._error(ProtocolError, f"span {span} released: a span is at least 1", epoch, self._permit)
        start = self._permit
        if self._status is Status.OPEN:
            self._permit = min(self._boundaries, start + span)
        return start, self._permit

    def enqueued(self, epoch: int) -> None:
        """P's host enqueue has ended: nothing is left to release. Raises StaleEpoch, MissingProducer, BeyondPermit."""
        self._check(epoch, self._boundaries, "ended")
        if self._status is not Status.OPEN:
            raise self._error(MissingProducer, f"a {self._status} epoch ended again", epoch, self._boundaries)
        if self._permit < self._boundaries:
            raise self._error(
                BeyondPermit,
                f"the epoch ended with permit {self._permit} of {self._boundaries}",
                epoch,
                self._boundaries,
            )
        self._reached, self._status = self._boundaries, Status.ENQUEUED

    def complete(self, epoch: int) -> None:
        """All of P's device work has finished, on all ranks. Raises StaleEpoch, MissingProducer."""
        self._check(epoch, self._reached, "completed")
        if self._status is not Status.ENQUEUED:
            raise self._error(MissingProducer, f"a {self._status} epoch completed", epoch, self._reached)
        self._status = Status.COMPLETE

    def _check(self, epoch: int, boundary: int, verb: str) -> None:
        if epoch < self._epoch:
            raise self._error(StaleEpoch, f"epoch {epoch} {verb} after epoch {self._epoch}", epoch, boundary)
        if epoch > self._epoch or self._status is Status.NONE:
            raise self._error(MissingProducer, f"epoch {epoch} {verb}, but nobody activated it", epoch, boundary)

    def _error(self, kind: type[ProtocolError], what: str, epoch: int, boundary: int) -> ProtocolError:
        return kind(what, rank=self.rank, epoch=epoch, boundary=boundary)
