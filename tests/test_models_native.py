"""Decode by the kernels of native.cpp against transformers and against torch's operations; building them."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.request import SamplingParams
from kernel.step import Step
from kernel.topology import World
from models import native_build
from models.tiny import write_checkpoint
from rollout import cli
from tests.test_models_qwen3_moe import VARIANTS, WORLDS, check_uneven, prompt, serve
from tests.tiny import Context, Oracle, Team

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 32 numbers, which whole registers hold."""
    folder = tmp_path_factory.mktemp("wide")
    return write_checkpoint(folder, hidden=96, heads=6, kv_heads=2, head_dim=32, expert_width=80, seed=5)


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


@pytest.fixture(scope="module")
def teams(wide: Path) -> tuple[Team, Team]:
    """By torch's operations, and compiled."""
    one, two = (Team(wide, World(1), blocks=9000, slots=3000, compiled=compiled) for compiled in (False, True))
    return one, two


def decodes_natively(team: Team) -> bool:
    return all(model.source.native is not None for model in team.models)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_tokens_and_logprobs_are_those_of_transformers(world: World, path: Path, oracle: Oracle) -> None:
    team = Team(path, world, compiled=True)
    assert decodes_natively(team)
    check_uneven(team, oracle)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_family(variant: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **{"layers": 3, "seed": 3, **VARIANTS[variant]})
    oracle = Oracle(path)
    for world in (World(1), World(4, 2, 2), World(4, 2, 1)):
        team = Team(path, world, compiled=True)
        contexts = [team.admit(n % world.adp, prompt(n, 3 + 4 * n), 24) for n in range(3)]
        serve(team, contexts, 5)
        for context in contexts:
            oracle.check(context)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("head_dim", [8, 32, 48, 64, 128])
def test_heads_and_blocks_of_any_size(block_size: int, head_dim: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, layers=2, head_dim=head_dim, seed=7)
    oracle = Oracle(path)
    team = Team(path, World(1), blocks=600, block_size=block_size, compiled=True)
    contexts = [team.admit(0, prompt(n, length), 60) for n, length in enumerate((1, 15, 16, 17, 40))]
    serve(team, contexts, 12)
    for context in contexts:
        oracle.check(context)


@pytest.mark.parametrize("block_size", [4, 16])
def test_bfloat16_is_no_farther_from_float32_than_torch_is(block_size: int, wide: Path) -> None:
    """Of the same bfloat16 weights and draws: the mean distance of the log-probabilities."""
    exact = Oracle(wide)
    off = []
    for compiled in (False, True):
        team = Team(wide, World(1), dtype="bfloat16", block_size=block_size, blocks=300, compiled=compiled)
        contexts = [team.admit(0, prompt(n, 20 + n), 60) for n in range(8)]
        serve(team, contexts, 20)
        found = torch.cat([torch.tensor([drawn.logprob for drawn in one.drawn[1:]]) for one in contexts])
        true = torch.cat([exact.logprobs(one)[1:] for one in contexts])
        off.append((found - true).abs().mean().item())
    assert off[1] < 1.25 * off[0], off


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_a_row_draws_the_same_alone_and_among_others(lengths: list[int], dtype: str, seed: int, wide: Path) -> None:
    """To the last bit: tokens, log-probabilities and what is left in the pool."""
    alone, among = (Team(wide, World(1), dtype=dtype, blocks=400, slots=24, compiled=True) for _ in range(2))
    every = [among.admit(0, prompt(seed + n, length), 40) for n, length in enumerate(lengths)]
    each = [alone.admit(0, prompt(seed + n, length), 40) for n, length in enumerate(lengths)]
    among.prefill(every)
    for other in each:
        alone.prefill([other])
    for _ in range(4):
        among.decode(every)
        for other in each:
            alone.decode([other])
    assert [one.drawn for one in every] == [other.drawn for other in each]
    assert torch.equal(alone.models[0].pool.storage, among.models[0].pool.storage)


