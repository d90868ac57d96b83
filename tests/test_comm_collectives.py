"""Shared-memory collectives against two oracles: gloo, and the sum in member order computed from everybody's input."""

from __future__ import annotations

import os
import threading
import time
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from kernel.comm.gloo import GlooWorld  # noqa: E402
from kernel.comm.shared import Arena  # noqa: E402
from kernel.comm.shm_collectives import SharedCollectives  # noqa: E402
from kernel.errors import Divergence, RankLost, UsageError  # noqa: E402
from kernel.request import Phase  # noqa: E402
from kernel.topology import Role, World  # noqa: E402
from tests.ranks import Me, Ranks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORLD = World(4, adp=2, ep=4)
"""TP (also EP) of four, ATP {0,1} {2,3}, ADP {0,2} {1,3}."""
CAPACITY, SPLIT = 1 << 16, 1 << 15
DTYPES = ("float32", "bfloat16", "int64", "float16", "float64", "int32", "uint8")
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""gloo adds in another order."""
ROLES = (Role.TP, Role.ATP, Role.ADP, Role.ETP, Role.EP)


@contextmanager
def world(store: Path) -> Iterator[Ranks]:
    with Ranks(WORLD, capacity=CAPACITY, timeout_s=120) as ranks:
        ranks.run(begin, store / "gloo")
        yield ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with world(tmp_path_factory.mktemp("store")) as ranks:
        yield ranks


def begin(me: Me, store: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 4), rank=me.rank, world_size=4)
    gloo = GlooWorld(WORLD, me.rank)
    for phase in Phase:
        me.keep["shared", phase] = SharedCollectives(me.arena, phase, me.rank, split_bytes=SPLIT)
        me.keep["gloo", phase] = gloo.collectives(phase)


def drawn(rank: int, shape: list[int], dtype: str, seed: int) -> torch.Tensor:
    """Rank's input. With an odd seed, floats hold huge values that cancel, so that the order of additions shows."""
    source = torch.Generator().manual_seed(seed * 16 + rank)
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.randint(0, 60, shape, generator=source).to(kind)
    x = torch.randn(shape, generator=source)
    if seed % 2:
        huge = 2.0**15 * torch.randint(-1, 2, shape, generator=source)
        x = torch.where(huge == 0, x, huge)
    return x.to(kind)


def in_member_order(parts: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def bits(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().view(-1).view(torch.uint8).numpy()) if x.numel() else b""


def run(collectives: Any, operation: str, role: Role, x: torch.Tensor, more: Any) -> torch.Tensor:
    if operation == "all_reduce":
        return collectives.all_reduce(role, x)
    if operation == "all_gather":
        return collectives.all_gather(role, x, more)
    return collectives.reduce_scatter(role, x, more)


def compare(
    me: Me, phase: Phase, operation: str, role: Role, shape: list[int], dtype: str, seed: int, more: Any, strided: bool
) -> int:
    """All of one collective's promises, on one rank; a checksum of the result, for the others."""
    members = WORLD.members(role, me.rank)
    inputs = [drawn(member, shape, dtype, seed) for member in members]
    x = inputs[members.index(me.rank)]
    given = x.mT.contiguous().mT if strided and x.ndim == 2 else x.clone()
    with torch.inference_mode(seed % 3 == 0):
        ours = run(me.keep["shared", phase], operation, role, given, more)
        theirs = run(me.keep["gloo", phase], operation, role, given, more)
    if operation == "all_reduce":
        exact = in_member_order(inputs)
    elif operation == "all_gather":
        exact = torch.cat(inputs, more)
    else:
        start = sum(more[: members.index(me.rank)])
        exact = in_member_order(inputs)[start : start + more[members.index(me.rank)]]
    assert ours.shape == exact.shape == theirs.shape
    assert ours.dtype == exact.dtype == theirs.dtype
    assert bits(ours) == bits(exact)
    if seed % 2 == 0 or not x.is_floating_point() or operation == "all_gather":
        assert torch.allclose(theirs.double(), ours.double(), rtol=ROUNDING.get(dtype, 0), atol=ROUNDING.get(dtype, 0))
    assert bits(given) == bits(x)  # the argument is only read
    return zlib.crc32(bits(ours))


cases = st.tuples(st.sampled_from(list(Phase)), st.sampled_from(ROLES), st.sampled_from(DTYPES), st.integers(0, 2**31))
shapes = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.tuples(st.sampled_from([64, 512, 1024]), st.sampled_from([33, 256])).map(list),
)


