"""Both phases' exchanges of one rank, as one `kernel.ports.ExpertExchange`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.comm.exchange.latency import LatencyOverWire
from kernel.comm.exchange.normal import NormalOverWire
from kernel.comm.exchange.wire import LocalWire

if TYPE_CHECKING:
    import torch

    from kernel.comm.exchange.wire import Wire
    from kernel.exchange.lifetime import Lifetime
    from kernel.exchange.shape import Shape
    from kernel.ports import LowLatencyExchange, NormalExchange


class Exchange:
    """P's and D's exchange. shared: what both need, ended behind them; None where there is nothing."""

    def __init__(
        self, normal: NormalExchange, low_latency: LowLatencyExchange, shared: Lifetime | None = None
    ) -> None:
        self.normal, self.low_latency, self._shared = normal, low_latency, shared
        self._open = True
        if shared is not None:
            shared.hold("P")
            shared.hold("D")

    def close(self) -> None:
        """See the port: D first, which refuses while a graph holds pointers into its buffer."""
        if self._open:
            self.low_latency.close()
            self.normal.close()
            self._open = False
            if self._shared is not None:
                self._shared.drop("D")
                self._shared.drop("P")
                self._shared.end()


def over(shape: Shape, dtype: torch.dtype, prefill: Wire, decode: Wire) -> Exchange:
    """The exchange over one wire for each phase."""
    return Exchange(NormalOverWire(shape, prefill, dtype), LatencyOverWire(shape, decode, dtype))


def local(shape: Shape, dtype: torch.dtype) -> Exchange:
    """That of a world of one rank."""
    return over(shape, dtype, LocalWire(), LocalWire())
