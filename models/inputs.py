"""What a forward feeds on and what becomes of its logits: everything between the kernel's rows and a model's tensors.

A model is the same for prefill and decode, on a CPU, on a CUDA device and inside a captured graph; what differs is
here, behind `Inputs`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from kernel.request import Phase, Sampled
from models.attention.lanes import Kept
from models.attention.reference import Batch, attend
from models.layers import ints
from models.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.request import Row
    from models.attention.pool import KVPool
    from models.native.forward import Native


class Ends(Protocol):
    """What a forward begins and ends with, n fed tokens."""

    tokens: int

    def ids(self) -> Tensor:
        """The fed token ids [n], those that the device keeps in slots among them."""

    def pick(self, hidden: Tensor) -> Tensor:
        """The rows of hidden [n, hidden] that a token is drawn from."""

    def draw(self, logits: Tensor) -> Sequence[Sampled | None]:
        """Draw from the logits of the picked rows, keep the draws in the slots and return them, row by row."""


class Inputs(Ends, Protocol):
    """The rows of one forward, as layers made of torch's operations need them.

    positions: [n, 1, 1] int64. cells: where the tokens' keys and values go (`KVPool.cells`).
    """

    positions: Tensor
    cells: Tensor

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Attention over the rows' contexts, which the pool already holds. Shapes as `attention.attend`."""


class Source(Protocol):
    """Makes the inputs of eager forwards."""

    def begin(self, phase: Phase, rows: Sequence[Row]) -> Inputs | NativeDecode | NativePrefill:
        """Inputs of one forward of `rows`."""


class HostEnds:
    """`Ends` of the CPU world, where results are numbers at once."""

    def __init__(self, rows: Sequence[Row], slots: Tensor) -> None:
        self._rows, self._slots, self._device = rows, slots, str(slots.device)
        self._first = list(accumulate((row.fed for row in rows), initial=0))
        self.tokens = self._first.pop()
        self._drawing = [number for number, row in enumerate(rows) if row.sample is not None]
        self._at = ints([row.slot for row in rows], self._device)

    def ids(self) -> Tensor:
        """See `Ends`."""
        rows = self._rows
        kept = [number for number, row in enumerate(rows) if row.tokens is None]
        if len(kept) == self.tokens:
            return self._slots.index_select(0, self._at)
        tokens = ints([token for row in rows for token in (row.tokens or (0,))], self._device)
        if kept:
            last = self._slots.index_select(0, self._at)[kept]
            tokens.index_copy_(0, ints([self._first[number] for number in kept], self._device), last)
        return tokens

    def pick(self, hidden: Tensor) -> Tensor:
        """See `Ends`."""
        if len(self._drawing) == hidden.shape[0]:
            return hidden
        last = [self._first[number] + self._rows[number].fed - 1 for number in self._drawing]
        return hidden.index_select(0, ints(last, self._device))

    def draw(self, logits: Tensor) -> list[Sampled | None]:
        """See `Ends`."""
        rows, drawing = self._rows, self._drawing
        if not drawing:
            return [None] * len(rows)
        chosen = rows if len(drawing) == len(rows) else [rows[number] for number in drawing]
        params = [row.sample for row in chosen if row.sample is not None]
        tokens, logprobs = sample(logits, params, [row.start + row.fed for row in chosen])
        slots = self._at if chosen is rows else self._at[drawing]
        self._slots.index_copy_(0, slots, tokens)
        drawn = map(Sampled, tokens.tolist(), logprobs.tolist())
        if chosen is rows:
            return list(drawn)
        return [None if row.sample is None else next(drawn) for row in rows]


class HostInputs(HostEnds):
    """`Inputs` of the CPU world."""

    def __init__(self, rows: Sequence[Row], pool: KVPool, slots: Tensor, kept: Kept | None = None) -> None:
        super().__init__(rows, slots)
        lanes = kept.begin(rows) if rows and kept is not None else None
        self._pool, self._batch = pool, Batch(rows, pool, lanes=lanes)
        self.positions, self.cells = self._batch.positions, self._batch.cells

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `Inputs`."""
        return attend(q, kv, self._pool, layer, self._batch)


class NativeDecode:
    """Rows of one token each, which their slots keep, for the kernels of `models.native`. All of them draw."""

    def __init__(self, rows: Sequence[Row], slots: Tensor, native: Native) -> None:
        self._rows, self._slots, self.native = rows, slots, native
        self.fed = native.decoding
        self.fed.take(rows)
        self.tokens = len(rows)
        self._greedy = not any(row.sample is not None and row.sample.temperature for row in rows)

    def ids(self) -> Tensor:
        """See `Ends`."""
        return self._slots.index_select(0, self.fed.slots)

    def pick(self, hidden: Tensor) -> Tensor:
        """See `Ends`."""
        return hidden

    def draw(self, logits: Tensor) -> list[Sampled | None]:
        """See `Ends`."""
        if self._greedy:
            tokens, logprobs = self.native.greedy(logits)
        else:
            params = [row.sample for row in self._rows if row.sample is not None]
            tokens, logprobs = sample(logits, params, [row.start + 1 for row in self._rows])
        self._slots.index_copy_(0, self.fed.slots, tokens)
        return list(map(Sampled, tokens.tolist(), logprobs.tolist()))

    def at_once(self) -> list[Sampled | None]:
        """All of a forward in one call, on a rank that has the whole model."""
        if not self._greedy:
            return self.draw(self.native.logits())
        return list(map(Sampled, *self.native.draws()))


class NativePrefill(HostEnds):
    """Any other rows for the kernels of `models.native`."""

    def __init__(self, rows: Sequence[Row], slots: Tensor, native: Native) -> None:
        from models.native.forward import prompts

        super().__init__(rows, slots)
        self.native, self.fed = native, prompts(rows, native.frequencies)


class HostSource:
    """`Source` of the CPU world. native: what computes layers; None: torch's operations."""

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._pool, self._slots, self._kept = pool, slots, Kept(pool)
        self.native: Native | None = None

    def begin(self, phase: Phase, rows: Sequence[Row]) -> HostInputs | NativeDecode | NativePrefill:
        """See `Source`."""
        if self.native is None:
            return HostInputs(rows, self._pool, self._slots, self._kept if phase is Phase.D else None)
        if phase is Phase.D and rows and all(row.tokens is None and row.sample is not None for row in rows):
            return NativeDecode(rows, self._slots, self.native)
        return NativePrefill(rows, self._slots, self.native)
