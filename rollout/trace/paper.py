"""Reader of paper-shaped JSONL: one request a line, in the shape of `data/paper_replay_1265.jsonl`.

Fields: conversation_id, turn (from 0), new_tokens, retained_tokens, input_tokens (= retained + new), output_tokens,
wait_ms (client wait before the turn, paper section 7; null on turn 0). Lines of different conversations may interleave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.trace.trajectory import Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.trace.trajectory import Line


def trajectories(lines: Sequence[Line]) -> tuple[Trajectory, ...]:
    """The conversations, in the order of their first lines. Raises UsageError naming file, line and field."""
    conversations: dict[str, list[Turn]] = {}
    for line in lines:
        turns = conversations.setdefault(line.name("conversation_id"), [])
        if line.integer("turn", 0) != len(turns):
            raise line.error("turn", f"must be {len(turns)}, the next turn of its conversation")
        new, retained = line.integer("new_tokens", 1), line.integer("retained_tokens", 0)
        if line.integer("input_tokens", 1) != retained + new:
            raise line.error("input_tokens", f"must be retained_tokens + new_tokens = {retained + new}")
        context = turns[-1].input_tokens + turns[-1].output_tokens if turns else 0
        if retained != context:
            # A replay sends what the model has generated, so it can keep all of the context or none of it.
            raise line.error("retained_tokens", f"must be {context}, the input and output of the turn before")
        wait = line.wait("wait_ms", None if turns else 0.0)
        turns.append(Turn(new, line.integer("output_tokens", 1), wait, retained, retained + new))
    return tuple(Trajectory(name, tuple(turns)) for name, turns in conversations.items())