@settings(max_examples=40)
@given(case=cases, shape=shapes, strided=st.booleans())
@example((Phase.P, Role.TP, "float32", 1), [0, 256], False)  # no rows: a matched call
@example((Phase.D, Role.TP, "bfloat16", 2), [SPLIT // 4 + 1], False)  # the smallest that is split
@example((Phase.D, Role.TP, "float32", 3), [CAPACITY // 4 * 2 + 3], False)  # three chunks, the last one of 3 elements
@example((Phase.P, Role.ATP, "float64", 4), [CAPACITY // 8 + 1], False)  # two chunks, direct
def test_all_reduce(ranks: Ranks, case: tuple[Phase, Role, str, int], shape: list[int], strided: bool) -> None:
    phase, role, dtype, seed = case
    sums = ranks.run(compare, phase, "all_reduce", role, shape, dtype, seed, None, strided)
    for group in WORLD.groups[role]:
        assert len({sums[member] for member in group}) == 1


@settings(max_examples=30)
@given(case=cases, shape=shapes, strided=st.booleans(), last=st.booleans())
@example((Phase.P, Role.TP, "float32", 1), [0, 256], False, False)
@example((Phase.D, Role.TP, "int64", 2), [3, CAPACITY // 8], False, True)  # chunks, along the last dimension
def test_all_gather(
    ranks: Ranks, case: tuple[Phase, Role, str, int], shape: list[int], strided: bool, last: bool
) -> None:
    phase, role, dtype, seed = case
    ranks.run(compare, phase, "all_gather", role, shape, dtype, seed, -1 if last else 0, strided)


@settings(max_examples=40)
@given(
    case=cases,
    rows=st.lists(st.sampled_from([0, 0, 1, 2, 5, 40]), min_size=4, max_size=4),
    rest=st.sampled_from([[], [7], [256], [2, 3], [2048]]),
    strided=st.booleans(),
)
@example((Phase.P, Role.TP, "float32", 1), [0, 0, 0, 0], [64], False)
@example((Phase.P, Role.TP, "float32", 2), [1, 0, 90, 3], [CAPACITY // 128], False)  # rows that lie across chunks
def test_reduce_scatter_of_uneven_rows(
    ranks: Ranks, case: tuple[Phase, Role, str, int], rows: list[int], rest: list[int], strided: bool
) -> None:
    phase, role, dtype, seed = case
    sizes = rows[: len(WORLD.groups[WORLD.canonical(role)][0])]
    ranks.run(compare, phase, "reduce_scatter", role, [sum(sizes), *rest], dtype, seed, sizes, strided)


@pytest.mark.parametrize("seeds", [(3, 3, 4, 4), (4, 4, 3, 3)], ids=["inside first", "outside first"])
def test_calls_inside_and_outside_of_inference_mode_mix(ranks: Ranks, seeds: tuple[int, ...]) -> None:
    for seed in seeds:  # two of each: both parities of a shape that no other test uses
        ranks.run(compare, Phase.D, "all_reduce", Role.TP, [11, sum(seeds[:2]) + 30], "float32", seed, None, False)


def phases_at_once(me: Me, steps: int) -> str:
    """P and D threads of one rank, each in its own order and at its own pace."""
    failures: list[BaseException] = []

    def stream(phase: Phase) -> None:
        collectives = me.keep["shared", phase]
        roles = (Role.TP, Role.ATP, Role.ADP) if phase is Phase.P else (Role.ADP, Role.TP)
        try:
            for step in range(steps):
                role = roles[step % len(roles)]
                members = WORLD.members(role, me.rank)
                if (step * 7 + me.rank * 3 + (phase is Phase.P)) % 11 == 0:
                    time.sleep(0.002)
                x = torch.full((5, 16), float(step * 10 + me.rank))
                total = float(sum(members) + step * 10 * len(members))
                assert torch.equal(collectives.all_reduce(role, x), torch.full((5, 16), total))
                gathered = collectives.all_gather(role, x[:1])
                assert gathered[:, 0].tolist() == [float(step * 10 + member) for member in members]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=stream, args=(phase,)) for phase in Phase]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return "both"


def test_phases_run_concurrently_and_members_may_lag(ranks: Ranks) -> None:
    assert ranks.run(phases_at_once, 120) == ["both"] * 4


def lap(me: Me, steps: int) -> None:
    collectives, payload = me.keep["shared", Phase.D], CAPACITY
    for step in range(steps):
        if me.rank and step % 4 == me.rank:
            time.sleep(0.002)
        result = collectives.all_reduce(Role.TP, torch.full((payload,), float(step + me.rank)))
        assert result.min() == result.max() == 4 * step + 6


def test_a_fast_member_never_overwrites_what_a_slow_one_still_reads(ranks: Ranks) -> None:
    ranks.run(lap, 60)


def disagree(me: Me, odd: dict[str, Any]) -> None:
    settings = {"shape": [3, 4], "dtype": "float32", "operation": "all_reduce", "more": None}
    if me.rank == 2:
        settings |= odd
    x = drawn(me.rank, settings["shape"], settings["dtype"], 0)
    run(me.keep["shared", Phase.P], settings["operation"], Role.TP, x, settings["more"])


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"shape": [2, 4]}, "rank 2: all_reduce float32[2, 4]"),
        ({"dtype": "bfloat16"}, "rank 2: all_reduce bfloat16[3, 4]"),
        ({"operation": "all_gather", "more": 0}, "rank 2: all_gather float32[3, 4] dim 0"),
        ({"operation": "reduce_scatter", "more": [0, 1, 0, 2]}, "rank 2: reduce_scatter float32[3, 4] rows 0+1+0+2"),
        ({"shape": [0, 4]}, "rank 2: all_reduce float32[0, 4]"),
        ({"shape": [3 * CAPACITY]}, f"rank 2: all_reduce float32[{3 * CAPACITY}]"),
    ],
)
def test_members_that_call_different_things_are_told_so(ranks: Ranks, odd: dict[str, Any], words: str) -> None:
    for outcome in ranks.outcomes(disagree, odd):
        assert isinstance(outcome, Divergence)
        assert outcome.ranks == (2,)
        assert words in str(outcome)
        assert "rank 0: all_reduce float32[3, 4]" in str(outcome)
    ranks.run(compare, Phase.P, "all_reduce", Role.TP, [3, 4], "float32", 0, None, False)  # still in step


def wrong_sizes(me: Me, which: str, sizes: list[int]) -> None:
    me.keep[which, Phase.P].reduce_scatter(Role.ATP, torch.zeros(5, 2), sizes)


@pytest.mark.parametrize("sizes", [[5], [2, 2], [1, 2, 2]])
@pytest.mark.parametrize("which", ["shared", "gloo"])
def test_sizes_that_do_not_add_up_are_refused_before_anything_is_sent(
    ranks: Ranks, which: str, sizes: list[int]
) -> None:
    for outcome in ranks.outcomes(wrong_sizes, which, sizes):
        assert isinstance(outcome, UsageError)
        assert f"sizes {sizes}: give one size for each of 2 members, 5 in total" in str(outcome)


def lose_one(me: Me) -> list[str]:
    """Rank 1 sleeps until it is killed; what the others then get from shared memory, and its gloo peer from gloo."""
    if me.rank == 1:
        time.sleep(60)
    errors = []
    # Of gloo's members only the direct peers notice by themselves, so that group has two.
    for which, role in [("shared", Role.TP)] + [("gloo", Role.ATP)] * (me.rank == 0):
        with pytest.raises(RankLost) as caught:
            me.keep[which, Phase.D].all_reduce(role, torch.ones(8))
        errors.append(str(caught.value))
    return errors


def test_a_killed_peer_ends_collectives_in_progress(tmp_path: Path) -> None:
    with world(tmp_path) as ranks:  # of its own, which it ends
        ranks.start(lose_one)
        time.sleep(0.2)  # the others are most likely asleep in it; should one not be, the outcome is the same
        ranks.kill(1)
        outcomes = ranks.finish(timeout_s=60)
    for rank in (0, 2, 3):
        assert outcomes[rank][0].endswith("of TP[0, 1, 2, 3] of D was given up: rank 1 ended with status -9")
    assert outcomes[0][1].startswith("rank 0 in all_reduce over ATP of D failed: ")


# -- one process is enough --------------------------------------------------------------------------------------------


def test_a_rank_alone_in_a_role_gets_its_argument_back() -> None:
    arena = Arena.create(World(2, ep=2))
    alone = SharedCollectives(Arena.attach(os.dup(arena.fd), 0), Phase.P, 0)
    x = torch.ones(3, 2)
    assert alone.all_reduce(Role.ETP, x) is x
    assert alone.all_gather(Role.ADP, x) is x
    assert alone.reduce_scatter(Role.ADP, x, [3]) is x
    with pytest.raises(UsageError, match="3 in total"):
        alone.reduce_scatter(Role.ADP, x, [2])


def test_close_wakes_a_member_that_waits() -> None:
    arena = Arena.create(World(2))
    alone = SharedCollectives(Arena.attach(os.dup(arena.fd), 0), Phase.P, 0)
    errors: list[str] = []

    def wait() -> None:
        with pytest.raises(RankLost) as caught:
            alone.all_reduce(Role.TP, torch.ones(2))
        errors.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    alone.close()
    alone.close()
    thread.join(20)
    assert "its communicators were closed" in errors[0]


def test_gloo_without_its_process_group_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="torchrun"):
        GlooWorld(World(2), 0)


def test_payload_sizes_reach_every_path() -> None:
    # The examples above are made for these limits: of TP's four members, a chunk is split; of ATP's two, none is.
    assert SPLIT // 2 < CAPACITY
