"""The gate: the one object through which a policy's turn touches its rank. Rules are enforced here, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.sched.policy import Plan


class Rank(Protocol):
    """What a gate needs of its rank."""

    rank: int

    async def p_reached(self) -> None: ...
    async def p_enqueued(self) -> None: ...
    async def p_drained(self) -> None: ...
    async def d_drained(self) -> None: ...
    def launch(self) -> None: ...
    def release(self, span: int) -> None: ...


class RankGate:
    """One round's gate. Closed when the turn returns, so that a stray task cannot act in a later round."""

    def __init__(self, plan: Plan, rank: Rank, meet: Callable[[str], Awaitable[None]]) -> None:
        self.plan = plan
        self._rank, self._meet = rank, meet
        self._closed = False
        self.launched = False

    @property
    def p_active(self) -> bool:
        """See `kernel.sched.policy.Gate`."""
        return self.plan.epoch >= 0

    @property
    def d_ready(self) -> bool:
        """See `kernel.sched.policy.Gate`."""
        return self.plan.bucket > 0

    async def reached(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        self._open("reached")
        await self._rank.p_reached()

    async def enqueued(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        self._open("enqueued")
        await self._rank.p_enqueued()

    async def completed(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        self._open("completed")
        await self._rank.p_drained()

    async def drained(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        self._open("drained")
        await self._rank.d_drained()

    async def rendezvous(self, tag: str) -> None:
        """See `kernel.sched.policy.Gate`."""
        self._open(f"rendezvous {tag}")
        await self._meet(tag)

    def launch_decode(self) -> None:
        """See `kernel.sched.policy.Gate`."""
        self._open("launch_decode")
        if not self.d_ready:
            return
        if self.launched:
            raise self._error("a second D launch in one round")
        self.launched = True
        self._rank.launch()

    def release(self, span: int) -> None:
        """See `kernel.sched.policy.Gate`."""
        self._open("release")
        if self.p_active:
            self._rank.release(span)

    def close(self) -> None:
        """The turn has returned. Raises ProtocolError when a planned D iteration was not launched."""
        self._closed = True
        if self.d_ready and not self.launched:
            raise self._error("the turn returned without launching the planned D iteration")

    def _open(self, what: str) -> None:
        if self._closed:
            raise self._error(f"{what} after the turn returned")

    def _error(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"{what}, round {self.plan.round}", rank=self._rank.rank, epoch=self.plan.epoch, boundary=-1
        )
