"""What an engine's process is asked and what it answers: one engine, loaded once, asked again and again.

Each question is a JSON line on standard input: `prompts` (lists of token ids), `tokens` (to generate for each, greedy)
and `sessions` (a number for each prompt: prompts with the same one continue a conversation; null: none does). Each
answer is a JSON line on standard output: `seconds` and the generated `tokens`. The first line says that the engine is
loaded. Like the engines' own scripts, this imports the standard library alone besides what it measures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Generate = "Callable[[list[list[int]], int, list[int] | None], list[list[int]]]"


def channel() -> Callable[[dict[str, Any]], None]:
    """Where answers go. What the engine prints goes to standard error from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return send


def serve(
    send: Callable[[dict[str, Any]], None],
    about: dict[str, Any],
    generate: Callable[[list[list[int]], int, list[int] | None], list[list[int]]],
) -> None:
    """Answer until standard input ends."""
    send({"ready": about})
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = generate(asked["prompts"], asked["tokens"], asked.get("sessions"))
        seconds = time.perf_counter() - start
        send({"seconds": seconds, "tokens": [list(map(int, each)) for each in tokens]})
