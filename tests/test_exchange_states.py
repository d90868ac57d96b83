"""The states of an expert exchange: every misuse has its own error; a small model as the oracle of what is allowed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
from kernel.exchange.lifetime import Lifetime
from kernel.exchange.states import Hold, LowLatency, Normal, Place, State

HERE = Place(3, 7)


def notified(most: int = 8) -> tuple[Normal, int]:
    buffer = Normal(1, most)
    return buffer, buffer.notify(HERE, 4)


def submitted() -> Normal:
    buffer, number = notified()
    buffer.permit(number)
    buffer.submit(number, counted=True)
    return buffer


def retired() -> Normal:
    buffer, _ = notified()
    assert buffer.abandon("its request was cancelled")
    return buffer


def retired_with_data() -> Normal:
    buffer = submitted()
    assert buffer.abandon("its request was cancelled")
    return buffer


MISUSES = {
    "second notification": (DispatchPending, lambda: notified()[0].notify(Place(3, 8), 1), "second dispatch"),
    "notify while submitted": (DispatchPending, lambda: submitted().notify(Place(3, 8), 1), "is submitted"),
    "submit before notify": (NotNotified, lambda: Normal(1, 8).submit(0, counted=True), "notify first"),
    "submit before counts": (NotNotified, lambda: notified()[0].submit(1, counted=False), "step.ready"),
    "submit before permit": (NotPermitted, lambda: notified()[0].submit(1, counted=True), "step.notified"),
    "permit of nothing": (NotNotified, lambda: Normal(1, 8).permit(1), "notify first"),
    "submit of an old one": (NotNotified, lambda: notified()[0].submit(0, counted=True), "operation 0"),
    "combine without dispatch": (NotDispatched, lambda: Normal(1, 8).combine(HERE), "dispatch first"),
    "combine while notified": (NotDispatched, lambda: notified()[0].combine(HERE), "is notified"),
    "combine of another layer": (NotDispatched, lambda: submitted().combine(Place(3, 8)), "epoch 3 layer 7"),
    "rows above the limit": (RowLimit, lambda: Normal(1, 8).notify(HERE, 9), "9 rows over an exchange built for 8"),
    "less than no rows": (RowLimit, lambda: Normal(1, 8).notify(HERE, -1), "-1 rows over an exchange built for 8"),
    "notify when retired": (BufferRetired, lambda: retired().notify(Place(4, 0), 1), "its request was cancelled"),
    "permit when retired": (BufferRetired, lambda: retired().permit(1), "quiescent point"),
    "submit when retired": (BufferRetired, lambda: retired().submit(1, counted=True), "quiescent point"),
    "combine when retired": (BufferRetired, lambda: retired().combine(HERE), "quiescent point"),
    "cleaned while notified": (NotQuiescent, lambda: notified()[0].quiesce(counted=True, moved=True), "is notified"),
    "cleaned while submitted": (NotQuiescent, lambda: submitted().quiesce(counted=True, moved=True), "is submitted"),
    "cleaned before counted": (
        NotQuiescent, lambda: retired().quiesce(counted=False, moved=True), "has not arrived"
    ),
    "cleaned before moved": (
        NotQuiescent, lambda: retired_with_data().quiesce(counted=True, moved=False), "may be in flight"
    ),
}


@pytest.mark.parametrize("what", MISUSES)
def test_each_misuse_of_p_has_its_own_error(what: str) -> None:
    kind, misuse, words = MISUSES[what]
    with pytest.raises(ExchangeError, match=words) as caught:
        misuse()
    assert type(caught.value) is kind
    text = str(caught.value)
    assert "\n" not in text
    assert "rank 1" in text
    assert caught.value.rank == 1


def test_what_was_abandoned_is_usable_again_behind_the_quiescent_point() -> None:
    buffer = retired()
    buffer.quiesce(counted=True, moved=False)  # none was submitted
    assert buffer.state is State.IDLE
    number = buffer.notify(Place(4, 0), 8)
    buffer.permit(number)
    buffer.submit(number, counted=True)
    buffer.combine(Place(4, 0))


def test_abandoning_nothing_retires_nothing() -> None:
    assert not Normal(0, 8).abandon("nobody asked")


def test_each_misuse_of_d_has_its_own_error() -> None:
    def fails(kind: type[ExchangeError], words: str, misuse: object, *args: object, **more: object) -> None:
        with pytest.raises(ExchangeError, match=words) as caught:
            misuse(*args, **more)  # type: ignore[operator]
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
        assert f"rank 2, round {caught.value.epoch}, layer {caught.value.layer}" in str(caught.value)
        assert "epoch" not in str(caught.value)

    buffer = LowLatency(2, 16)
    fails(NotDispatched, "without a dispatch", buffer.combine, HERE)
    fails(RowLimit, "17 rows over an exchange built for 16", buffer.dispatch, HERE, 17)
    fails(RowLimit, "-1 rows over an exchange built for 16", buffer.dispatch, HERE, -1)
    fails(RowsChanged, "maximum of 32 rows", buffer.dispatch, HERE, 3, 32)
    buffer.dispatch(HERE, 16)
    fails(DispatchPending, "combine first", buffer.dispatch, HERE, 1)
    fails(OddGraph, "after 1 eager", buffer.capture, "D 64")
    fails(NotDispatched, "another dispatch than the pending one of round 3 layer 7", buffer.combine, Place(3, 8))
    fails(DispatchPending, "destroyed before the combine", buffer.close)
    buffer.combine(HERE)
    hold = buffer.capture("D 64")
    fails(OddGraph, "while graph D 64 is captured", buffer.capture, "D 32")
    fails(StillHeld, "destroyed while graph D 64 is captured", buffer.close, aborts=True)
    buffer.dispatch(HERE, 16)
    fails(OddGraph, "holds 1 low-latency operations", buffer.captured, hold)
    broken = "after the capture of graph D 64 ended after 1 low-latency operations.*build the exchange anew"
    fails(OddGraph, broken, buffer.capture, "D 32")
    fails(OddGraph, broken, buffer.dispatch, HERE, 1)
    buffer.close()
    buffer = LowLatency(2, 16)
    hold = buffer.capture("D 32")
    buffer.dispatch(HERE, 16)
    buffer.combine(HERE)
    buffer.captured(hold)
    fails(OddGraph, "which had ended", buffer.captured, hold)
    other = buffer.capture("D 8")
    fails(OddGraph, "graph D 32 is replayed while graph D 8 is captured", buffer.replay, hold)
    buffer.captured(other)
    buffer.drop(other)
    buffer.replay(hold)
    buffer.dispatch(HERE, 1)
    fails(OddGraph, "graph D 32 is replayed after", buffer.replay, hold)
    buffer.combine(HERE)
    fails(StillHeld, "graph D 32 holds pointers", buffer.close)
    buffer.drop(hold)
    buffer.drop(hold)
    fails(StillHeld, "after it was dropped", buffer.replay, hold)
    buffer.close()
    buffer.close()
    fails(StillHeld, "destroyed", buffer.dispatch, HERE, 1)


def test_a_capture_that_failed_between_layers_leaves_no_graph() -> None:
    buffer = LowLatency(0, 4)
    hold = buffer.capture("D 4")
    buffer.dispatch(HERE, 4)
    buffer.combine(HERE)
    buffer.captured(hold, well=False)
    buffer.dispatch(HERE, 4)
    buffer.combine(HERE)
    buffer.close()


def test_a_wire_may_be_closed_with_a_dispatch_pending() -> None:
    """Its peers wait in calls, which end by that."""
    buffer = LowLatency(0, 4)
    buffer.dispatch(HERE, 4)
    buffer.close(aborts=True)


def test_shared_initialisation_lives_while_anybody_reaches_it() -> None:
    ends: list[int] = []
    shared = Lifetime(0, "NVSHMEM", lambda: ends.append(1))
    for who in ("P", "D", "graph D 64"):
        shared.hold(who)
    with pytest.raises(StillHeld, match="D holds NVSHMEM twice"):
        shared.hold("D")
    for who in ("D", "P"):
        shared.drop(who)
        with pytest.raises(StillHeld, match=r"finalised while .*graph D 64 can reach it"):
            shared.end()
    assert shared.holders == ("graph D 64",)
    shared.drop("graph D 64")
    shared.drop("graph D 64")
    shared.end()
    shared.end()
    assert ends == [1]
    with pytest.raises(StillHeld, match="which has ended"):
        shared.hold("P")


class Buffer(RuleBasedStateMachine):
    """Random use: an operation is refused exactly where this table of three facts says so, and changes nothing then."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Normal(0, 8)
        self.state, self.permitted, self.layer, self.number = "idle", False, 0, 0
        self.sent = False

    def attempt(self, allowed: bool, call: object, *args: object, **more: object) -> bool:
        before = self.real.state
        try:
            call(*args, **more)  # type: ignore[operator]
        except ExchangeError:
            assert not allowed
            assert self.real.state is before
            return False
        assert allowed
        return True

    @rule(rows=st.integers(0, 10))
    def notify(self, rows: int) -> None:
        if self.attempt(self.state == "idle" and rows <= 8, self.real.notify, Place(0, self.layer + 1), rows):
            self.state, self.permitted, self.sent = "notified", False, False
            self.layer += 1
            self.number += 1

    @rule(back=st.integers(0, 1))
    def permit(self, back: int) -> None:
        if self.attempt(self.state == "notified" and not back, self.real.permit, self.number - back):
            self.permitted = True

    @rule(counted=st.booleans())
    def submit(self, counted: bool) -> None:
        allowed = self.state == "notified" and self.permitted and counted
        if self.attempt(allowed, self.real.submit, self.number, counted=counted):
            self.state, self.sent = "submitted", True

    @rule(back=st.integers(0, 1))
    def combine(self, back: int) -> None:
        if self.attempt(self.state == "submitted" and not back, self.real.combine, Place(0, self.layer - back)):
            self.state = "idle"

    @precondition(lambda self: self.state != "idle")
    @rule()
    def abandon(self) -> None:
        assert self.real.abandon("test")
        self.state = "retired"

    @rule(counted=st.booleans(), moved=st.booleans())
    def quiesce(self, counted: bool, moved: bool) -> None:
        through = counted and (moved or not self.sent or self.state == "idle")
        allowed = self.state in ("idle", "retired") and through
        if self.attempt(allowed, self.real.quiesce, counted=counted, moved=moved):
            self.state = "idle"

    @invariant()
    def agree(self) -> None:
        assert self.real.state == self.state


