"""`kernel.ports.ExpertExchange` of one simulated rank, by the kernel's own states. A tensor is its number of rows.

Each operation is a kernel that waits for its peers on the phase's own stream, and holds its room meanwhile: the most
synchronising reading of DeepEP, whose kernels are launched cooperatively. P's notification is one too, and its counts
are there when it has finished; D's fixed rows need none. Every row goes to every rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kernel.exchange.states import LowLatency, Normal, Place
from kernel.ports import Received
from kernel.request import Phase
from kernel.topology import Role

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kernel.exchange.sizes import Residency
    from verify.sim.device import SimDevice, SimEvent

MOST = 1 << 30
"""Rows that simulated buffers hold."""


class Told:
    """What ranks have told each other of the rows they send, by place: of all ranks' exchanges together."""

    def __init__(self) -> None:
        self._rows: dict[Place, dict[int, int]] = {}

    def tell(self, place: Place, rank: int, rows: int) -> None:
        """`rank` sends so many rows."""
        self._rows.setdefault(place, {})[rank] = rows

    def rows(self, place: Place) -> list[int]:
        """Of each rank, once their counts are there."""
        return [rows for _, rows in sorted(self._rows[place].items())]


class SimPending:
    """`kernel.ports.Pending`."""

    def __init__(self, number: int, place: Place, event: SimEvent[None]) -> None:
        self.number, self.place, self.event = number, place, event


class SimNormal:
    """`kernel.ports.NormalExchange`."""

    def __init__(self, device: SimDevice, told: Told) -> None:
        self.states = Normal(device.rank, MOST)
        self._device, self._told = device, told
        self._last: SimPending | None = None
        self._data: SimEvent[None] | None = None
        self._own = 0

    def notify(self, place: Place, experts: int) -> SimPending:
        """See the port. experts: of so many rows."""
        number = self.states.notify(place, experts)
        self._own = experts
        self._told.tell(place, self._device.rank, experts)
        self._device.collective(Phase.P, Role.EP, f"notify {place.layer}", ())
        event = self._device.marked(f"counts of {place}")
        self._last = SimPending(number, place, event)
        return self._last

    def arriving(self, pending: SimPending) -> list[int]:
        """See the port."""
        return self._told.rows(pending.place)

    def permit(self, pending: SimPending) -> None:
        """See the port."""
        self.states.permit(pending.number)

    def submit(self, pending: SimPending, rows: int, weights: Any) -> Received:
        """See the port."""
        self.states.submit(pending.number, counted=pending.event.known)
        total = sum(self.arriving(pending))
        self._device.collective(Phase.P, Role.EP, f"dispatch {pending.place.layer}", (total,))
        self._data = self._device.marked(f"data of {pending.place}")
        return Received(total, None, None)

    def combine(self, place: Place, results: int) -> int:
        """See the port."""
        self.states.combine(place)
        self._device.collective(Phase.P, Role.EP, f"combine {place.layer}", (results,))
        return self._own

    def abandon(self, why: str) -> bool:
        """See the port."""
        return self.states.abandon(why)

    def quiesce(self) -> None:
        """See the port."""
        counted = self._last is None or self._last.event.known
        self.states.quiesce(counted=counted, moved=self._data is None or self._data.known)

    def close(self) -> None:
        """Nothing to release."""


class SimLowLatency:
    """`kernel.ports.LowLatencyExchange`."""

    def __init__(self, device: SimDevice, size: int) -> None:
        self.states = LowLatency(device.rank, MOST)
        self._device, self._size = device, size
        self._own = 0

    def dispatch(self, place: Place, rows: int, experts: int, weights: Any) -> Received:
        """See the port."""
        self.states.dispatch(place, rows)
        self._own = rows
        self._device.collective(Phase.D, Role.EP, f"dispatch {place.layer}", ())
        return Received(rows * self._size, None, None)

    def combine(self, place: Place, results: int) -> int:
        """See the port."""
        self.states.combine(place)
        self._device.collective(Phase.D, Role.EP, f"combine {place.layer}", ())
        return self._own

    def capture(self, name: str) -> AbstractContextManager[Any]:
        """Simulated graphs hold whatever one forward enqueues."""
        return nullcontext()

    def replayed(self, hold: Any) -> None:
        """See `capture`."""

    def dropped(self, hold: Any) -> None:
        """See `capture`."""

    def close(self) -> None:
        """Nothing to release."""


class SimExchange:
    """Both phases' of one rank. told: shared by all ranks."""

    def __init__(self, device: SimDevice, size: int, told: Told) -> None:
        self.normal = SimNormal(device, told)
        self.low_latency = SimLowLatency(device, size)

    def close(self) -> None:
        """Nothing to release."""


def room(budget: Residency) -> tuple[int, tuple[int, int]]:
    """(capacity, weights of (D, P)) of a simulated device that stands for a GPU with this budget of SMs."""
    return budget.sms, (budget.low_latency, budget.normal + budget.notify + budget.nccl)
