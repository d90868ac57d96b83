"""Qwen3-MoE on all kinds of worlds against transformers on the same checkpoint: tokens and log-probabilities."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import ModelError
from kernel.request import Phase, Row, SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from tests.tiny import Context, Oracle, Team

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WORLDS = [
    World(1),
    World(2, 2, 2),
    World(2, 1, 1),
    World(2, 1, 2),
    World(2, 2, 1),
    World(4, 2, 4, "flat"),
    World(4, 2, 4, "cross"),
    World(4, 4, 4),
    World(4, 4, 1),
    World(4, 1, 1),
    World(4, 1, 4),
    World(4, 1, 2),
    World(4, 2, 2, "flat"),
    World(4, 2, 2, "cross"),
    World(4, 2, 1, "flat"),
    World(4, 2, 1, "cross"),
    World(1, exchange="split"),
    World(2, 2, 2, exchange="split"),
    World(2, 2, 2, exchange="split", cut="sublayer"),
    World(4, 4, 4, exchange="split"),
    World(4, 2, 4, exchange="split"),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "tied": {"tied": True},
    "biases": {"attention_bias": True},
    "dense layers": {"dense_layers": (0, 2)},
    "plain softmax": {"norm_topk_prob": False, "experts": 12, "top_k": 3},
    "wide heads": {"head_dim": 24, "kv_heads": 4},
    "one KV head, odd vocabulary": {"kv_heads": 1, "vocab": 203},
    "theta": {"rope_theta": 50.0, "layers": 1},
}


def prompt(seed: int, length: int, vocab: int = 203) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


@pytest.fixture(scope="module")
def single(path: Path) -> Team:
    """One rank, shared by tests that leave it as they found it but for used blocks."""
    return Team(path, World(1), blocks=4000, slots=1000)


def serve(team: Team, contexts: Sequence[Context], steps: int) -> None:
    """Prefill all, then decode; context i stops after `steps - i` tokens, so that batches shrink unevenly."""
    team.prefill(contexts)
    for done in range(1, steps):
        live = [one for number, one in enumerate(contexts) if number < steps - done]
        if live:
            team.decode(live)


def check_uneven(team: Team, oracle: Oracle) -> None:
    """Batches that grow, shrink and are padded, against transformers."""
    world = team.world
    # The first replica gets most of the rows and the last one, where there are several, none at first.
    homes = [0, 0, 0, *range(max(1, world.adp - 1)), 0]
    contexts = [team.admit(home, prompt(n, 1 + 5 * n % 13), 40) for n, home in enumerate(homes)]
    serve(team, contexts, 9)
    late = team.admit(world.adp - 1, prompt(77, 11), 40)
    serve(team, [late], 5)
    team.decode([late, contexts[0]], bucket=4)
    for context in (*contexts, late):
        assert context.drawn
        oracle.check(context)
    assert len({sampled.token for context in contexts for sampled in context.drawn}) >= 20


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_tokens_and_logprobs_are_those_of_transformers(world: World, path: Path, oracle: Oracle) -> None:
    check_uneven(Team(path, world), oracle)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_family(variant: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **{"layers": 3, "seed": 3, **VARIANTS[variant]})
    oracle = Oracle(path)
    for world in (World(1), World(2, 2, 2), World(4, 1, 1), World(4, 2, 2), World(4, 2, 1)):
        team = Team(path, world)
        contexts = [team.admit(n % world.adp, prompt(n, 3 + 4 * n), 24) for n in range(3)]
        serve(team, contexts, 5)
        for context in contexts:
            oracle.check(context)


def test_generate(single: Team, oracle: Oracle) -> None:
    """transformers' own loop with its own cache, for a text long enough to go through several blocks."""
    context = single.admit(0, prompt(1, 7), 40)
    serve(single, [context], 32)
    assert context.tokens[7:] == oracle.generate(context.tokens[:7], 32)


