"""A request, its sampling parameters, its lifecycle and its lease. Pure; paper section 6."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kernel.errors import UsageError, shown


def whole(value: object, name: str) -> int:
    """`value` as an int, NumPy's and torch's whole numbers among them. Raises UsageError for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name}={shown(value)}: must be a whole number") from None


def _word(value: object, name: str) -> int:
    """A whole number of 64 bits, as tensors hold; of a seed, which counts modulo 2**64, messages hold more."""
    number, most = whole(value, name), 1024 if name == "seed" else 64
    if not -(1 << (most - 1)) <= number < 1 << (most - 1):
        raise UsageError(f"{name}={shown(number)}: must fit into {most} bits")
    return number


def _finite(value: object, name: str) -> float:
    if not isinstance(value, int | float):
        raise UsageError(f"{name}={shown(value)}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{name}={shown(value)}: must be a finite number")
    return number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    max_tokens: longest output, in tokens. temperature: 0 is greedy. top_p, top_k: nucleus and top-k truncation (top_k 0
    is off). stop_token_ids: end after one of these, besides the checkpoint's end-of-text ids (the token is kept).
    seed: makes the draws of one request reproducible whatever it is batched with. ignore_eos: the end-of-text ids do
    not end the request (trace replay). Raises UsageError on values out of range or of another type.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            object.__setattr__(self, name, _word(getattr(self, name), name))
        stops: object = self.stop_token_ids
        if isinstance(stops, str | bytes) or not isinstance(stops, Iterable):
            raise UsageError(f"stop_token_ids={shown(stops)}: must be token ids, as in (2, 7)")
        object.__setattr__(self, "stop_token_ids", tuple(_word(token, "stop_token_ids") for token in stops))
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={shown(self.ignore_eos)}: must be True or False")
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, _finite(getattr(self, name), name))
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens={self.max_tokens}: at least one token must be asked for")
        if not self.temperature >= 0:
            raise UsageError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}: must be in (0, 1]")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k}: must be 0 (off) or more")


class Phase(StrEnum):
    """P or D. On a stream that both use, D of a round comes before P of that round."""

    D = "D"
    P = "P"


class State(StrEnum):
    """Where a request stands. WAITING -> PREFILL -> RUNNING -> FINISHED; CANCELLED from any of them.

    A long prompt goes back from PREFILL to WAITING after each part but the last.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of a trajectory, as it travels in the inbox.

    id: unique for the life of the engine, and its lease: a result that carries another id is of an earlier life.
    session: turns of one session reuse each other's KV. replica: the attention replica that owns the session.
    prompt: the whole context, token ids; it is never retokenised.
    """

    id: int
    session: int
    replica: int
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def longest(self) -> int:
        """Tokens of context that the turn can reach, prompt and output."""
        return len(self.prompt) + self.params.max_tokens


class Row(NamedTuple):
    """One request's part of one forward, as a model sees it.

    slot: row of the replica's slot table, where the last sampled token stays on the device.
    tokens: ids to feed; None feeds the one token that the previous iteration left in `slot`.
    start: position of the first fed token. blocks: KV block table covering start + len(tokens).
    sample: how to draw the next token after the last one fed, None for an inner chunk of a long prompt.
    request: whose it is, a number that no other request of the engine ever has; 0: nobody says.
    """

    slot: int
    tokens: tuple[int, ...] | None
    start: int
    blocks: tuple[int, ...]
    sample: SamplingParams | None
    request: int = 0

    @property
    def fed(self) -> int:
        """Tokens this row feeds."""
        return 1 if self.tokens is None else len(self.tokens)


class Sampled(NamedTuple):
    """A drawn token and its log-probability under the distribution it was drawn from (greedy: temperature 1)."""

    token: int
    logprob: float
