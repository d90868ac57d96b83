"""The policy seam, version 1: what a scheduling policy sees, decides and may do. Public and frozen.

A policy is two functions. `plan` is pure: from the shared views and its own memory it decides what this round does, and
every rank computes the same answer. `turn` is a coroutine over a gate: in which order prefill (P) and decode (D) enter
the device in this round. A policy never sees a tensor, a socket or a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Final, Protocol

from kernel.errors import UsageError

SEAM_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Waiting:
    """One of a replica's first waiting requests.

    new_tokens: prompt tokens whose KV is missing, exactly. blocks: KV blocks it must still reserve (0 once it holds its
    lease, as the later parts of a long prompt do).
    """

    request: int
    new_tokens: int
    blocks: int


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank tells all others at the end of a round.

    ready: rows that can decode in the next round. promotable: finished prefills that will decode once promoted (counted
    where this rank has seen the epoch complete). slots: free rows of the slot table. free_blocks: KV blocks that a
    reservation can have (free ones and those kept for idle sessions). inbox: entries received. epoch, reached: P's
    newest epoch and boundary; complete: P's device work of that epoch has finished. tokens: rolling hash of the tokens
    committed so far. busy: work is in flight. paused: the engine is paused. queued: waiting requests, also those beyond
    the first 16.
    """

    rank: int
    round: int
    inbox: int = 0
    ready: int = 0
    promotable: int = 0
    slots: int = 0
    free_blocks: int = 0
    waiting: tuple[Waiting, ...] = ()
    queued: int = 0
    epoch: int = -1
    reached: int = -1
    complete: bool = True
    tokens: int = 0
    busy: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """A token range of one request's missing prompt: `tokens` of them from the first one missing.

    last: the prompt is complete with it, and a token is sampled.
    """

    request: int
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round does, the same on every rank.

    inbox: entries up to this number take effect now. decode: rows of each replica in this round's D iteration, bucket:
    the common padded row count (0: no D). activate: the epoch that starts in this round, -1 for none, with `prefill`,
    the chunks of each replica. epoch: the epoch that is open in this round, -1 for none. span: boundaries that
    `release` grants (ALL: to the end). promote: epochs whose results become decodable now. idle: nothing to do until
    the inbox grows.
    """

    round: int
    inbox: int = 0
    decode: tuple[int, ...] = ()
    bucket: int = 0
    activate: int = -1
    prefill: tuple[tuple[Chunk, ...], ...] = ()
    epoch: int = -1
    span: int = 1
    promote: int = -1
    idle: bool = False
    lookahead: int = 0


ALL: Final = 1 << 30
"""A span that lets P run to its end."""


class Gate(Protocol):
    """The only way in which a turn touches its rank."""

    plan: Plan

    @property
    def p_active(self) -> bool:
        """An epoch is open in this round (rank-shared)."""

    @property
    def d_ready(self) -> bool:
        """This round has a D iteration (rank-shared)."""

    async def reached(self) -> None:
        """P stands at its permitted endpoint, or has been enqueued to its end, or there is none. No device wait."""

    async def enqueued(self) -> None:
        """All of this epoch's P has been enqueued on this rank's device. No device wait."""

    async def completed(self) -> None:
        """All enqueued P has finished on this rank's device, or there is none."""

    async def drained(self) -> None:
        """All enqueued D has finished on this rank's device, or there is none. Tokens are committed with the lag."""

    async def rendezvous(self, tag: str) -> None:
        """All ranks are here. `pre-d` compares plan digests and order hashes; `post-d` ends the round's exchange."""

    def launch_decode(self) -> None:
        """Enqueue this round's D iteration, also on a rank without rows. Nothing if the round has none."""

    def release(self, span: int) -> None:
        """Let P go on by `span` boundaries (ALL: to its end). Nothing if no epoch is open."""


BOUNDS: Final = ("span", "epoch", "backlog")


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a policy claims; `turnstile check` judges each by itself.

    decode_bound: a ready D launches after at most one segment of its `span`, one `epoch`, or the whole `backlog` of P.
    Raises UsageError for another bound.
    """

    deadlock_free: bool = True
    epochs_complete: bool = True
    decode_bound: str = "span"

    def __post_init__(self) -> None:
        if self.decode_bound not in BOUNDS:
            raise UsageError(f"decode_bound={self.decode_bound!r}: a policy may claim {', '.join(BOUNDS)}")


MOST_ROWS: Final = 1 << 16
"""Of a replica: tables of its rows are made at once, whatever decodes."""


@lru_cache(maxsize=1024)
def _bucket(rows: int, buckets: tuple[int, ...], granule: int) -> int:
    least = min((n for n in buckets if n >= rows), default=rows)
    return -(-least // granule) * granule


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that plans respect, fixed when the engine starts.

    world: ranks and replicas. boundaries: safe boundaries of an epoch. prefill_tokens: new tokens of one replica in one
    epoch. rows: slots of a replica. granule: the D bucket is a multiple of it (attention-TP width). buckets: padded row
    counts that D may use.
    """

    size: int
    replicas: int
    boundaries: int
    prefill_tokens: int = 512
    rows: int = 64
    granule: int = 1
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64)

    def bucket(self, rows: int) -> int:
        """The smallest allowed bucket that holds `rows` (0 for none)."""
        return _bucket(rows, self.buckets, self.granule) if rows else 0


@dataclass(frozen=True, slots=True)
class Memory:
    """What the planner carries from round to round; part of the digest.

    round: the next round. inbox: entries that have taken effect. epoch: newest epoch. open: whether it is open. chunks:
    its chunks. permit: endpoint granted so far. extra: a policy's own, any tuple of numbers, strings and tuples.
    """

    round: int = 0
    inbox: int = 0
    epoch: int = -1
    open: bool = False
    chunks: tuple[tuple[Chunk, ...], ...] = ()
    permit: int = 0
    extra: tuple[Any, ...] = field(default=())


class Policy(Protocol):
    """A scheduling policy. Subclass `kernel.sched.planner.Planner` for the common plan and write `turn`.

    name: as in `--policy`. guarantees: what it claims. route: overrides the world's route where set (`none` for a
    policy that orders nothing). Created once a rank with its limits and its own config dataclass.
    """

    name: ClassVar[str]
    guarantees: ClassVar[Guarantees]
    limits: Limits

    def plan(self, views: tuple[RankView, ...], memory: Memory) -> tuple[Plan, Memory]:
        """This round's plan and the memory for the next. Pure: no clock, no randomness, no state of its own."""

    async def turn(self, gate: Gate) -> None:
        """One round's order of entry. Awaits only the gate."""
