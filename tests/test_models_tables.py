"""Block tables as arrays: what rows over them say, number by number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from kernel.request import Row  # noqa: E402
from models.cuda.tables import BlockTables  # noqa: E402

SIZE = 4


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Rows of different slots, with room in their blocks for what they feed."""
    found = []
    for slot in draw(st.lists(st.integers(0, 3), unique=True, max_size=4)):
        start, fed = draw(st.integers(0, 20)), draw(st.integers(1, 9))
        need = -(-(start + fed) // SIZE)
        blocks = tuple(draw(st.lists(st.integers(0, 99), min_size=need, max_size=need + 3)))
        found.append(Row(slot, tuple(range(fed)), start, blocks, None))
    return found


@given(st.lists(rows(), max_size=4))
def test_every_forward_gets_the_blocks_of_its_own_rows(forwards: list[list[Row]]) -> None:
    """The same slots come again with other turns' tables."""
    tables = BlockTables()
    for forward in forwards:
        blocks, positions = tables.fed(forward, SIZE)
        fed = [(row, at) for row in forward for at in range(row.start, row.start + row.fed)]
        assert positions.tolist() == [at for _, at in fed]
        assert blocks.tolist() == [row.blocks[at // SIZE] for row, at in fed]
        assert blocks.dtype == positions.dtype == np.int64
        depths = [(row.start + row.fed - 1) // SIZE + 1 for row in forward]
        wanted = [block for row, depth in zip(forward, depths, strict=True) for block in row.blocks[:depth]]
        assert tables.pages(forward, depths, [7, 7]).tolist() == [*wanted, 7, 7]


def test_a_turn_s_table_is_made_once() -> None:
    tables, blocks = BlockTables(), tuple(range(5))
    first = tables.of(Row(1, None, 3, blocks, None))
    assert tables.of(Row(1, None, 4, blocks, None)) is first
    assert tables.of(Row(2, None, 4, blocks, None)) is not first
    assert tables.of(Row(1, None, 4, (9, 8), None)).tolist() == [9, 8]
    assert tables.of(Row(1, None, 4, blocks, None)).tolist() == list(blocks)
