"""The size that `turnstile trace` prints."""

from __future__ import annotations

import pytest

from verify.trace import _size


@pytest.mark.parametrize(
    ("size", "told"),
    [(1, "0.1 kB"), (4_200, "4.2 kB"), (99_949, "99.9 kB"), (100_000, "0.1 MB"), (2_345_678_901, "2,345.7 MB")],
)
def test_a_small_file_has_a_size(size: int, told: str) -> None:
    assert _size(size) == told
