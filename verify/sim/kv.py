"""A KV pool that remembers what was written where, so that a wrong block, prefix or order shows as a wrong token.

In place of keys and values every position holds a rolling hash of the context up to it. A row reads the hash before
its first position; what it draws depends on that, so its tokens are a function of its context alone, however it was
batched, cut into chunks, evicted or resumed. Reading what was never written, or what the other phase may still be
writing, is an error of the kernel's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import ModelError
from kernel.request import Phase, Row, Sampled, SamplingParams
from kernel.views import fold

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from verify.sim.kernels import Kernel

EMPTY = 0x9E3779B97F4A7C15
"""The hash of no context."""


def draw(context: int, params: SamplingParams, vocab: int) -> Sampled:
    """The token that follows a context with this hash; greedy draws ignore the seed."""
    mixed = fold(context, params.seed) if params.temperature else fold(context)
    mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 29
    return Sampled(mixed % vocab, -(mixed >> 40) / (1 << 22))


def continuation(prompt: Sequence[int], params: SamplingParams, vocab: int) -> Iterator[int]:
    """The tokens of a turn with this whole context, up to its longest output or its stop token."""
    context = fold(EMPTY, *prompt)
    for _ in range(params.max_tokens):
        token = draw(context, params, vocab).token
        yield token
        if token in params.stop_token_ids:
            return
        context = fold(context, token)


class _Block:
    """hashes: of the positions written so far, in order. before: the hash before the first of them."""

    __slots__ = ("before", "hashes", "users")

    def __init__(self) -> None:
        self.before = 0
        self.hashes: list[int] = []
        self.users: dict[Phase, Kernel | None] = {}


class SimKV:
    """One rank's KV pool and slot table.

    block_size: tokens a block. audit: check all blocks of every row, and that nothing overwrites what the other phase
    may still use; costs time linear in the context.
    """

    def __init__(self, block_size: int, audit: bool = True) -> None:
        self.block_size, self.audit = block_size, audit
        self.slots: dict[int, int] = {}
        self._blocks: dict[int, _Block] = {}

    def feed(self, phase: Phase, row: Row) -> int:
        """Write the row's fed tokens; the hash of its context then. Raises ModelError, naming slot and block."""
        tokens = row.tokens if row.tokens is not None else (self._last(row),)
        size = self.block_size
        if row.start + len(tokens) > len(row.blocks) * size:
            raise ModelError(f"slot {row.slot} feeds {row.fed} tokens at {row.start} in {len(row.blocks)} blocks")
        context = self._before(phase, row)
        at, fed = row.start, 0
        while fed < len(tokens):
            block = self._blocks.setdefault(row.blocks[at // size], _Block())
            self._free_of_others(phase, row, row.blocks[at // size], block)
            offset = at % size
            if offset == 0:
                block.before = context
            del block.hashes[offset:]
            count = min(size - offset, len(tokens) - fed)
            for token in tokens[fed : fed + count]:
                context = fold(context, token)
                block.hashes.append(context)
            at, fed = at + count, fed + count
        for number in self._touched(row, at):
            self._blocks[number].users[phase] = None
        return context

    def enqueued(self, phase: Phase, row: Row, last: Kernel) -> None:
        """All of the row's reads and writes end with `last`."""
        last.watched = True
        for number in self._touched(row, row.start + row.fed):
            self._blocks[number].users[phase] = last

    # -- inside -------------------------------------------------------------------------------------------------

    def _touched(self, row: Row, end: int) -> Sequence[int]:
        first = 0 if self.audit else max(0, row.start - 1) // self.block_size
        return row.blocks[first : -(-end // self.block_size)]

    def _last(self, row: Row) -> int:
        token = self.slots.get(row.slot)
        if token is None:
            raise ModelError(f"slot {row.slot} decodes, but nothing was drawn in it: promote before decoding")
        return token

    def _before(self, phase: Phase, row: Row) -> int:
        """The hash of the context before the row's first position."""
        context, size = EMPTY, self.block_size
        first = 0 if self.audit else max(0, row.start - 1) // size
        for index in range(first, -(-row.start // size)):
            number, used = row.blocks[index], min(size, row.start - index * size)
            block = self._blocks.get(number)
            if block is None or len(block.hashes) < used:
                at = index * size + used - 1
                raise ModelError(f"slot {row.slot} reads position {at}, which was never written in block {number}")
            if self.audit and block.before != context:
                raise ModelError(f"slot {row.slot} reads block {number} as its {index}-th: it holds another context")
            self._free_of_others(phase, row, number, block)
            context = block.hashes[used - 1]
        return context

    def _free_of_others(self, phase: Phase, row: Row, number: int, block: _Block) -> None:
        for other, kernel in block.users.items():
            if other is phase:
                continue
            if kernel is not None and kernel.number >= 0 and (trace := kernel.queue.chip.scheduler.trace) is not None:
                trace.touch("finish", kernel.queue.chip.rank, str(other), kernel.number)
            if kernel is None or not kernel.finished:
                raise ModelError(
                    f"slot {row.slot} of {phase} touches block {number} while {other} may still use it:"
                    " wait until that work has drained"
                )
