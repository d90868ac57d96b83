"""Shaping a trace: what is kept, at what size, and that no dependency changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from rollout.trace.read import read
from rollout.trace.shape import Shape, new_tokens
from rollout.trace.trajectory import Trajectory, Turn

turns = st.builds(Turn, st.integers(1, 5000), st.integers(1, 3000), st.floats(0, 1e5))
traces = st.lists(st.lists(turns, min_size=1, max_size=6).map(tuple), min_size=1, max_size=12).map(
    lambda lists: tuple(Trajectory(f"c{i}", each) for i, each in enumerate(lists))
)
shapes = st.builds(
    Shape,
    fraction=st.floats(0.01, 1),
    turns=st.none() | st.integers(1, 7),
    length_scale=st.floats(0.001, 3),
    time_scale=st.floats(0, 3),
)


@given(traces, shapes)
def test_scaling_keeps_which_turn_follows_which(trace: tuple[Trajectory, ...], shape: Shape) -> None:
    shaped = shape.apply(trace)
    assert 1 <= len(shaped) <= len(trace)
    assert abs(len(shaped) - shape.fraction * len(trace)) <= 0.5 or len(shaped) == 1
    for before, after in zip(trace, shaped, strict=False):
        assert after.id == before.id
        assert len(after.turns) == min(len(before.turns), shape.turns or len(before.turns))
        context = 0
        for old, new in zip(before.turns, after.turns, strict=False):
            for length, scaled in ((old.new_tokens, new.new_tokens), (old.output_tokens, new.output_tokens)):
                assert scaled >= 1
                assert abs(scaled - length * shape.length_scale) <= 0.5 or scaled == 1
            assert new.wait_ms == old.wait_ms * shape.time_scale
            # The context is that of the replay: all before it, and what it adds.
            assert (new.retained_tokens, new.input_tokens) == (context, context + new.new_tokens)
            context += new.new_tokens + new.output_tokens
        assert after.longest == context


@given(traces)
def test_the_default_shape_changes_no_length_and_no_wait(trace: tuple[Trajectory, ...]) -> None:
    for before, after in zip(trace, Shape().apply(trace), strict=True):
        assert [(t.new_tokens, t.output_tokens, t.wait_ms) for t in after.turns] == [
            (t.new_tokens, t.output_tokens, t.wait_ms) for t in before.turns
        ]


def test_the_whole_paper_trace_is_its_own_shape() -> None:
    found = read("paper").trajectories
    assert Shape().apply(found) == found


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 300), st.integers(1, 200_000))
def test_prompt_ids_depend_on_seed_trajectory_and_turn_alone(seed: int, turn: int, count: int, size: int) -> None:
    drawn = new_tokens(seed, "c001", turn, count, size)
    assert len(drawn) == count
    assert all(0 <= token < size for token in drawn)
    assert drawn == new_tokens(seed, "c001", turn, count + 5, size)[:count]
    if count > 20 and size > 100:
        others = [(seed + 1, "c001", turn), (seed, "c002", turn), (seed, "c001", turn + 1)]
        assert all(drawn != new_tokens(*other, count, size) for other in others)


def test_prompt_ids_use_the_whole_vocabulary() -> None:
    assert set(new_tokens(0, "c", 0, 2000, 64)) == set(range(64))


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"fraction": 0}, "--fraction"),
        ({"fraction": 1.01}, "--fraction"),
        ({"fraction": float("nan")}, "--fraction"),
        ({"turns": 0}, "--turns"),
        ({"length_scale": 0}, "--length-scale"),
        ({"length_scale": float("inf")}, "--length-scale"),
        ({"time_scale": -0.1}, "--time-scale"),
        ({"time_scale": float("nan")}, "--time-scale"),
    ],
)
def test_values_out_of_range_name_their_flag(values: dict[str, float], flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag} "):
        Shape(**values)  # type: ignore[arg-type]


def test_description_names_the_slice() -> None:
    trace = read("paper")
    line = Shape(fraction=0.125, turns=4, length_scale=0.05, time_scale=0).describe(trace)
    assert line.startswith("paper_replay_1265: 16 of 128 conversations, 64 requests, ")
    assert line.endswith("(--turns 4 --length-scale 0.05 --time-scale 0 --seed 0)")
    assert "--turns" not in Shape().describe(trace)
