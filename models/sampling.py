"""Draws one token a row from its logits, for all rows together.

Draws are counter-based: the uniform number of a draw is a function of the request's seed and of the position that the
token takes, so a request's tokens depend neither on what it is batched with nor on which phase draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kernel.request import SamplingParams

_BITS: Final = (1 << 64) - 1
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014); uint64 arithmetic wraps."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One number in [0, 1) for each (seed, position): [n] float64, multiples of 2**-53. Seeds count modulo 2**64.

    It is output `position + 1` of a splitmix64 generator that starts from the mixed seed. Computed on the host, from
    what the host knows, so that a captured decode takes it as an input.
    """
    keys = np.array([seed & _BITS for seed in seeds], dtype=np.uint64)
    counters = np.array(positions, dtype=np.uint64) + np.uint64(1)
    bits = _mix(_mix(keys + _GOLDEN) + counters * _GOLDEN) >> np.uint64(11)
    return torch.from_numpy(bits * 2.0**-53)


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities that each row is drawn from: [n, vocab] float32; -inf for tokens that cannot be drawn.

    Temperature, then top-k (tokens that tie with the k-th stay, as in transformers), then top-p (the smallest set of
    most likely tokens whose probabilities reach it; ties by lower id), renormalised. Temperature 0 is the untruncated
    distribution at temperature 1, of which greedy reports the log-probability.
    """
    logits = logits.float()
    device = logits.device
    if any(p.temperature not in (0, 1) for p in params):
        # A temperature below float32's range is the greedy limit; the largest logit becomes 0, so nothing overflows.
        heat = torch.tensor([max(p.temperature, 1e-30) if p.temperature else 1.0 for p in params], device=device)
        logits = (logits - logits.amax(-1, keepdim=True)) / heat.unsqueeze(-1)
    limits = [(p.top_k, p.top_p) if p.temperature else (0, 1.0) for p in params]
    if any(k or p < 1 for k, p in limits):
        logits = logits.masked_fill(_truncated(logits, limits), float("-inf"))
    return logits.log_softmax(-1)


def _truncated(logits: Tensor, limits: Sequence[tuple[int, float]]) -> Tensor:
    """Which tokens top-k and top-p remove: [n, vocab] bool. limits: (top_k or 0, top_p) of each row."""
    vocab, device = logits.shape[-1], logits.device
    falling, order = logits.sort(dim=-1, descending=True, stable=True)
    last = torch.tensor([min(k or vocab, vocab) - 1 for k, _ in limits], device=device).unsqueeze(-1)
    falling = falling.masked_fill(falling < falling.gather(1, last), float("-inf"))
    probs = falling.to(torch.float64).softmax(-1)
    before = probs.cumsum(-1) - probs
    # top_p 1 keeps all: rounding may let the sum reach 1 early.
    reach = torch.tensor([p if p < 1 else 2.0 for _, p in limits], dtype=torch.float64, device=device).unsqueeze(-1)
    removed = (before >= reach) | (falling == float("-inf"))
    return torch.empty_like(removed).scatter_(1, order, removed)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(tokens [n] int64, log-probabilities [n] float32) of rows of logits [n, vocab].

    positions: of the drawn tokens. Greedy where the temperature is 0: the lowest id of the largest logit, with its
    log-probability at temperature 1. Otherwise the inverse of the cumulative distribution, in order of token ids.
    """
    # Of the logits themselves: log_softmax rounds neighbours together.
    token = logits.argmax(-1, keepdim=True)
    logp = distribution(logits, params)
    if not any(p.temperature for p in params):
        return token.squeeze(-1), logp.gather(1, token).squeeze(-1)
    cumulative = logp.to(torch.float64).exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    share = uniform([p.seed for p in params], positions).to(logits.device).unsqueeze(-1)
    # The first sum above a target below the total belongs to a token of positive probability.
    target = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True)
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device).unsqueeze(-1)
    token = torch.where(greedy, token, drawn)
    return token.squeeze(-1), logp.gather(1, token).squeeze(-1)
