"""Reader of Mooncake JSONL, with conversations derived from `hash_ids`, and of its multi-turn extension.

Fields: timestamp (ms since the start), input_length, output_length (tokens), hash_ids (ids of the prompt's blocks of
512 tokens; equal ids mean an equal prefix). A line with `session_id` is a turn of that session instead: its
input_length is what the turn adds, and `delay` (ms) is the wait after the session's previous turn.

Mooncake records arrivals and no conversations. A request continues the latest earlier request that holds the last of
its leading known blocks, if it starts with all whole blocks of that one's prompt, these are more than one, and it is
longer. Its wait is the time between the two arrivals: the record has no completions, so this includes the service time
of the earlier request and is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rollout.trace.trajectory import Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.trace.trajectory import Line

BLOCK: Final = 512
"""Tokens of one hashed block."""


@dataclass(slots=True)
class _Request:
    """A request whose conversation is found by its blocks."""

    turn: Turn
    whole: tuple[int, ...]
    root: str


def trajectories(lines: Sequence[Line]) -> tuple[Trajectory, ...]:
    """The conversations, in the order of their first lines. Raises UsageError naming file, line and field."""
    conversations: dict[str, list[Turn]] = {}
    holders: dict[int, _Request] = {}
    for index, line in enumerate(lines):
        if "session_id" in line.record:
            turns = conversations.setdefault(f"s{line.name('session_id')}", [])
            turns.append(_session_turn(line, turns))
            continue
        request = _derived(line, _blocks(line), holders, f"r{index}")
        conversations.setdefault(request.root, []).append(request.turn)
    return tuple(Trajectory(name, tuple(turns)) for name, turns in conversations.items())


def _session_turn(line: Line, before: Sequence[Turn]) -> Turn:
    new, output = line.integer("input_length", 1), line.integer("output_length", 1)
    arrival = line.number("timestamp") if line.record.get("timestamp") is not None else None
    if not before:
        return Turn(new, output, line.wait("delay", arrival or 0.0), 0, new, arrival)
    last = before[-1]
    between = 0.0
    if arrival is not None and last.arrival_ms is not None:
        between = _since(line, arrival, last.arrival_ms)
    retained = last.input_tokens + last.output_tokens
    return Turn(new, output, line.wait("delay", between), retained, retained + new, arrival)


def _derived(line: Line, blocks: tuple[int, ...], holders: dict[int, _Request], name: str) -> _Request:
    length, output = line.integer("input_length", 1), line.integer("output_length", 1)
    arrival = line.number("timestamp")
    known = 0
    while known < len(blocks) and blocks[known] in holders:
        known += 1
    retained = min(known * BLOCK, length)
    turn = Turn(length, output, arrival, retained, length, arrival)
    request = _Request(turn, blocks[: length // BLOCK], name)
    parent = holders[blocks[known - 1]] if known else None
    if parent and _continues(parent, blocks, length):
        before = parent.turn
        # What the context lacks after the earlier answer; an answer that the client cut leaves less than one token.
        new = max(1, length - before.input_tokens - before.output_tokens)
        wait = _since(line, arrival, before.arrival_ms or 0.0)
        request.turn, request.root = replace(turn, new_tokens=new, wait_ms=wait), parent.root
    for block in blocks:
        holders[block] = request
    return request


def _continues(parent: _Request, blocks: tuple[int, ...], length: int) -> bool:
    whole = len(parent.whole)
    return whole > 1 and length > parent.turn.input_tokens and blocks[:whole] == parent.whole


def _blocks(line: Line) -> tuple[int, ...]:
    ids = line.record.get("hash_ids", [])
    if not isinstance(ids, list) or any(isinstance(block, bool) or not isinstance(block, int) for block in ids):
        raise line.error("hash_ids", "must be a list of integers")
    return tuple(ids)


def _since(line: Line, arrival: float, before: float) -> float:
    if arrival < before:
        raise line.error("timestamp", f"must not be before the previous turn's, {before:g}")
    return arrival - before
