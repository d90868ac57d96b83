"""Draws against exact distributions, against a plain reference, and against transformers' processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel.request import SamplingParams
from models.sampling import distribution, sample, uniform

MASK = (1 << 64) - 1
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 0.05, 0.7, 1.0, 1.3, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 17, 1000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(-(2**65), 2**65),
)


def logits_of(seed: int, rows: int, vocab: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def plain(logits: list[float], p: SamplingParams) -> list[float]:
    """The distribution by its definition, in Python floats: probabilities by token id."""
    if p.temperature == 0:
        p = SamplingParams(temperature=1.0)
    top = max(logits)
    weights = [math.exp((x - top) / p.temperature) if (x - top) / p.temperature > -700 else 0.0 for x in logits]
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if p.top_k and p.top_k < len(kept):
        kept = [token for token in kept if logits[token] >= logits[kept[p.top_k - 1]]]
    total, reached = sum(weights[token] for token in kept), 0.0
    nucleus: list[int] = []
    for token in kept:
        if nucleus and p.top_p < 1 and reached >= p.top_p * total:
            break
        nucleus.append(token)
        reached += weights[token]
    return [weights[token] / reached if token in nucleus else 0.0 for token in range(len(logits))]


def splitmix64(state: int) -> int:
    """The published generator's output for a state, in Python integers."""
    z = state & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_uniform_is_splitmix64_of_seed_and_position(draws: list[tuple[int, int]]) -> None:
    golden = 0x9E3779B97F4A7C15
    expected = [(splitmix64(splitmix64(seed + golden) + (at + 1) * golden) >> 11) / 2**53 for seed, at in draws]
    assert uniform([seed for seed, _ in draws], [at for _, at in draws]).tolist() == expected


def test_uniform_is_uniform_over_seeds_and_over_positions() -> None:
    for draws in (uniform(range(20000), [7] * 20000), uniform([7] * 20000, range(20000))):
        counts = torch.histc(draws, 100, 0, 1)
        # Chi-square of 99 degrees of freedom: 99 +- 14; 160 is beyond 1 in 10,000.
        assert ((counts - 200) ** 2 / 200).sum() < 160
        assert torch.corrcoef(torch.stack((draws[:-1], draws[1:])))[0, 1].abs() < 0.03


@given(st.integers(0, 1000), st.lists(PARAMS, min_size=1, max_size=6), st.integers(2, 40))
def test_distribution_is_the_plain_one(seed: int, params: list[SamplingParams], vocab: int) -> None:
    logits = logits_of(seed, len(params), vocab)
    found = distribution(logits, params).exp()
    for row, p in enumerate(params):
        expected = torch.tensor(plain(logits[row].tolist(), p))
        assert torch.allclose(found[row], expected, atol=1e-6, rtol=1e-4), p


@given(st.integers(0, 1000), st.sampled_from([0.3, 0.7, 1.0, 2.0]), st.integers(0, 60), st.floats(0.05, 1.0))
def test_distribution_is_that_of_transformers_processors(seed: int, heat: float, top_k: int, top_p: float) -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = logits_of(seed, 3, 50)
    warpers, nothing = LogitsProcessorList(), torch.LongTensor([[0]] * 3)
    if heat != 1:
        warpers.append(TemperatureLogitsWarper(heat))
    if top_k:
        warpers.append(TopKLogitsWarper(min(top_k, 50)))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(nothing, logits.clone()).log_softmax(-1)
    found = distribution(logits, [SamplingParams(temperature=heat, top_k=top_k, top_p=top_p)] * 3)
    assert torch.allclose(found, expected, atol=1e-5)


def test_ties_with_the_kth_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = distribution(logits, [SamplingParams(temperature=1.0, top_k=2)]) > float("-inf")
    assert kept.tolist() == [[False, True, True, True, True, False]]


@given(st.integers(0, 1000), st.lists(PARAMS, min_size=2, max_size=6), st.data())
def test_a_draw_does_not_depend_on_its_batch(seed: int, params: list[SamplingParams], data: st.DataObject) -> None:
    logits = logits_of(seed, len(params), 33)
    at = [data.draw(st.integers(1, 5000)) for _ in params]
    tokens, logprobs = sample(logits, params, at)
    for row in range(len(params)):
        token, logprob = sample(logits[row : row + 1], [params[row]], [at[row]])
        assert token.item() == tokens[row].item()
        assert torch.allclose(logprob[0], logprobs[row], atol=1e-6)


@given(st.integers(0, 1000), st.lists(PARAMS, min_size=1, max_size=6))
def test_a_draw_is_possible_and_its_logprob_that_of_its_distribution(seed: int, params: list[SamplingParams]) -> None:
    logits = logits_of(seed, len(params), 33)
    tokens, logprobs = sample(logits, params, [3] * len(params))
    expected = distribution(logits, params).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(logprobs, expected) or torch.allclose(logprobs, expected, atol=1e-6)
    assert logprobs.isfinite().all()
    for row, p in enumerate(params):
        if p.temperature == 0:
            assert tokens[row] == logits[row].argmax()
            assert torch.allclose(logprobs[row], logits[row].log_softmax(-1).max(), atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=9),
        SamplingParams(temperature=1.4, top_p=0.8),
        SamplingParams(temperature=0.9, top_k=12, top_p=0.7),
    ],
    ids=lambda p: f"t{p.temperature} k{p.top_k} p{p.top_p}",
)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    """Chi-square over 40,000 draws of one request's positions; the seeds are fixed, so this never flickers."""
    logits = logits_of(11, 1, 24, scale=1.2)
    count = 40000
    tokens, _ = sample(logits.expand(count, -1), [params] * count, range(count))
    observed = torch.bincount(tokens, minlength=24).double()
    expected = torch.tensor(plain(logits[0].tolist(), params)).double() * count
    assert observed[expected == 0].sum() == 0
    cells = expected > 0
    chi2 = ((observed - expected) ** 2 / expected)[cells].sum().item()
    freedom = int(cells.sum()) - 1
    # Wilson and Hilferty's normal approximation, 4 standard deviations.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4


def test_a_token_of_no_probability_is_never_drawn_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    for share, expected in ((0.0, 1), (1 - 2**-53, 3), (1.0, 3)):
        monkeypatch.setattr("models.sampling.uniform", lambda *_, u=share: torch.tensor([u], dtype=torch.float64))
        assert sample(logits, [SamplingParams(temperature=1.0)], [0])[0].item() == expected


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_greedy_is_the_largest_logit_and_the_lowest_id_of_equal_ones(others: float) -> None:
    near = torch.full((2, 4000), 0.9)
    near[0, 100], near[0, 200] = 1.0, torch.tensor(1.0).nextafter(torch.tensor(2.0))
    near[1, 300] = near[1, 400] = 1.0
    assert near[0].log_softmax(-1)[100] == near[0].log_softmax(-1)[200], "a case where rounding hides the difference"
    params = [SamplingParams(), SamplingParams(), SamplingParams(temperature=others)]
    tokens, _ = sample(torch.cat((near, near[:1])), params, [1, 1, 1])
    assert tokens[:2].tolist() == [200, 300]


def test_half_precision_logits_are_drawn_in_float32() -> None:
    logits = logits_of(5, 4, 100).bfloat16()
    params = [SamplingParams(temperature=t, seed=3) for t in (0.0, 0.5, 1.0, 2.0)]
    found, logprobs = sample(logits, params, [9] * 4)
    same, expected = sample(logits.float(), params, [9] * 4)
    assert torch.equal(found, same)
    assert torch.equal(logprobs, expected)
    assert np.isfinite(logprobs.numpy()).all()
