"""`models.sampling` for a device: parameters of draws are device rows, so that nothing waits and a graph can hold it.

The same definitions, the same uniform numbers (splitmix64, here in wrapping int64 arithmetic) and, up to the device's
rounding of sums, the same draws. Which of the three ways a batch takes is known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kernel.request import SamplingParams

_BITS: Final = (1 << 64) - 1


def _signed(value: int) -> int:
    """An unsigned 64-bit number as the int64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_MIX: Final = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


class Way(StrEnum):
    """How much of the sampler a batch needs."""

    GREEDY = "greedy"
    PLAIN = "plain"
    """Some rows have a temperature; no row truncates."""
    TRUNCATED = "truncated"


def way(params: Sequence[SamplingParams]) -> Way:
    """The least that serves all of `params`."""
    if not any(p.temperature for p in params):
        return Way.GREEDY
    cut = any(p.temperature and (p.top_k or p.top_p < 1) for p in params)
    return Way.TRUNCATED if cut else Way.PLAIN


def columns(
    params: Sequence[SamplingParams], positions: Sequence[int], vocab: int, rows: int = 0
) -> dict[str, NDArray[Any]]:
    """What `draw` needs of each row, as host arrays by name; padded with greedy rows up to `rows`.

    seed, at (the drawn token's position), kth (index of the last token that top-k keeps): int64. heat: float32, 1 for
    greedy rows. reach: float64, the sum at which top-p stops, 2 for never. greedy: bool.
    """
    size = max(rows, len(params))
    seed, at = np.zeros(size, np.uint64), np.zeros(size, np.int64)
    kth, heat = np.full(size, vocab - 1, np.int64), np.ones(size, np.float32)
    reach, greedy = np.full(size, 2.0, np.float64), np.ones(size, np.bool_)
    for row, (p, position) in enumerate(zip(params, positions, strict=True)):
        if p.temperature:
            seed[row], at[row], greedy[row] = p.seed & _BITS, position, False
            heat[row] = max(p.temperature, 1e-30)
            kth[row] = min(p.top_k or vocab, vocab) - 1
            reach[row] = p.top_p if p.top_p < 1 else 2.0
    return {"seed": seed.view(np.int64), "at": at, "kth": kth, "heat": heat, "reach": reach, "greedy": greedy}


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The tensors of `columns` on the device, [n] each."""

    seed: Tensor
    at: Tensor
    kth: Tensor
    heat: Tensor
    reach: Tensor
    greedy: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> DrawRows:
        """From tensors by the names of `columns`."""
        return cls(*(tensors[name] for name in ("seed", "at", "kth", "heat", "reach", "greedy")))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return x


def uniform(seed: Tensor, at: Tensor) -> Tensor:
    """`models.sampling.uniform` of int64 tensors [n]: [n] float64."""
    bits = _mix(_mix(seed + _GOLDEN) + (at + 1) * _GOLDEN)
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def draw(logits: Tensor, rows: DrawRows, how: Way) -> Tensor:
    """Draw from each row of logits [n, vocab]: [n, 2] int64, the token and its float64 log-probability's bits."""
    token = logits.argmax(-1, keepdim=True)
    scaled = logits.float()
    if how is not Way.GREEDY:
        # As models.sampling: the largest logit becomes 0, so that no temperature overflows; greedy rows have heat 1.
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / rows.heat.unsqueeze(-1)
    if how is Way.TRUNCATED:
        scaled = scaled.masked_fill_(_truncated(scaled, rows), float("-inf"))
    logp = scaled.log_softmax(-1)
    if how is not Way.GREEDY:
        cumulative = logp.to(torch.float64).exp_().cumsum_(-1)
        total = cumulative[:, -1:]
        share = uniform(rows.seed, rows.at).unsqueeze(-1)
        target = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
        # The clamp is for rows of NaN: an index past the vocabulary would end the device's context.
        drawn = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
        token = torch.where(rows.greedy.unsqueeze(-1), token, drawn)
    logprob = logp.gather(1, token).to(torch.float64)
    return torch.cat((token, logprob.view(torch.int64)), dim=1)


def _truncated(scaled: Tensor, rows: DrawRows) -> Tensor:
    """Which tokens top-k and top-p remove: [n, vocab] bool."""
    falling, order = scaled.sort(dim=-1, descending=True, stable=True)
    falling = falling.masked_fill(falling < falling.gather(1, rows.kth.unsqueeze(-1)), float("-inf"))
    probs = falling.to(torch.float64).softmax(-1)
    before = probs.cumsum(-1).sub_(probs)
    removed = (before >= rows.reach.unsqueeze(-1)) | (falling == float("-inf"))
    return torch.empty_like(removed).scatter_(1, order, removed)
