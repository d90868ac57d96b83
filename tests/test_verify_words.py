"""Words that reports share."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify import words
from verify.live import threads


@given(st.floats(-1e6, 1e6), st.integers(0, 2))
def test_no_duration_rounds_to_nothing(value: float, digits: int) -> None:
    told = words.seconds(value, digits)
    number = float(told.removeprefix("under ").removesuffix(" s"))
    assert number > 0
    if told.startswith("under "):
        assert value < number
    else:
        assert abs(number - value) <= 0.5000001 * 10.0**-digits


@pytest.mark.parametrize(("left", "told"), [(0.2, "under 1 s"), (-3.0, "under 1 s"), (29.4, "29 s")])
def test_a_wait_that_is_nearly_over_ends_soon(left: float, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "remaining", lambda _: left)
    assert threads._clock(None) == f"the clock, in {told}"  # type: ignore[arg-type]
    assert not re.search(r"\b0(\.0+)? s\b", threads._clock(None))  # type: ignore[arg-type]