@settings(max_examples=15)
@given(cuts=st.sets(st.integers(1, 139)), dtype=st.sampled_from(["float32", "bfloat16"]), seed=st.integers(0, 99))
def test_a_prompt_in_any_parts_is_one_prompt(cuts: set[int], dtype: str, seed: int, wide: Path) -> None:
    """To the last bit, through blocks of 16 tokens and rows in the hundreds."""
    pools = []
    for parts in ((), sorted(cuts)):
        team = Team(wide, World(1), dtype=dtype, blocks=40, block_size=16, compiled=True)
        contexts = [team.admit(0, prompt(seed + n, length), 150) for n, length in enumerate((140, 33, 64))]
        team.prefill(contexts, parts)
        pools.append((team.models[0].pool.storage, [one.drawn for one in contexts]))
    assert torch.equal(pools[0][0], pools[1][0])
    assert pools[0][1] == pools[1][1]


def test_an_iteration_at_once_is_the_one_by_layers(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone has no sites to stop at; with one, layers are computed call by call: to the last bit the same."""
    found = []
    for alone in (True, False):
        monkeypatch.setattr(Step, "alone", alone)
        team = Team(wide, World(1), dtype="bfloat16", blocks=200, block_size=16, compiled=True)
        contexts = [team.admit(0, prompt(n, 9 + n), 60) for n in range(9)]
        serve(team, contexts, 12)
        found.append(([one.drawn for one in contexts], team.models[0].pool.storage))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@settings(max_examples=15)
@given(
    heat=st.lists(st.sampled_from([0.0, 0.7, 1.0, 2.0]), min_size=1, max_size=6),
    top_k=st.integers(0, 9),
    seed=st.integers(0, 999),
)
def test_sampled_draws_are_those_of_torch(heat: list[float], top_k: int, seed: int, teams: tuple[Team, Team]) -> None:
    drawn = []
    for team in teams:
        params = [SamplingParams(temperature=one, top_k=top_k, seed=seed + n) for n, one in enumerate(heat)]
        contexts = [team.admit(0, prompt(seed + n, 5), 12, each) for n, each in enumerate(params)]
        serve(team, contexts, 5)
        drawn.append([[one.token for one in context.drawn] for context in contexts])
    assert drawn[0] == drawn[1]


def test_new_weights_decode(path: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, seed=9)
    team = Team(path, World(1), compiled=True)
    serve(team, [team.admit(0, prompt(3, 6), 20)], 3)
    team.models[0].reload(str(other))
    context = team.admit(0, prompt(4, 6), 20)
    serve(team, [context], 8)
    Oracle(other).check(context)


def test_slots_that_other_turns_take_over(path: Path, oracle: Oracle) -> None:
    """A slot's table is copied once for a turn, so another turn's must be noticed; also one that is longer."""
    team = Team(path, World(1), blocks=4000, slots=4, compiled=True)
    for length in (5, 9, 700, 7):
        context = team.admit(0, prompt(length, 5), 5 + length)
        context.slot = 1
        other = Context(2, 0, prompt(length + 1, 3), blocks=team.admit(0, [1], 40).blocks)
        team._next_slot[0] = 0
        serve(team, [context, other], 6)
        oracle.check(context)
        oracle.check(other)


# -- building -----------------------------------------------------------------------------------------------------


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native_build.library()
    built = first.stat().st_mtime_ns
    assert native_build.library() == first
    assert first.stat().st_mtime_ns == built
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert [each.name for each in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize(
    ("cxx", "says"),
    [
        ("no-such-compiler -O1", "--compile needs a C++ compiler (CXX=no-such-compiler, which is not there)"),
        ("false", "ended with 1"),
    ],
)
def test_a_compiler_that_does_not_work_is_one_line_and_exit_code_2(
    cxx: str, says: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    assert cli.main(["rollout", "--compile", "--model", str(path), "--length-scale", "0.01"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"none of g\+\+, clang\+\+, c\+\+ is there\): install g\+\+"):
        native_build.compiler()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "turnstile").mkdir()
    os.chmod(tmp_path / "turnstile", 0o777)
    with pytest.raises(UsageError, match="others can write"):
        native_build.library()


def test_it_is_for_a_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollout", "--compile", "--device", "cuda"]) == 2
    assert "--compile applies to --device cpu only" in capfd.readouterr().err
