"""Block tables of rows as arrays. Torch-free.

A decode iteration brings every row's whole table, thousands of numbers; a turn's table is one tuple for all of its
life, so it is turned into an array once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kernel.request import Row


class BlockTables:
    """The arrays of the turns that hold slots: one for each slot, replaced when another turn's table comes with it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], NDArray[np.int32]]] = {}

    def of(self, row: Row) -> NDArray[np.int32]:
        """All block numbers of a row's table."""
        known = self._known.get(row.slot)
        if known is None or known[0] is not row.blocks:
            known = self._known[row.slot] = (row.blocks, np.asarray(row.blocks, dtype=np.int32))
        return known[1]

    def pages(self, rows: Sequence[Row], depths: Sequence[int], spare: Sequence[int] = ()) -> NDArray[np.int32]:
        """The first `depths` blocks of each row, one row after the other, and `spare` behind them."""
        parts = [self.of(row)[:depth] for row, depth in zip(rows, depths, strict=True)]
        return np.concatenate([*parts, np.asarray(spare, dtype=np.int32)])

    def fed(self, rows: Sequence[Row], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(block, position) of each fed token, one row after the other: [n] each. size: tokens a block."""
        spans = [np.arange(row.start, row.start + row.fed, dtype=np.int64) for row in rows]
        blocks = [self.of(row)[span // size] for row, span in zip(rows, spans, strict=True)]
        none = np.zeros(0, dtype=np.int64)  # of no rows; and what int32 numbers are widened to
        return np.concatenate([none, *blocks]), np.concatenate([none, *spans])
