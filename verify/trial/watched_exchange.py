"""The expert exchange of a simulated rank, watched: rules are checked from an account of its own (paper section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify.blame import Class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.exchange.states import Place
    from kernel.ports import ExpertExchange, NormalExchange, Pending, Received
    from verify.trial.monitor import RankMonitor


class WatchedNormal:
    """P's exchange of a simulated rank, with what it does told to a monitor. Keeps an account of its own."""

    def __init__(self, normal: NormalExchange, monitor: RankMonitor) -> None:
        self._normal, self._monitor = normal, monitor
        self._retired = self._pending = False

    def notify(self, place: Place, experts: Any) -> Pending:
        """See the port. Raises Found for a buffer that was retired."""
        if self._retired:
            say = f"P e{place.epoch} notifies in layer {place.layer} on a buffer that an abandoned dispatch has retired"
            raise self._monitor.find(Class.RULE, "exchange", say)
        self._pending = True
        return self._normal.notify(place, experts)

    def arriving(self, pending: Any) -> Sequence[int]:
        """See the port."""
        return self._normal.arriving(pending)

    def permit(self, pending: Any) -> None:
        """See the port."""
        self._normal.permit(pending)

    def submit(self, pending: Any, rows: Any, weights: Any) -> Received:
        """See the port. Raises Found for data before its permit, and on a buffer that was retired."""
        if self._retired:
            say = f"P submits data of {pending.place}, which was abandoned"
            raise self._monitor.find(Class.RULE, "exchange", say)
        if self._monitor.invariants is not None:
            self._monitor.invariants.data(*pending.place)
        return self._normal.submit(pending, rows, weights)

    def combine(self, place: Place, results: Any) -> Any:
        """See the port."""
        self._pending = False
        return self._normal.combine(place, results)

    def abandon(self, why: str) -> bool:
        """See the port."""
        self._retired = self._retired or self._pending
        return self._normal.abandon(why)

    def quiesce(self) -> None:
        """See the port. Raises Found where P is still under way."""
        if self._pending and not self._retired:
            raise self._monitor.find(Class.RULE, "exchange", "P's buffer is cleaned while a dispatch is pending on it")
        self._retired = self._pending = False
        self._normal.quiesce()

    def close(self) -> None:
        """See the port."""
        self._normal.close()


class WatchedExchange:
    """`kernel.ports.ExpertExchange` with P's side watched."""

    def __init__(self, exchange: ExpertExchange, monitor: RankMonitor) -> None:
        self.normal = WatchedNormal(exchange.normal, monitor)
        self.low_latency = exchange.low_latency

    def close(self) -> None:
        """See the port."""
