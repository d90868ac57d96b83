"""What a forward feeds on and what becomes of its logits: everything between the kernel's rows and a model's tensors.

A model is the same for prefill and decode, on a CPU, on a CUDA device and inside a captured graph; what differs is
here, behind `Inputs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.request import Phase, Sampled
from models.attention import Batch, KVPool, attend
from models.attention_kept import Kept
from models.layers import ints
from models.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernel.request import Row
    from models.native import Native


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

    def begin(self, phase: Phase, rows: Sequence[Row]) -> Inputs | NativeInputs:
        """Inputs of one forward of `rows`."""


class HostInputs:
    """Inputs of the CPU world, where results are numbers at once."""

    def __init__(self, rows: Sequence[Row], pool: KVPool, slots: Tensor, kept: Kept | None = None) -> None:
        self._rows, self._pool, self._slots = rows, pool, slots
        lanes = kept.begin(rows) if rows and kept is not None else None
        self._batch = batch = Batch(rows, pool, lanes=lanes)
        self.tokens, self.positions, self.cells = batch.tokens, batch.positions, batch.cells
        self._device = str(slots.device)
        self._drawing = [number for number, row in enumerate(rows) if row.sample is not None]

    def ids(self) -> Tensor:
        """See `Inputs`."""
        rows, batch = self._rows, self._batch
        kept = [number for number, row in enumerate(rows) if row.tokens is None]
        if len(kept) == batch.tokens:
            return self._slots.index_select(0, batch.slots)
        tokens = ints([token for row in rows for token in (row.tokens or (0,))], self._device)
        if kept:
            last = self._slots.index_select(0, batch.slots)[kept]
            tokens.index_copy_(0, ints([batch.first[number] for number in kept], self._device), last)
        return tokens

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `Inputs`."""
        return attend(q, kv, self._pool, layer, self._batch)

    def pick(self, hidden: Tensor) -> Tensor:
        """See `Inputs`."""
        if len(self._drawing) == hidden.shape[0]:
            return hidden
        last = [self._batch.first[number] + self._rows[number].fed - 1 for number in self._drawing]
        return hidden.index_select(0, ints(last, self._device))

    def draw(self, logits: Tensor) -> list[Sampled | None]:
        """See `Inputs`."""
        rows, drawing = self._rows, self._drawing
        if not drawing:
            return [None] * len(rows)
        chosen = rows if len(drawing) == len(rows) else [rows[number] for number in drawing]
        params = [row.sample for row in chosen if row.sample is not None]
        tokens, logprobs = sample(logits, params, [row.start + row.fed for row in chosen])
        slots = self._batch.slots if chosen is rows else self._batch.slots[drawing]
        self._slots.index_copy_(0, slots, tokens)
        drawn = map(Sampled, tokens.tolist(), logprobs.tolist())
        if chosen is rows:
            return list(drawn)
        return [None if row.sample is None else next(drawn) for row in rows]


class NativeInputs:
    """Rows of one token each, which their slots keep, for the kernels of `models.native`. All of them draw."""

    def __init__(self, rows: Sequence[Row], slots: Tensor, native: Native) -> None:
        self._rows, self._slots, self.native = rows, slots, native
        native.rows.begin(rows)
        self.tokens = len(rows)

    def ids(self) -> Tensor:
        """See `Ends`."""
        return self._slots.index_select(0, self.native.rows.slots)

    def pick(self, hidden: Tensor) -> Tensor:
        """See `Ends`."""
        return hidden

    def draw(self, logits: Tensor) -> list[Sampled | None]:
        """See `Ends`."""
        params = [row.sample for row in self._rows if row.sample is not None]
        if any(each.temperature for each in params):
            tokens, logprobs = sample(logits, params, [row.start + 1 for row in self._rows])
        else:
            tokens, logprobs = self.native.greedy(logits)
        self._slots.index_copy_(0, self.native.rows.slots, tokens)
        return list(map(Sampled, tokens.tolist(), logprobs.tolist()))


class HostSource:
    """`Source` of the CPU world. native: what decodes; None: torch's operations."""

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._pool, self._slots, self._kept = pool, slots, Kept(pool)
        self.native: Native | None = None

    def begin(self, phase: Phase, rows: Sequence[Row]) -> HostInputs | NativeInputs:
        """See `Source`."""
        if phase is not Phase.D:
            return HostInputs(rows, self._pool, self._slots)
        native = self.native
        if rows and native is not None and all(row.tokens is None and row.sample is not None for row in rows):
            return NativeInputs(rows, self._slots, native)
        return HostInputs(rows, self._pool, self._slots, self._kept)