@settings(max_examples=15)
@given(cuts=st.sets(st.integers(1, 20)), seed=st.integers(0, 99), span=st.integers(1, 5))
def test_a_prompt_in_any_parts_is_one_prompt(cuts: set[int], seed: int, span: int, single: Team) -> None:
    whole, parts = ([single.admit(0, prompt(seed + n, length), 24) for n, length in enumerate((21, 9))] for _ in "ab")
    single.prefill(whole)
    single.prefill(parts, sorted(cuts), span=span)
    for context, expected in zip(parts, whole, strict=True):
        assert context.tokens == expected.tokens
        assert context.drawn[0].logprob == pytest.approx(expected.drawn[0].logprob, abs=1e-4)
        for pool in (single.models[0].pool.keys, single.models[0].pool.values):
            kept, same = (
                pool[:, list(one.blocks)].flatten(1, 2)[:, : len(one.tokens) - 1] for one in (context, expected)
            )
            assert torch.allclose(kept, same, atol=1e-3)


@pytest.mark.parametrize("world", [World(2, 2, 1), World(4, 2, 4), World(4, 1, 1)], ids=str)
def test_parts_on_several_ranks(world: World, path: Path, oracle: Oracle) -> None:
    team = Team(path, world)
    contexts = [team.admit(n % world.adp, prompt(n, length), 24) for n, length in enumerate((19, 4, 1))]
    team.prefill(contexts, (3, 4, 11))
    team.decode(contexts)
    for context in contexts:
        oracle.check(context)


@pytest.mark.parametrize("world", [World(1), World(4, 2, 2)], ids=str)
def test_a_second_turn_continues_the_first_ones_blocks(world: World, path: Path, oracle: Oracle) -> None:
    team = Team(path, world)
    contexts = [team.admit(n % world.adp, prompt(n, 5 + 3 * n), 48) for n in range(3)]
    serve(team, contexts, 6)
    for number, context in enumerate(contexts):
        # The last drawn token was never fed: all before it is in the blocks.
        known = len(context.tokens) - 1
        context.tokens += prompt(50 + number, 6)
        context.drawn.clear()
        team.prefill([context], start=known)
    for _ in range(4):
        team.decode(contexts)
    for context in contexts:
        oracle.check(context)


def test_decode_runs_inside_a_prefill(single: Team, oracle: Oracle) -> None:
    """P and D of one rank interleave at every boundary; neither leaves in the model what the other trips on."""
    running = [single.admit(0, prompt(n, 6), 30) for n in range(3)]
    single.prefill(running)
    coming = single.admit(0, prompt(9, 14), 30)
    rows = [Row(coming.slot, tuple(coming.tokens), 0, coming.blocks, coming.params)]
    prefill = single.driver(Phase.P, 0, rows)
    for boundary in range(single.models[0].layers):
        assert not prefill.advance(boundary)
        single.decode(running[boundary % 2 :])
    assert prefill.advance(single.models[0].layers)
    assert prefill.result is not None
    single.keep([coming], prefill.result)
    single.decode([*running, coming])
    for context in (*running, coming):
        oracle.check(context)


def test_attention_of_a_layer_comes_before_its_boundary(path: Path) -> None:
    """Boundary 0 stands before everything; at boundary i decode overlaps with layer i's attention."""
    team = Team(path, World(1))
    layers, keys = team.models[0].layers, team.models[0].pool.keys
    driver = team.driver(Phase.P, 0, [Row(0, (5, 6, 7), 0, (1,), None)])
    for boundary in range(layers):
        assert not driver.advance(boundary)
        written = [bool(keys[layer].any()) for layer in range(layers)]
        assert written == [boundary > 0 and layer <= boundary for layer in range(layers)]
    assert driver.advance(layers)
    assert driver.result == [None]