TestBuffer = Buffer.TestCase
TestBuffer.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Halves(RuleBasedStateMachine):
    """DeepEP's buffer as it is: a bit of the host names the half of each operation, whether it runs or is captured, and
    a graph runs on the halves that it was captured with. Whatever is allowed, halves take turns in order of execution;
    an operation is refused exactly where this table says so, and turns nothing then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.real = LowLatency(0, 4)
        self.bit, self.last, self.layer = 0, 1, 0
        self.capturing: tuple[Hold, list[int]] | None = None
        self.graphs: list[tuple[Hold, list[int]]] = []
        self.pending = self.broken = False

    def attempt(self, allowed: bool, call: object, *args: object, **more: object) -> object:
        before = self.real.operations
        try:
            found = call(*args, **more)  # type: ignore[operator]
        except ExchangeError:
            assert not allowed
            assert self.real.operations == before
            return None
        assert allowed
        return found or True

    def run(self, half: int) -> None:
        assert half != self.last, "two operations one after the other on one half"
        self.last = half

    def operation(self) -> None:
        if self.capturing is None:
            self.run(self.bit)
        else:
            self.capturing[1].append(self.bit)
        self.bit ^= 1

    @rule(rows=st.integers(-1, 5))
    def dispatch(self, rows: int) -> None:
        allowed = not self.pending and not self.broken and 0 <= rows <= 4
        if self.attempt(allowed, self.real.dispatch, Place(0, self.layer), rows):
            self.operation()
            self.pending = True

    @rule(off=st.integers(0, 1))
    def combine(self, off: int) -> None:
        if self.attempt(self.pending and not off, self.real.combine, Place(0, self.layer + off)):
            self.operation()
            self.pending = False
            self.layer += 1

    @rule()
    def capture(self) -> None:
        allowed = self.capturing is None and not self.pending and not self.broken
        if hold := self.attempt(allowed, self.real.capture, "g"):
            assert isinstance(hold, Hold)
            self.capturing = hold, []

    @precondition(lambda self: self.capturing is not None)
    @rule(well=st.booleans())
    def captured(self, well: bool) -> None:
        assert self.capturing is not None
        hold, halves = self.capturing
        odd = len(halves) % 2 == 1
        if self.attempt(not (well and odd), self.real.captured, hold, well=well) and well:
            self.graphs.append(self.capturing)
        self.broken = self.broken or odd
        self.capturing, self.pending = None, False

    @precondition(lambda self: self.graphs)
    @rule(which=st.integers(0, 5), drop=st.booleans())
    def replay(self, which: int, drop: bool) -> None:
        hold, halves = self.graphs[which % len(self.graphs)]
        allowed = self.capturing is None and not self.pending and not self.broken
        if self.attempt(allowed, self.real.replay, hold):
            for half in halves:
                self.run(half)
        if drop:
            self.real.drop(hold)
            self.graphs.remove((hold, halves))

    @rule(aborts=st.booleans())
    def close(self, aborts: bool) -> None:
        allowed = self.capturing is None and not self.graphs and (aborts or not self.pending)
        if self.attempt(allowed, self.real.close, aborts=aborts):
            self.__init__()  # type: ignore[misc]


TestHalves = Halves.TestCase
TestHalves.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
