"""Numbers on their way from a GPU to the loop: a copy into pinned memory, and a thread that sleeps until it came."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from kernel.device.cuda_stream import CudaCompletion
from kernel.device.faults import Faults
from kernel.errors import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernel.request import Phase


class Landing:
    """Brings up to `most` int64 numbers at a time from GPU `index` to the host. One fetch at a time is under way.

    No Python runs inside the driver, and the thread waits without the interpreter's lock.
    """

    def __init__(self, rank: int, phase: Phase, index: int, most: int) -> None:
        self._rank, self._phase, self._index = rank, phase, index
        self._faults = Faults(rank)
        self._pinned = torch.empty(most, dtype=torch.int64, pin_memory=True)
        event: Any = torch.cuda.Event
        self._event = event(blocking=True)
        self._jobs: SimpleQueue[tuple[CudaCompletion[Any], Callable[[list[int]], Any], int, str] | None] = SimpleQueue()
        self._flying: CudaCompletion[Any] | None = None
        self._closed = False
        threading.Thread(target=self._main, name=f"{phase} counts", daemon=True).start()

    def fetch(self, numbers: Tensor, made: Callable[[list[int]], Any], label: str) -> CudaCompletion[Any]:
        """Enqueue on the current stream; done with made(numbers as a list) when they are here."""
        completion: CudaCompletion[Any] = CudaCompletion()
        if self._closed:
            completion.fail(RankLost(f"rank {self._rank} closed its exchange before {label}"))
            return completion
        count = numbers.numel()
        self._pinned[:count].copy_(numbers.view(-1), non_blocking=True)
        self._event.record()
        self._flying = completion
        self._jobs.put((completion, made, count, label))
        return completion

    def close(self) -> None:
        """Whoever waits gets RankLost. Idempotent; callable from any thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            if (flying := self._flying) is not None:
                flying.fail(RankLost(f"rank {self._rank} closed its exchange before its peers' counts were there"))

    def _main(self) -> None:
        torch.cuda.set_device(self._index)
        while (job := self._jobs.get()) is not None:
            completion, made, count, label = job
            try:
                self._event.synchronize()
                value = made(self._pinned[:count].tolist())
            except Exception as error:
                completion.fail(self._faults.translate(error, self._phase, label))
            else:
                completion.succeed(value)
