"""What end-to-end tests share: a tiny checkpoint, trajectories on a real engine, and transformers as the oracle."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernel.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollout.engine import Completion, Engine

TOLERANCE = 1e-4
"""Of a log-probability, float32."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn of a trajectory, with the whole context it was given."""

    prompt: tuple[int, ...]
    done: Completion


class Oracle:
    """transformers on the same checkpoint, teacher-forced over a prompt and the tokens that followed it."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        # Its grouped matrix product is very slow on CPU.
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
        self._model = model.eval()

    @torch.inference_mode()
    def check(self, trajectory: Sequence[Turn]) -> None:
        """Raise AssertionError unless every token of every turn is the greedy one, its log-probability within
        tolerance.

        One forward over the last context judges all turns, since each is a prefix of the next.
        """
        last = trajectory[-1]
        context = [*last.prompt, *last.done.tokens]
        logits = self._model(torch.tensor([context])).logits[0].float()
        for turn in trajectory:
            start, count = len(turn.prompt), len(turn.done.tokens)
            assert context[:start] == list(turn.prompt)
            drawn = logits[start - 1 : start - 1 + count]
            assert drawn.argmax(-1).tolist() == list(turn.done.tokens)
            expected = drawn.log_softmax(-1).gather(1, torch.tensor(turn.done.tokens)[:, None])[:, 0]
            worst = (expected - torch.tensor(turn.done.logprobs)).abs().max().item()
            assert worst < TOLERANCE, f"log-probability off by {worst}"


async def trajectories(
    engine: Engine, *, count: int, turns: int, seed: int, reuse: bool = True, vocab: int = 256
) -> list[list[Turn]]:
    """`count` greedy trajectories at once, each of `turns` turns with a growing context; prompts depend on the seed."""

    async def one(number: int) -> list[Turn]:
        rng = random.Random(seed * 1000 + number)
        session = engine.session()
        context: list[int] = []
        finished = []
        for _ in range(turns):
            context += [rng.randrange(3, vocab) for _ in range(rng.randrange(1, 40))]
            params = SamplingParams(max_tokens=rng.randrange(1, 14), ignore_eos=True)
            if not reuse:
                await session.close()
                session = engine.session()
            done = await session.generate(context, params)
            finished.append(Turn(tuple(context), done))
            context += done.tokens
        await session.close()
        return finished

    return list(await asyncio.gather(*(one(number) for number in range(count))))