@pytest.mark.parametrize("world", [World(1), World(2, 1, 1), World(2, 2, 2)], ids=str)
def test_draws_depend_on_seed_and_position_alone(world: World, path: Path) -> None:
    """Alone or batched, drawn by decode or by the prefill of all that came before: the same tokens."""
    params = [
        SamplingParams(temperature=t, top_p=p, seed=n) for n, (t, p) in enumerate(((0.7, 1.0), (1.0, 0.9), (2.0, 0.95)))
    ]
    team = Team(path, world, blocks=400, slots=64)
    together = [team.admit(0, prompt(n, 5), 30, params[n]) for n in range(3)]
    serve(team, together, 10)
    for number, batched in enumerate(together):
        alone = team.admit(world.adp - 1, prompt(number, 5), 30, params[number])
        serve(team, [alone], 8)
        assert alone.tokens == batched.tokens[: len(alone.tokens)]
        assert [s.logprob for s in alone.drawn] == pytest.approx([s.logprob for s in batched.drawn][:8], abs=1e-4)
        for length in (6, 9):
            again = team.admit(0, batched.tokens[:length], 30, params[number])
            team.prefill([again])
            assert again.tokens == batched.tokens[: length + 1]
    assert len({tuple(context.tokens[5:]) for context in together}) == 3


def test_rows_may_bring_their_token_or_take_it_from_the_slot(single: Team, oracle: Oracle) -> None:
    contexts = [single.admit(0, prompt(n, 4), 20) for n in range(4)]
    single.prefill(contexts)
    rows = [
        Row(one.slot, None if n % 2 else (one.tokens[-1],), len(one.tokens) - 1, one.blocks, one.params)
        for n, one in enumerate(contexts)
    ]
    single.keep(contexts, single.forward(Phase.D, [rows])[0])
    # Feeding without drawing leaves the slot alone.
    slots = single.models[0].slots.clone()
    quiet = [Row(one.slot, None, len(one.tokens) - 1, one.blocks, None) for one in contexts]
    assert single.forward(Phase.D, [quiet]) == [[None] * 4]
    assert single.models[0].slots.equal(slots)
    mixed = [
        Row(one.slot, None, len(one.tokens) - 1, one.blocks, one.params if n < 2 else None)
        for n, one in enumerate(contexts)
    ]
    results = single.forward(Phase.D, [mixed])[0]
    assert [result is None for result in results] == [False, False, True, True]
    single.keep(contexts, results)
    for context in contexts:
        oracle.check(context)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_idle_replicas_take_part(world: World, path: Path) -> None:
    team = Team(path, world)
    assert team.forward(Phase.D, [[] for _ in range(world.adp)], bucket=4) == [[] for _ in range(world.adp)]
    assert all(not model.pool.storage.any() for model in team.models)


@pytest.mark.parametrize("world", [World(1), World(2, 1, 1), World(4, 2, 4)], ids=str)
def test_bfloat16_is_as_close_as_transformers(world: World, path: Path, oracle: Oracle) -> None:
    """Rounding flips routes in so small a model, and processors round differently, so single tokens may be far off: the
    median tells."""
    team, theirs = Team(path, world, dtype="bfloat16"), Oracle(path, torch.bfloat16)
    contexts = [team.admit(n % world.adp, prompt(n, 6 + n), 20 + n) for n in range(12)]
    serve(team, contexts, 12)
    ours, other = [], []
    for context in contexts:
        expected, rounded = oracle.logprobs(context), theirs.logprobs(context)
        found = torch.tensor([sampled.logprob for sampled in context.drawn])
        ours.append((found - expected).abs())
        other.append((rounded - expected).abs())
    assert torch.cat(ours).median() < 1.5 * torch.cat(other).median() < 0.2


def test_a_token_past_its_blocks_is_an_error(single: Team) -> None:
    context = single.admit(0, prompt(0, 9), 8)
    with pytest.raises(IndexError):
        single.prefill([context])


def test_the_step_is_what_catches_a_model_that_skips_a_site(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(path, World(2, 2, 2))
    monkeypatch.setattr("kernel.step.Step.scatter", lambda self, layer, partial: self.own(partial))
    with pytest.raises(ModelError, match="P forward runs"):
        team.prefill([team.admit(0, prompt(0, 3), 8)])
