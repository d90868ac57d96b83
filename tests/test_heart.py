"""Beats of a rank: those inside an absence still ask for patience, whatever turns the loop gets meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout.ranks.heart import Heart
from rollout.ranks.pulse import AWAY_S, Pulse


async def test_beats_inside_an_absence_ask_for_patience() -> None:
    sent: list[dict[str, Any]] = []
    enough = asyncio.Event()

    def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) == 6:
            enough.set()

    heart = Heart(send, 0.001)
    async with heart.away("starting its GPU"):
        await enough.wait()  # the loop turns: something is awaited inside
        inside = list(sent[1:])
    heart.close()
    assert len(inside) >= 5
    assert all(message["away"] == "starting its GPU" for message in inside)
    assert "away" not in sent[-1]


def test_patience_lasts_until_a_beat_without_an_absence() -> None:
    now = 0.0
    pulse = Pulse(10.0, lambda: now)
    pulse.expect(0)
    for message in ({"beat": 0, "at": "", "away": "x"}, {"beat": 0, "at": "", "away": "x"}):
        assert pulse.hear(0, message)
    now = AWAY_S - 1
    pulse.late()
    now += 0.5
    assert pulse.late() == []
    assert pulse.hear(0, {"beat": 1, "at": ""})
    for _ in range(60):
        now += 0.5
        if late := pulse.late():
            break
    assert late == [0]
    assert now < AWAY_S + 12
