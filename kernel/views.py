"""Views and control payloads as bytes, and the comparison of what all ranks must compute alike.

A rendezvous payload holds at most 4,000 bytes: a view with 16 waiting requests takes under 400.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kernel.errors import Divergence
from kernel.sched.policy import Chunk, Memory, Plan, RankView, Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

WAITING = 16
"""Waiting requests that a view describes exactly."""

_HEAD = struct.Struct("<QQIQIIIIIiiQBB")
_WAIT = struct.Struct("<QII")
_PAIR = struct.Struct("<QQ")
_SHARED_BY_PEERS = ("ready", "slots", "free_blocks", "queued", "tokens", "waiting")


def _all_but(kind: type[Any], *others: str) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.name not in others)


_OF_PLAN, _OF_MEMORY = _all_but(Plan, "prefill", "decode"), _all_but(Memory, "chunks", "extra")
_PLAN, _MEMORY, _CHUNK = attrgetter(*_OF_PLAN), attrgetter(*_OF_MEMORY), attrgetter(*_all_but(Chunk))
_NUMBERS = struct.Struct(f"<{len(_OF_PLAN) + len(_OF_MEMORY)}q")
_PEER = attrgetter(*_SHARED_BY_PEERS)

COMPLETE, BUSY, PAUSED = 1, 2, 4
_BITS = (1 << 64) - 1


def digest(value: Any) -> int:
    """64 bits of a value made of dataclasses, tuples, numbers and strings, equal in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def digest_of(plan: Plan, memory: Memory) -> int:
    """That of a round's plan and of what its planner remembers; in every round, and text is slow to write."""
    try:
        numbers = _NUMBERS.pack(*_PLAN(plan), *_MEMORY(memory))
    except struct.error:  # a policy may plan what is no number, or a large one
        numbers = repr((_PLAN(plan), _MEMORY(memory))).encode()
    rest: tuple[Any, ...] = (plan.decode, memory.extra)
    if plan.prefill or memory.chunks:
        rest += (_chunks(plan.prefill), _chunks(memory.chunks))
    return int.from_bytes(hashlib.blake2b(numbers + repr(rest).encode(), digest_size=8).digest(), "little")


def _chunks(replicas: tuple[tuple[Chunk, ...], ...]) -> list[list[Any]]:
    return [list(map(_CHUNK, chunks)) for chunks in replicas]


def fold(rolling: int, *parts: int) -> int:
    """Add integers to a rolling 64-bit hash."""
    for part in parts:
        rolling = ((rolling ^ (part & _BITS)) * 0x100000001B3 + 0x9E3779B97F4A7C15) & _BITS
        rolling ^= rolling >> 29
    return rolling


def mix(*numbers: int) -> int:
    """64 bits of numbers from 0 on, equal in every process: a hash of numbers has no seed. A fifth of `fold`'s time."""
    return hash(numbers) & _BITS


def encode(view: RankView, plan: int, order: int) -> bytes:
    """A view with the digest of this round's plan and the order hash."""
    flags = COMPLETE * view.complete | BUSY * view.busy | PAUSED * view.paused
    head = _HEAD.pack(
        plan, order, view.rank, view.round, view.inbox, view.ready, view.promotable, view.slots, view.free_blocks,
        view.epoch, view.reached, view.tokens, flags, len(view.waiting),
    )  # fmt: skip
    waits = b"".join(_WAIT.pack(w.request, w.new_tokens, w.blocks) for w in view.waiting)
    return head + struct.pack("<I", view.queued) + waits


@lru_cache(maxsize=64)
def decode(blob: bytes) -> tuple[RankView, int, int]:
    """The inverse of `encode`."""
    plan, order, rank, round_, inbox, ready, promotable, slots, free, epoch, reached, tokens, flags, count = (
        _HEAD.unpack_from(blob)
    )
    (queued,) = struct.unpack_from("<I", blob, _HEAD.size)
    at = _HEAD.size + 4
    waiting = tuple(Waiting(*_WAIT.unpack_from(blob, at + i * _WAIT.size)) for i in range(count))
    view = RankView(
        rank, round_, inbox, ready, promotable, slots, free, waiting, queued, epoch, reached,
        bool(flags & COMPLETE), tokens, bool(flags & BUSY), bool(flags & PAUSED),
    )  # fmt: skip
    return view, plan, order


def encode_pair(plan: int, order: int) -> bytes:
    """What pre-d carries."""
    return _PAIR.pack(plan, order)


def decode_pair(blob: bytes) -> tuple[int, int]:
    """The inverse of `encode_pair`."""
    plan, order = _PAIR.unpack(blob)
    return plan, order


def odd_ranks(values: Sequence[Any]) -> tuple[int, ...]:
    """The ranks that differ from the majority; all of them where there is no majority."""
    counts: dict[Any, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    best = max(counts.values())
    winners = [value for value, count in counts.items() if count == best]
    if len(winners) > 1:
        return tuple(range(len(values)))
    return tuple(rank for rank, value in enumerate(values) if value != winners[0])


def check_equal(values: Sequence[Any], round_: int, field: str) -> None:
    """Raise Divergence unless all ranks gave the same value."""
    if any(value != values[0] for value in values):
        shown = ", ".join(f"rank {rank}: {value:#x}" if isinstance(value, int) else f"rank {rank}: {value}"
                          for rank, value in enumerate(values))  # fmt: skip
        raise Divergence(odd_ranks(values), round_, field, shown)


def check_peers(views: Sequence[RankView], width: int) -> None:
    """Raise Divergence unless the `width` attention-TP peers of each replica report the same state."""
    for first in range(0, len(views) if width > 1 else 0, width):
        peers = views[first : first + width]
        states = list(map(_PEER, peers))
        if states.count(states[0]) == width:
            continue
        for name in _SHARED_BY_PEERS:
            values = [getattr(view, name) for view in peers]
            if any(value != values[0] for value in values):
                odd = tuple(first + rank for rank in odd_ranks(values))
                shown = ", ".join(f"rank {first + i}: {value}" for i, value in enumerate(values))
                raise Divergence(odd, peers[0].round, name, shown)


def first_difference(plans: Sequence[str]) -> tuple[str, str]:
    """(field, both values) of the first field in which plans, written `Plan(a=1, b=2)`, differ."""
    fields = [_fields(plan) for plan in plans]
    for name in fields[0]:
        values = [each.get(name, "missing") for each in fields]
        if any(value != values[0] for value in values):
            return name, ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    return "plan", "the texts differ"


def _fields(text: str) -> dict[str, str]:
    """Top-level `name=value` pairs of a dataclass repr."""
    out: dict[str, str] = {}
    depth, start, body = 0, 0, text[text.find("(") + 1 : text.rfind(")")]
    for at, char in enumerate([*body, ","]):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            name, _, value = body[start:at].strip().partition("=")
            if value:
                out[name] = value
            start = at + 1
    return out
