"""P's way onto D's launch stream in the CUDA world (paper section 4, selective stream route).

Host code of both phases runs on one thread and enqueues at once, so the place that a routed collective takes in D's
FIFO is where `run` puts it: enqueue order is program order. `reserve` only notes what is to come, to be compared.

A tensor is freed towards the stream that it was allocated on. P's inputs are, for later work of P, which stands behind
the edge back from D. What `work` allocates on D's stream and P goes on to read is not: it is kept until the segment has
finished on the device (never `record_stream`, which makes the allocator ask the device).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kernel.errors import OrderViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kernel.program import Call

T = TypeVar("T")


class CudaRoute:
    """`kernel.ports.Route` between two torch.cuda.Streams of one GPU. Used from the loop's thread only.

    current: makes a stream the current one. keep: hold results until the segment has finished; not needed where the
    collectives allocate them on P's stream. events: makes an event.
    """

    def __init__(
        self,
        prefill: Any,
        decode: Any,
        *,
        current: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream,
        keep: bool = True,
        events: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._prefill, self._decode, self._current, self._keep = prefill, decode, current, keep
        # Waiting takes the state that an event has at that moment, so the same two serve every call.
        self._over, self._back = events(), events()
        self._places: deque[Call] = deque()
        self._kept: list[Any] = []

    def reserve(self, calls: Sequence[Call]) -> None:
        """Note the next calls of P that are routed, in order."""
        self._places.extend(calls)

    def run(self, call: Call, work: Callable[[], T]) -> T:
        """Run `work` with D's stream current, behind all that P has enqueued; P goes on behind it.

        Raises OrderViolation when the next reserved place is for another call, or there is none.
        """
        if not self._places or self._places[0] != call:
            found = f"the next place is for {self._places[0]}" if self._places else "no place is left"
            raise OrderViolation(f"P runs {call}, but {found}: reserve a segment's routed calls before submitting it")
        self._places.popleft()
        self._over.record(self._prefill)
        self._decode.wait_event(self._over)
        try:
            with self._current(self._decode):
                result = work()
        finally:
            # Also behind half of it, since P's memory may be in use on D's stream.
            self._back.record(self._decode)
            self._prefill.wait_event(self._back)
        if self._keep:
            self._kept.append(result)
        return result

    def before_decode(self) -> None:
        """D is about to enqueue. Raises OrderViolation when places before it are still open: D would overtake them."""
        if self._places:
            raise OrderViolation(
                f"D is launched before {self._places[0]}, whose place was reserved earlier: a segment with routed"
                " collectives must have been enqueued whole"
            )

    def after_prefill(self, worked: bool) -> list[Any]:
        """P's submission ends: what it has to keep. The places that a failed one leaves are dropped."""
        if not worked:
            self._places.clear()
        kept, self._kept = self._kept, []
        return kept
