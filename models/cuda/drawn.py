"""What a forward drew, while the device may still be drawing it: numbers on their way to pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from kernel.request import Sampled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Drawn(Sequence[Sampled | None]):
    """The result of a forward, row by row; None where a row asked for no token.

    Nothing is read before the first look at an element, which the kernel takes after the submission's event. An earlier
    look waits for the copy, so it is slow rather than wrong. `len` never waits.
    """

    def __init__(self, box: _Box | None, home: Outbox, asked: Sequence[bool]) -> None:
        self._box, self._home, self._asked = box, home, asked
        self._values: list[Sampled | None] | None = None

    def __len__(self) -> int:
        return len(self._asked)

    @overload
    def __getitem__(self, index: int) -> Sampled | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sampled | None]: ...
    def __getitem__(self, index: int | slice) -> Sampled | Sequence[Sampled | None] | None:
        return self._read()[index]

    def __iter__(self) -> Iterator[Sampled | None]:
        return iter(self._read())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._read() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Drawn({'on its way' if self._values is None else self._values})"

    def _read(self) -> list[Sampled | None]:
        if self._values is None:
            drawn: Iterator[Sampled] = iter(())
            if self._box is not None:
                tokens, logprobs = self._home.read(self._box, sum(self._asked))
                drawn, self._box = map(Sampled, tokens, logprobs), None
            self._values = [next(drawn) if asked else None for asked in self._asked]
        return self._values


class _Box:
    """One pinned buffer [rows, 2] int64, and the event behind the copy into it."""

    __slots__ = ("event", "numbers")

    def __init__(self, rows: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.numbers = torch.empty((rows, 2), dtype=torch.int64, pin_memory=cuda)
        self.event: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]


class Outbox:
    """Pinned buffers that results are copied into; one is free again when its `Drawn` has been read.

    rows: the most draws of one forward. boxes: forwards whose results may wait to be read; more are made on demand,
    which may synchronise with the device (`grown` counts them).
    """

    def __init__(self, device: torch.device, rows: int, boxes: int = 8) -> None:
        self._device, self._rows = device, rows
        self._free = [_Box(rows, device) for _ in range(boxes)]
        self.grown = 0

    def post(self, drawn: Tensor | None, asked: Sequence[bool]) -> Drawn:
        """Enqueue the copy of `drawn` [at least as many as asked, 2] (see `models.cuda.sampling`); never waits."""
        count = sum(asked)
        if drawn is None or not count:
            return Drawn(None, self, asked)
        if count > self._rows:
            self.grown += 1
            box = _Box(count, self._device)
        elif self._free:
            box = self._free.pop()
        else:
            self.grown += 1
            box = _Box(self._rows, self._device)
        box.numbers[:count].copy_(drawn[:count], non_blocking=True)
        if box.event is not None:
            box.event.record()
        return Drawn(box, self, asked)

    def read(self, box: _Box, count: int) -> tuple[list[int], list[float]]:
        """(tokens, log-probabilities) in `box`, which is free afterwards."""
        if box.event is not None and not box.event.query():
            box.event.synchronize()
        tokens, bits = box.numbers[:count].unbind(1)
        found = tokens.tolist(), bits.contiguous().view(torch.float64).tolist()
        self._free.append(box)
        return found
