"""Host numbers on their way to the device: pinned buffers that take turns, one copy for all that a forward needs.

A copy from pageable memory waits for the stream, and allocating pinned memory waits for the device; so everything goes
through buffers allocated once. A buffer comes up again only when the device has finished with it: a decode iteration is
launched while the one before may not have begun, so two are in use at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike
    from torch import Tensor

_ALIGN: Final = 16
_TORCH: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


class Parcel:
    """One buffer of a `Ring` in use: arrays are put in, shipped together, and found again by name.

    index: which of the ring's buffers it is, for what else takes turns with it. used: bytes put in, with padding.
    """

    def __init__(self, ring: Ring, index: int) -> None:
        self._ring, self.index = ring, index
        self._host = ring.hosts[index]
        self._bytes: Any = self._host.numpy()
        self._shipped = self.used = 0
        self._fields: dict[str, tuple[int, int, torch.dtype]] = {}
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, values: ArrayLike, dtype: DTypeLike) -> None:
        """Add an array; `values` are copied. A parcel that outgrows its buffer gets a larger one, which may wait."""
        array = np.asarray(values, dtype=dtype).reshape(-1)
        start, stop = self.used, self.used + array.nbytes
        aligned = -(-stop // _ALIGN) * _ALIGN
        if aligned > self._host.shape[0]:
            self._grow(aligned)
        self._bytes[start:stop] = array.view(np.uint8)
        self._fields[name] = (start, stop, _TORCH[array.dtype])
        self.used = aligned

    def host(self, name: str) -> Tensor:
        """An array as it lies in the buffer: a pinned CPU tensor, valid until the buffer's next turn."""
        start, stop, dtype = self._fields[name]
        return self._host[start:stop].view(dtype)

    def ship(self, into: Tensor | None = None) -> dict[str, Tensor]:
        """Enqueue the copy of all that was put in since the last time; device tensors by name.

        into: device bytes to copy to, from their beginning; only for a parcel's first and only shipment. Otherwise
        fresh memory.
        """
        start, stop = self._shipped, self.used
        host = self._host[start:stop]
        if into is None:
            into = torch.empty(stop - start, dtype=torch.uint8, device=self._ring.device)
        target = into[: stop - start]
        target.copy_(host, non_blocking=True)
        self._shipped = stop
        fresh = {
            name: target[first - start : last - start].view(dtype)
            for name, (first, last, dtype) in self._fields.items()
            if first >= start
        }
        self.tensors.update(fresh)
        return fresh

    def places(self) -> dict[str, tuple[int, int, torch.dtype]]:
        """Where each array lies: (first byte, last byte + 1, type)."""
        return dict(self._fields)

    def close(self) -> None:
        """All work that reads the buffer has been enqueued on the current stream."""
        self._ring.seal(self.index)

    def _grow(self, need: int) -> None:
        larger = self._ring.replace(self.index, need)
        larger[: self.used].copy_(self._host[: self.used])
        self._host, self._bytes = larger, larger.numpy()


class Ring:
    """Pinned buffers of `nbytes` each that take turns; one ring for each phase, used from one host thread.

    waits, grown: how often a buffer was still in use on its turn, or too small. Both should stay 0 after warm-up.
    """

    def __init__(self, device: torch.device, nbytes: int = 1 << 20, buffers: int = 3) -> None:
        self.device = device
        self._pin = device.type == "cuda"
        self.hosts = [self._empty(nbytes) for _ in range(buffers)]
        make: Any = torch.cuda.Event
        self._events: list[Any] = [make() if self._pin else None for _ in range(buffers)]
        self._sealed = [False] * buffers
        self._turn = -1
        self.waits = self.grown = 0

    def take(self) -> Parcel:
        """The next buffer, empty."""
        self._turn = (self._turn + 1) % len(self.hosts)
        event = self._events[self._turn]
        if event is not None and self._sealed[self._turn] and not event.query():
            self.waits += 1
            event.synchronize()
        self._sealed[self._turn] = False
        return Parcel(self, self._turn)

    def seal(self, index: int) -> None:
        """Mark the end of what reads buffer `index`, on the current stream."""
        event = self._events[index]
        if event is not None:
            event.record()
        self._sealed[index] = True

    def replace(self, index: int, need: int) -> Tensor:
        """A larger buffer in the place of `index`. A copy from the old one may be pending, so it is waited for."""
        self.grown += 1
        if self._pin:
            torch.cuda.current_stream(self.device).synchronize()
        self.hosts[index] = self._empty(max(need, 2 * self.hosts[index].shape[0]))
        return self.hosts[index]

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
