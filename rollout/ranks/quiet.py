"""Whether the device was left alone after the warm-up: no call of its allocators, no module loaded.

Such calls wait for the device, or make it wait, without a trace in any program order, and so close cycles that no
policy can see. Loaded modules are seen by what they take: device memory that no allocator asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import TurnstileError

if TYPE_CHECKING:
    from collections.abc import Callable

GRAIN: Final = 4 << 20
"""Bytes of unexplained device memory that are not noticed: what the driver keeps for itself comes and goes."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of one moment. outside: bytes of the device that are used, but by none of torch's segments.
    modules: imported parts of libraries that compile kernels.
    """

    device_allocs: int
    device_frees: int
    retries: int
    pinned_allocs: int
    outside: int
    modules: frozenset[str]


class Quiet:
    """Compares now with the moment at which it was made."""

    def __init__(self, rank: int, read: Callable[[], Reading]) -> None:
        self._rank, self._read = rank, read
        self._before = read()

    def changes(self) -> list[str]:
        """What happened since, a clause each; empty if nothing did."""
        old, new = self._before, self._read()
        counted = (
            ("calls to allocate device memory", old.device_allocs, new.device_allocs),
            ("calls to free device memory", old.device_frees, new.device_frees),
            ("retries of the allocator", old.retries, new.retries),
            ("calls to allocate pinned memory", old.pinned_allocs, new.pinned_allocs),
        )
        found = [f"{after - before} {what}" for what, before, after in counted if after > before]
        if new.outside > old.outside + GRAIN:
            grown = (new.outside - old.outside) / (1 << 20)
            found.append(f"{grown:.0f} MiB of device memory taken outside of the allocator, as when a module loads")
        if late := sorted(new.modules - old.modules):
            found.append(f"modules imported: {', '.join(late[:4])}{', ...' if len(late) > 4 else ''}")
        return found

    def check(self) -> None:
        """Raise TurnstileError, with what happened, unless nothing did."""
        if found := self.changes():
            raise TurnstileError(
                f"rank {self._rank} was not quiet after the warm-up: {'; '.join(found)}: the warm-up must cover it"
            )


def reading(gpu: int) -> Reading:
    """The counters of torch and of the driver."""
    import torch

    torch.cuda.synchronize(gpu)
    stats: dict[str, Any] = torch.cuda.memory_stats(gpu)
    pinned: dict[str, Any] = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    free, total = torch.cuda.mem_get_info(gpu)
    return Reading(
        device_allocs=stats.get("num_device_alloc", 0),
        device_frees=stats.get("num_device_free", 0),
        retries=stats.get("num_alloc_retries", 0),
        pinned_allocs=pinned.get("num_host_alloc", 0),
        outside=total - free - stats.get("reserved_bytes.all.current", 0),
        modules=frozenset(name for name in sys.modules if name.startswith(("triton", "flashinfer"))),
    )
