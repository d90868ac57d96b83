"""Decode by the kernels of native.cpp against transformers and against torch's operations; building them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.request import SamplingParams
from kernel.step import Step
from kernel.topology import World
from models.native import build as native_build
from models.native import compiler as native_compiler
from models.tiny import write_checkpoint
from rollout import cli
from rollout.engine import Engine
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


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_held_once(tied: bool, tmp_path: Path) -> None:
    team = Team(write_checkpoint(tmp_path, tied=tied), World(1), compiled=True)
    model, plain = team.models[0], Team(tmp_path, World(1)).models[0]
    held = sum(tensor.untyped_storage().nbytes() for tensor in plain.weights.tensors())
    left = sum(tensor.untyped_storage().nbytes() for tensor in model.weights.tensors())
    vectors = (tensor for tensor in plain.weights.tensors() if tensor.shape.numel() <= model.config.hidden_size)
    assert left <= model.weights.embed.nbytes + sum(each.nbytes for each in vectors) + held // 20
    assert model.weights.embed.untyped_storage().nbytes()
    packed = sum(tensor.nbytes for tensor in model.source.native._held)  # type: ignore[union-attr]
    assert packed < 1.5 * held


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
    assert sorted(each.name for each in first.parent.iterdir()) == [native_build.LOCK, first.name]


@pytest.mark.parametrize(
    ("cxx", "says"),
    [
        ("no-such-compiler -O1", "--compile needs a C++ compiler (CXX=no-such-compiler, which is not there)"),
        ("false", "false ended with 1 (it said nothing)"),
        ("'", 'CXX="\'" is no command (No closing quotation)'),
        ("./garbage", "garbage cannot be run (Exec format error)"),
        ("./plain", "(CXX=./plain, which is not executable)"),
        ("true", "true ended well but made no library"),
        ("./talks", "talks ended with 3 (cannot open x: No space left; ld returned 1)"),
        ("./dies", "dies was killed by signal 11"),
        ("./sleeps", "sleeps did not say its version within 0.2 s and was killed"),
    ],
)
def test_a_compiler_that_does_not_work_is_one_line_and_exit_code_2(
    cxx: str, says: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("garbage", "no program\n"),
        ("plain", ""),
        ("talks", "#!/bin/sh\necho cannot open x: No space left >&2\necho ld returned 1 >&2\nexit 3\n"),
        ("dies", "#!/bin/sh\nkill -SEGV $$\n"),
        ("sleeps", "#!/bin/sh\nsleep 1000\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600 if name == "plain" else 0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(native_compiler, "VERSION_S", 0.2 if cxx == "./sleeps" else 30.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    out = tmp_path / "out"
    assert cli.main(["rollout", "--compile", "--model", str(path), "--length-scale", "0.01", "--out", str(out)]) == 2
    written, err = capfd.readouterr()
    assert (written, err.count("\n")) == ("", 1)
    assert says in err
    assert not out.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_build_and_its_compiler(number: int, path: Path, tmp_path: Path) -> None:
    """Of the command alone, and of its whole group, as a terminal's Ctrl-C does."""
    (tmp_path / "slow").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        'echo $$ > "$0.pid.part"; mv "$0.pid.part" "$0.pid"\nexec sleep 1000\n'
    )
    (tmp_path / "slow").chmod(0o700)
    command = [sys.executable, "-m", "turnstile", "rollout", "--compile", "--length-scale", "0.01", "--out", "out"]
    command += ["--model", str(path)]
    env = {**os.environ, "CXX": str(tmp_path / "slow"), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not (tmp_path / "slow.pid").exists():
            assert process.poll() is None
            time.sleep(0.02)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (130, "turnstile: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(int((tmp_path / "slow.pid").read_text()), 0)
    assert not (tmp_path / "out").exists()


def test_what_a_compiler_writes_is_kept_to_its_end_alone() -> None:
    command = ["sh", "-c", "yes error | head -c 50000000; echo end; echo last >&2; exit 3"]
    code, out, err = native_compiler._run(command, 60.0, None)
    assert (code, err) == (3, "last\n")
    assert len(out) == native_compiler.KEPT
    assert out.endswith("end\n")
    # Its pipes may be closed long before it ends.
    assert native_compiler._run(["sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 5"], 60.0, None) == (5, "", "")


async def test_an_engine_builds_beside_a_loop_that_goes_on(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is cancelled meanwhile, as Ctrl-C does to a program's main task, goes on when the compiler is dead."""
    (tmp_path / "slow").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        'echo $$ > "$0.pid.part"; mv "$0.pid.part" "$0.pid"\nexec sleep 1000\n'
    )
    (tmp_path / "slow").chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "slow"))

    async def use() -> None:
        async with Engine(path, World(1), compiled=True):
            raise AssertionError("it was never built")

    using = asyncio.create_task(use())
    while not (tmp_path / "slow.pid").exists():
        assert not using.done()
        await asyncio.sleep(0.02)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    await asyncio.get_running_loop().shutdown_default_executor()  # as asyncio.run does: waits for the build's thread
    with pytest.raises(ProcessLookupError):
        os.killpg(int((tmp_path / "slow.pid").read_text()), 0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_library_is_built_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_compiler, "build", lambda command, made, stop: made.write_bytes(b"\x7fELF lib" * 100))
    path = native_build.library()
    whole = path.read_bytes()
    data = {"cut": whole[:700], "flipped": whole[:50] + b"?" + whole[51:], "empty": b""}[damage]
    path.write_bytes(data)
    assert native_build.library().read_bytes() == whole


def test_one_builds_and_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[Path] = []

    def build(command: list[str], made: Path, stop: object) -> None:
        built.append(made)
        time.sleep(0.3)
        made.write_bytes(b"library")

    monkeypatch.setattr(native_compiler, "build", build)
    with ThreadPoolExecutor(4) as pool:
        found = {each.result() for each in [pool.submit(native_build.library) for _ in range(4)]}
    assert (len(found), len(built)) == (1, 1)


def test_a_lock_that_is_held_for_ever_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_compiler, "build", lambda command, made, stop: made.write_bytes(b"library"))
    monkeypatch.setattr(native_compiler, "PATIENCE_S", 0.3)
    (tmp_path / "turnstile").mkdir(mode=0o700)
    with (tmp_path / "turnstile" / native_build.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert native_build.library().exists()


@pytest.mark.parametrize("person", [True, False])
def test_a_person_is_told_of_the_build(
    person: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_compiler, "build", lambda command, made, stop: made.write_bytes(b"library"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: person, raising=False)
    for _ in range(2):
        native_build.library()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("turnstile: building kernels for this processor with ") == person
    assert err.count("\n") == person


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"none of g\+\+, clang\+\+, c\+\+ is there\): install g\+\+"):
        native_compiler.compiler()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "turnstile").mkdir()
    os.chmod(tmp_path / "turnstile", 0o777)
    with pytest.raises(UsageError, match="others can write"):
        native_build.library()


def test_it_is_for_a_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollout", "--compile", "--device", "cuda"]) == 2
    assert "--compile applies to --device cpu only" in capfd.readouterr().err
