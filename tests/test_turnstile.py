"""The permit state machine against a model of it, and each misuse with its own error."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernel.errors import (
    BeyondPermit,
    DuplicateEpoch,
    MissingProducer,
    NonMonotoneBoundary,
    ProtocolError,
    StaleEpoch,
)
from kernel.sched.policy import ALL
from kernel.turnstile import Status, Turnstile


class Protocol(RuleBasedStateMachine):
    """Right use never raises; what a wrong call would break stays unbroken."""

    @initialize()
    def start(self) -> None:
        self.turnstile = Turnstile(rank=3)
        self.epoch, self.boundaries, self.permit, self.reached = -1, 0, 0, -1
        self.status = Status.NONE

    @precondition(lambda self: self.status in (Status.NONE, Status.COMPLETE))
    @rule(step=st.integers(1, 3), boundaries=st.integers(1, 6), permit=st.integers(0, 6))
    def activate(self, step: int, boundaries: int, permit: int) -> None:
        permit = min(permit, boundaries)
        self.turnstile.activate(self.epoch + step, boundaries, permit)
        self.epoch, self.boundaries, self.permit, self.reached = self.epoch + step, boundaries, permit, -1
        self.status = Status.OPEN

    @precondition(lambda self: self.status is Status.OPEN and self.reached < min(self.permit, self.boundaries - 1))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        boundary = data.draw(st.integers(self.reached + 1, min(self.permit, self.boundaries - 1)))
        self.turnstile.publish(self.epoch, boundary)
        self.reached = boundary

    @precondition(lambda self: self.status is not Status.NONE)
    @rule(span=st.one_of(st.integers(1, 4), st.just(ALL)))
    def release(self, span: int) -> None:
        start, end = self.turnstile.release(self.epoch, span)
        assert start == self.permit
        if self.status is Status.OPEN:
            self.permit = min(self.boundaries, self.permit + span)
        assert end == self.permit

    @precondition(lambda self: self.status is Status.OPEN and self.permit == self.boundaries)
    @rule()
    def end(self) -> None:
        self.turnstile.enqueued(self.epoch)
        self.reached, self.status = self.boundaries, Status.ENQUEUED

    @precondition(lambda self: self.status is Status.ENQUEUED)
    @rule()
    def complete(self) -> None:
        self.turnstile.complete(self.epoch)
        self.status = Status.COMPLETE

    @precondition(lambda self: self.status is not Status.NONE)
    @rule(boundary=st.integers(-2, 9), age=st.integers(-2, 2))
    def wrong_publish(self, boundary: int, age: int) -> None:
        right = age == 0 and self.status is Status.OPEN and self.reached < boundary <= self.permit
        if not right:
            with pytest.raises(ProtocolError, match="rank 3, epoch"):
                self.turnstile.publish(self.epoch + age, boundary)

    @precondition(lambda self: self.status in (Status.OPEN, Status.ENQUEUED))
    @rule(age=st.integers(-2, 3))
    def wrong_activate(self, age: int) -> None:
        with pytest.raises(StaleEpoch if age < 0 else DuplicateEpoch):
            self.turnstile.activate(self.epoch + age, 4)

    @precondition(lambda self: self.status is Status.OPEN and self.permit < self.boundaries)
    @rule()
    def ended_too_early(self) -> None:
        with pytest.raises(BeyondPermit):
            self.turnstile.enqueued(self.epoch)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "turnstile"):
            return
        snapshot = self.turnstile.snapshot
        assert snapshot.reached <= snapshot.permit <= snapshot.boundaries
        assert (snapshot.epoch, snapshot.reached, snapshot.permit) == (self.epoch, self.reached, self.permit)
        assert snapshot.status is self.status
        assert self.turnstile.at_endpoint is (self.status is not Status.OPEN or self.reached >= self.permit)


TestProtocol = Protocol.TestCase


def test_every_misuse_has_its_own_error() -> None:
    turnstile = Turnstile(rank=1)
    with pytest.raises(MissingProducer, match=r"nobody activated it \(rank 1, epoch 0, boundary 0\)"):
        turnstile.publish(0, 0)
    turnstile.activate(5, 4, permit=1)
    turnstile.publish(5, 1)
    with pytest.raises(NonMonotoneBoundary):
        turnstile.publish(5, 1)
    with pytest.raises(BeyondPermit):
        turnstile.publish(5, 2)
    with pytest.raises(StaleEpoch):
        turnstile.release(4, 1)
    with pytest.raises(MissingProducer):
        turnstile.release(6, 1)
    with pytest.raises(ProtocolError, match="at least 1"):
        turnstile.release(5, 0)
    turnstile.release(5, ALL)
    turnstile.enqueued(5)
    with pytest.raises(MissingProducer):
        turnstile.publish(5, 3)
    with pytest.raises(DuplicateEpoch):
        turnstile.activate(6, 4)
    assert turnstile.release(5, 1) == (4, 4)
