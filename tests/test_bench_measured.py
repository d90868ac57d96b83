"""The arithmetic that benches share: intervals that cover, pairs that cancel what both sides suffer, fair turns."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measured import below, paired, percent_more, spread, t95, turns

values = st.floats(1e-3, 1e3)


@pytest.mark.parametrize("pairs", [3, 8, 20, 60])
def test_the_interval_covers_the_true_ratio_as_often_as_it_says(pairs: int) -> None:
    draws, truth, covered, trials = random.Random(pairs), 1.02, 0, 2000
    for _ in range(trials):
        base = [draws.lognormvariate(0, 0.5) for _ in range(pairs)]
        of = [truth * each * draws.lognormvariate(0, 0.03) for each in base]
        found = paired(of, base, digits=9)
        covered += found["low"] <= truth <= found["high"]
    assert 0.93 < covered / trials < 0.97


def test_what_slows_both_of_a_pair_cancels() -> None:
    draws = random.Random(7)
    to = [draws.uniform(1, 2) for _ in range(10)]
    of = [1.1 * each * draws.uniform(0.99, 1.01) for each in to]
    slow = [draws.uniform(1, 30) for _ in to]
    assert paired([a * b for a, b in zip(of, slow, strict=True)], [a * b for a, b in zip(to, slow, strict=True)]) == (
        paired(of, to)
    )
    shuffled = paired(of, to[1:] + to[:1])
    assert shuffled["high"] - shuffled["low"] > 5 * (paired(of, to)["high"] - paired(of, to)["low"])


@given(st.lists(st.tuples(values, values), min_size=2, max_size=40))
def test_the_ratio_turned_round_is_its_inverse(pairs: list[tuple[float, float]]) -> None:
    of, to = zip(*pairs, strict=True)
    one, other = paired(of, to, digits=12), paired(to, of, digits=12)
    for name, opposite in (("ratio", "ratio"), ("low", "high"), ("high", "low"), ("min", "max")):
        if 1e-3 < one[name] < 1e3:
            assert one[name] * other[opposite] == pytest.approx(1, rel=1e-6)
    assert one["low"] <= one["ratio"] <= one["high"]
    assert one["min"] <= one["median"] <= one["max"]


def test_per_cent_keep_the_sides_of_the_interval() -> None:
    found = paired([1.01, 1.02, 1.03], [1.0, 1.0, 1.0])
    told = percent_more(found)
    assert told["low"] < told["percent"] < told["high"]
    assert told["percent"] == pytest.approx(2, abs=0.02)


@pytest.mark.parametrize(
    ("low", "high", "met"), [(-2, 0.9, True), (-2, 1.0, None), (0.9, 4, None), (1.0, 4, False), (-20, 21, None)]
)
def test_an_aim_is_met_where_the_whole_interval_says_so(low: float, high: float, met: bool | None) -> None:
    assert below({"percent": 0.5, "low": low, "high": high}, 1.0) is met


def test_one_pair_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two values"):
        paired([1.0], [1.0])
    with pytest.raises(ValueError, match="argument 2 is"):
        paired([1.0, 2.0], [1.0])


def test_student_s_t_narrows_to_the_normal_s() -> None:
    ts = [t95(freedom) for freedom in range(1, 200)]
    assert ts == sorted(ts, reverse=True)
    assert ts[0] == pytest.approx(math.tan(math.pi * 0.475), abs=1e-3)  # one degree of freedom is Cauchy's
    assert ts[1] == pytest.approx(0.95 * math.sqrt(2 / (0.975 * 0.025)) / 2, abs=1e-3)
    assert t95(31) == pytest.approx(2.0395, abs=1e-3)
    assert t95(10**6) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-5)


@given(st.lists(values, min_size=1, max_size=50))
def test_a_spread_is_in_order(some: list[float]) -> None:
    found = spread(some, 9)
    assert found["min"] <= found["median"] <= found["p95"] <= found["max"]
    assert found["median"] == pytest.approx(statistics.median(some), abs=1e-8)
    assert found["n"] == len(some)


@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 99))
def test_everybody_has_a_turn_in_each_round_and_each_place_equally_often(names: int, rounds: int, seed: int) -> None:
    who = [f"n{at}" for at in range(names)]
    order = list(turns(who, rounds, seed))
    assert [round_ for round_, _ in order] == [round_ for round_ in range(rounds) for _ in who]
    places = Counter((name, at % names) for at, (_, name) in enumerate(order))
    assert all(sorted(name for r, name in order if r == round_) == who for round_ in range(rounds))
    if rounds:
        assert max(places.values()) - min(places.get((n, at), 0) for n in who for at in range(names)) <= 1
