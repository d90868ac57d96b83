"""What an expert exchange may do next: P's normal buffer and D's low-latency buffer of one rank. Pure; paper section 5.

    P   idle --notify--> notified --(counts, permit) submit--> submitted --combine--> idle
                             |                                     |
                             +------------- abandon ---------------+--> retired --quiesce--> idle

    D   idle --dispatch--> dispatched --combine--> idle

At most one dispatch is pending on a buffer. What peers were notified of cannot be taken back, so an operation that is
abandoned behind its notification retires the buffer until a quiescent point, which the plan fixes for all ranks. D's
operations alternate between two halves of its buffer by a bit of the host, which a captured graph freezes: a graph, and
what runs between two replays, must hold an even number of them. A capture turns the bit as well and executes nothing:
one that ends in the middle of a layer leaves the bit where the device is not, and only a new buffer brings it back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kernel.errors import (
    BufferRetired,
    DispatchPending,
    ExchangeError,
    NotDispatched,
    NotNotified,
    NotPermitted,
    NotQuiescent,
    OddGraph,
    RowLimit,
    RowsChanged,
    StillHeld,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class Place(NamedTuple):
    """Where in a run an operation belongs. epoch: P's epoch, or D's round."""

    epoch: int = -1
    layer: int = -1

    def __str__(self) -> str:
        return f"epoch {self.epoch} layer {self.layer}"

    @property
    def of_d(self) -> str:
        """For messages about D, whose places are in rounds."""
        return f"round {self.epoch} layer {self.layer}"


class State(StrEnum):
    """Of a buffer."""

    IDLE = "idle"
    NOTIFIED = "notified"
    SUBMITTED = "submitted"
    RETIRED = "retired"


class Normal:
    """P's buffer on `rank`. Not thread-safe: P's work calls it, and the loop where P has none.

    state: where it stands. place: of the pending operation, or of the last one. most: rows of an operation.
    """

    def __init__(self, rank: int, most: int) -> None:
        self.rank, self.most = rank, most
        self.state = State.IDLE
        self.place = Place()
        self.operations = 0
        self._permitted = self._sent = False
        self._why = ""

    @property
    def pending(self) -> bool:
        """An operation is under way, so that nothing else may use the buffer."""
        return self.state in (State.NOTIFIED, State.SUBMITTED)

    def notify(self, place: Place, rows: int) -> int:
        """Tell peers how many rows will come; the operation's number, for `permit` and `submit`.

        Raises DispatchPending, BufferRetired, RowLimit.
        """
        self._alive(place)
        if self.pending:
            raise self._error(
                DispatchPending,
                f"P notifies of a second dispatch while that of {self.place} is {self.state}",
                place,
                "combine the pending one first: a P buffer holds one",
            )
        if not 0 <= rows <= self.most:
            raise self._error(
                RowLimit,
                f"P dispatches {rows} rows over an exchange built for {self.most}",
                place,
                "raise its row limit (the prefill budget of tokens) or admit fewer tokens",
            )
        self.state, self.place = State.NOTIFIED, place
        self._permitted = self._sent = False
        self.operations += 1
        return self.operations

    def permit(self, number: int) -> None:
        """The turnstile has let P pass the boundary behind this notification. Raises NotNotified, BufferRetired."""
        self._pending_is(number, State.NOTIFIED, "is permitted")
        self._permitted = True

    def submit(self, number: int, *, counted: bool) -> None:
        """Data goes. counted: the counts of all peers are there. Raises NotNotified, NotPermitted, BufferRetired."""
        self._pending_is(number, State.NOTIFIED, "is submitted")
        if not counted:
            raise self._error(
                NotNotified,
                "P submits data before the counts of its peers are there",
                self.place,
                "await step.ready(pending.event) first",
            )
        if not self._permitted:
            raise self._error(
                NotPermitted,
                "P submits data before the turnstile permits it",
                self.place,
                "await step.notified(layer) between notify and dispatch",
            )
        self.state, self._sent = State.SUBMITTED, True

    def combine(self, place: Place) -> None:
        """Results go back, and the buffer is free. Raises NotDispatched, BufferRetired."""
        self._alive(place)
        if self.state is not State.SUBMITTED:
            raise self._error(
                NotDispatched,
                f"P combines while its buffer is {self.state}",
                place,
                "dispatch first: each combine belongs to one dispatch",
            )
        if place != self.place:
            raise self._error(
                NotDispatched,
                f"P combines for another dispatch than the pending one of {self.place}",
                place,
                "combine each layer before the next one notifies",
            )
        self.state = State.IDLE

    def abandon(self, why: str) -> bool:
        """Give up the pending operation, if there is one: the buffer is retired. Whether it is retired now."""
        if self.pending:
            self.state, self._why = State.RETIRED, why
        return self.state is State.RETIRED

    def quiesce(self, *, counted: bool, moved: bool) -> None:
        """A point that the plan fixes for all ranks, with no P in flight anywhere: a retired buffer is idle again.

        counted: the counts of the last notification are there. moved: what was last submitted has finished on this
        rank's device; asked for only where the abandoned operation had submitted data. Raises NotQuiescent.
        """
        doing = ""
        if self.pending:
            doing = f"its dispatch is {self.state}"
        elif not counted:
            doing = "what it notified of has not arrived"
        elif self.state is State.RETIRED and self._sent and not moved:
            doing = f"data that it submitted at {self.place} may be in flight"
        if doing:
            raise self._error(
                NotQuiescent,
                f"P's buffer is cleaned while {doing}",
                self.place,
                "wait until P has drained, or abandon the operation first",
            )
        self.state, self._why = State.IDLE, ""

    def _pending_is(self, number: int, state: State, what: str) -> None:
        self._alive(self.place)
        if self.state is not state or number != self.operations:
            raise self._error(
                NotNotified,
                f"operation {number} of P {what} while operation {self.operations} is {self.state}",
                self.place,
                "notify first: one notification, one submission",
            )

    def _alive(self, place: Place) -> None:
        if self.state is State.RETIRED:
            raise self._error(
                BufferRetired,
                f"P uses a buffer that was retired at {self.place} ({self._why})",
                place,
                "wait for the quiescent point, the next epoch's activation",
            )

    def _error(self, kind: type[ExchangeError], what: str, place: Place, instead: str) -> ExchangeError:
        return kind(what, rank=self.rank, epoch=place.epoch, layer=place.layer, instead=instead)


class Hold:
    """A captured graph's claim on D's buffer. operations: of the low-latency path that it holds."""

    __slots__ = ("name", "operations")

    def __init__(self, name: str) -> None:
        self.name, self.operations = name, 0


class LowLatency:
    """D's buffer on `rank`: `most` rows of each rank in every operation, which fixes its layout for good.

    operations: so far, eager or captured, as often as the host's bit was turned.
    """

    def __init__(self, rank: int, most: int) -> None:
        self.rank, self.most = rank, most
        self.operations = 0
        self.place = Place()
        self._dispatched = self._closed = False
        self._eager = 0
        self._broken = ""
        self._capturing: Hold | None = None
        self._held: list[Hold] = []

    def dispatch(self, place: Place, rows: int, most: int | None = None) -> None:
        """Send own rows. most: the row limit that the caller's layout assumes, None for the buffer's.

        Raises DispatchPending, RowLimit, RowsChanged, StillHeld (after `close`), OddGraph (after half a capture).
        """
        self._open(place)
        self._whole("D dispatches", place)
        if self._dispatched:
            raise self._error(
                DispatchPending,
                f"D dispatches again before the combine of {self.place.of_d}",
                place,
                "two low-latency operations in flight on one buffer corrupt it: combine first",
            )
        if most is not None and most != self.most:
            raise self._error(
                RowsChanged,
                f"D dispatches with a maximum of {most} rows a rank over a buffer laid out for {self.most}",
                place,
                "use one maximum for all graphs and eager forwards that share a buffer",
            )
        if not 0 <= rows <= self.most:
            raise self._error(
                RowLimit,
                f"D dispatches {rows} rows over an exchange built for {self.most} a rank",
                place,
                "raise its row limit (rows of a replica times draft tokens) or decode fewer rows",
            )
        self._dispatched, self.place = True, place
        self._count()

    def combine(self, place: Place) -> None:
        """Results go back. Raises NotDispatched, StillHeld."""
        self._open(place)
        if not self._dispatched:
            raise self._error(
                NotDispatched, "D combines without a dispatch", place, "dispatch first: each combine belongs to one"
            )
        if place != self.place:
            raise self._error(
                NotDispatched,
                f"D combines for another dispatch than the pending one of {self.place.of_d}",
                place,
                "combine each layer before the next one dispatches",
            )
        self._dispatched = False
        self._count()

    # -- graphs -------------------------------------------------------------------------------------------------

    def capture(self, name: str) -> Hold:
        """A capture begins; operations until `captured` belong to its graph. Raises OddGraph, StillHeld."""
        self._open(self.place)
        self._uncaptured(OddGraph, f"graph {name} is captured")
        self._whole(f"graph {name} is captured", self.place)
        self._even(f"graph {name} is captured")
        self._capturing = Hold(name)
        return self._capturing

    def captured(self, hold: Hold, *, well: bool = True) -> None:
        """The capture has ended, `well` or by an error, which leaves no graph. Raises OddGraph."""
        if hold is not self._capturing:
            raise self._error(
                OddGraph, f"the capture of graph {hold.name} ends, which had ended", self.place, "end each once"
            )
        self._capturing = None
        if hold.operations % 2:
            self._dispatched = False
            self._broken = f"the capture of graph {hold.name} ended after {hold.operations} low-latency operations"
            if well:
                raise self._error(
                    OddGraph,
                    f"graph {hold.name} holds {hold.operations} low-latency operations",
                    self.place,
                    "a graph needs an even number: dispatch and combine of whole layers",
                )
        if well:
            self._held.append(hold)

    def replay(self, hold: Hold) -> None:
        """A graph is to be launched: say so before. Raises OddGraph after an odd number of eager operations, after
        half a capture and during one, StillHeld once dropped."""
        if hold not in self._held:
            raise self._error(
                StillHeld, f"graph {hold.name} is replayed after it was dropped", self.place, "capture it again"
            )
        self._uncaptured(OddGraph, f"graph {hold.name} is replayed")
        self._whole(f"graph {hold.name} is replayed", self.place)
        self._even(f"graph {hold.name} is replayed")

    def drop(self, hold: Hold) -> None:
        """A graph is gone. Idempotent."""
        if hold in self._held:
            self._held.remove(hold)

    @property
    def graphs(self) -> Iterator[str]:
        """Names of the graphs that hold pointers into the buffer."""
        return (hold.name for hold in self._held)

    def close(self, *, aborts: bool = False) -> None:
        """The buffer goes. aborts: a pending dispatch ends by it, or its memory outlives the exchange.

        Raises StillHeld while a graph holds pointers into it or is captured, DispatchPending, unless it `aborts`, while
        a dispatch waits for its combine. Idempotent.
        """
        self._uncaptured(StillHeld, "D's exchange is destroyed")
        if self._dispatched and not aborts:
            raise self._error(
                DispatchPending,
                f"D's exchange is destroyed before the combine of {self.place.of_d}",
                self.place,
                "combine first: peers still write into the buffer",
            )
        if self._held:
            names = ", ".join(self.graphs)
            raise self._error(
                StillHeld,
                f"D's exchange is destroyed while graph {names} holds pointers into it",
                self.place,
                "reset the graphs first",
            )
        self._closed = True

    def _count(self) -> None:
        self.operations += 1
        if self._capturing is not None:
            self._capturing.operations += 1
        else:
            self._eager += 1

    def _even(self, what: str) -> None:
        if self._eager % 2:
            raise self._error(
                OddGraph,
                f"{what} after {self._eager} eager low-latency operations",
                self.place,
                "an even number must lie between replays: combine what was dispatched",
            )

    def _uncaptured(self, kind: type[ExchangeError], what: str) -> None:
        if self._capturing is not None:
            inside = f"{what} while graph {self._capturing.name} is captured"
            raise self._error(kind, inside, self.place, "end the capture first")

    def _whole(self, what: str, place: Place) -> None:
        if self._broken:
            raise self._error(
                OddGraph,
                f"{what} after {self._broken}",
                place,
                "the host and the device disagree on the half that is next: build the exchange anew",
            )

    def _open(self, place: Place) -> None:
        if self._closed:
            raise self._error(StillHeld, "D uses an exchange that was destroyed", place, "build it anew")

    def _error(self, kind: type[ExchangeError], what: str, place: Place, instead: str) -> ExchangeError:
        return kind(what, rank=self.rank, epoch=place.epoch, layer=place.layer, instead=instead, unit="round")
