"""Shared memory of a world: the map, the futex, the arena and the channel. No torch."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.comm.channel import Channel
from kernel.comm.futex import Fence, Futex
from kernel.comm.local import LocalCollectives
from kernel.comm.shared import Arena, Liveness
from kernel.comm.shared_map import ABORT_AT, FDS_AT, HEADER, PAGE, SLOT, STATUS, ArenaMap
from kernel.errors import Divergence, RankLost, UsageError
from kernel.request import Phase
from kernel.topology import Role, World
from tests.ranks import Me, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORLDS = st.integers(1, 12).flatmap(
    lambda g: st.tuples(st.just(g), *[st.sampled_from([n for n in range(1, g + 1) if g % n == 0])] * 2)
)

def attach(arena: Arena, rank: int) -> Arena:
    """The arena as a rank of this very process sees it."""
    return Arena.attach(os.dup(arena.fd), rank)


# -- the map ----------------------------------------------------------------------------------------------------------


@given(world=WORLDS, pages=st.integers(1, 3))
def test_nothing_overlaps_and_everything_is_aligned(world: tuple[int, int, int], pages: int) -> None:
    where = ArenaMap(*world, pages * PAGE)
    size = where.size
    spans = [(0, FDS_AT + 4 * size), (where.exchange_arrivals, 8 * size)]
    spans += [(where.status + k * STATUS, STATUS) for k in range(size + 1)]
    spans += [(where.exchange_slot(k, parity), SLOT) for k in range(size) for parity in range(2)]
    for region in where.regions:
        n = len(region.members)
        spans += [(region.bell, 4), (region.arrivals, 8 * n)]
        spans += [(region.headers(parity), n * HEADER) for parity in range(2)]
        data = [(region.data(k, parity), region.capacity) for k in range(n) for parity in range(2)]
        assert all(start % PAGE == 0 for start, _ in data)
        assert region.arrivals % 8 == 0
        spans += data
    spans.sort()
    assert all(start + length <= following for (start, length), (following, _) in pairwise(spans))
    assert sum(spans[-1]) <= where.total
    assert ABORT_AT + 4 <= FDS_AT


@given(world=WORLDS)
def test_each_rank_finds_one_region_for_each_phase_and_group(world: tuple[int, int, int]) -> None:
    shape = World(*world)
    found = {(r.phase, r.role, r.members) for r in ArenaMap(*world, PAGE).regions}
    expected = {
        (phase, shape.canonical(role), group)
        for phase in Phase
        for role in Role
        for group in shape.groups[role]
        if len(group) > 1
    }
    assert found == expected
    assert len(ArenaMap(*world, PAGE).regions) == len(expected)


# -- futex and fence --------------------------------------------------------------------------------------------------


@pytest.fixture
def word() -> Iterator[tuple[Futex, memoryview]]:
    arena = Arena.create(World(2))
    region = arena.map.regions[0]
    yield Futex(arena.address + region.bell), arena.u32[region.bell // 4 : region.bell // 4 + 1]
    arena.close()


def test_a_word_that_has_changed_does_not_put_anybody_to_sleep(word: tuple[Futex, memoryview]) -> None:
    futex, value = word
    value[0] = 7
    assert futex.wait(6, None) is True  # would otherwise hang


@pytest.mark.parametrize("timeout_s", [0.0, 0.01, 1e-6])
def test_an_unchanged_word_times_out(word: tuple[Futex, memoryview], timeout_s: float) -> None:
    futex, value = word
    value[0] = 2**32 - 1
    assert futex.wait(2**32 - 1, timeout_s) is False


def test_wake_wakes_all_sleepers_of_another_mapping_too() -> None:
    arena = Arena.create(World(2))
    other = attach(arena, 1)  # its own mapping, as another process has
    bell = arena.map.regions[0].bell
    sleepers = [Futex(view.address + bell) for view in (arena, other)]
    with ThreadPoolExecutor(2) as pool:
        asleep = [pool.submit(sleeper.wait, 0, 20) for sleeper in sleepers]
        waker, count, end = Futex(arena.address + bell), 0, time.monotonic() + 20
        while count < 2 and time.monotonic() < end:
            count += waker.wake()
        assert [future.result() for future in asleep] == [True, True]
    assert count == 2


def test_a_machine_without_a_known_futex_is_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UsageError, match=r"riscv64.*gloo"):
        Arena.create(World(2))


def test_an_unaligned_word_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Futex(4097)


def test_the_fence_leaves_its_lock_free() -> None:
    fence = Fence()
    fence()
    fence()  # a lock left taken would hang here


# -- arena ------------------------------------------------------------------------------------------------------------


def test_a_rank_learns_everything_from_the_descriptor() -> None:
    arena = Arena.create(World(4, adp=2, ep=4), capacity=5000)
    mine = attach(arena, 3)
    assert mine.map == arena.map
    assert mine.map.capacity == 8192
    assert mine.world == World(4, adp=2, ep=4)
    assert mine.fds[1:] == arena.fds[1:]
    assert mine.region(Phase.P, Role.ADP, 3) == arena.region(Phase.P, Role.ADP, 1)
    assert mine.region(Phase.P, Role.ETP, 3) is None
    assert mine.region(Phase.P, Role.EP, 3) == mine.region(Phase.P, Role.TP, 0)


def test_what_is_no_arena_is_refused(tmp_path: Any) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    with (tmp_path / "file").open("r+b") as file, pytest.raises(UsageError, match="not this version's"):
        Arena.attach(file.fileno(), 0)
    arena = Arena.create(World(2))
    with pytest.raises(UsageError, match="rank must be 0 to 1"):
        attach(arena, 2)


def test_memory_that_nobody_touches_costs_nothing() -> None:
    arena = Arena.create(World(8, adp=4, ep=2), capacity=16 << 20)
    assert arena.map.total > 1 << 30
    assert os.fstat(arena.fd).st_blocks * 512 < 1 << 20


def test_liveness_is_what_each_rank_last_said() -> None:
    arena = Arena.create(World(2))
    assert (arena.status(0).state, arena.status(0).pid) == (Liveness.STARTING, 0)
    first, second = attach(arena, 0), attach(arena, 1)
    first.report(Liveness.RUNNING)
    second.report(Liveness.FAILED, "KV pool:\nno blocks " + "é" * 400)
    assert (arena.status(0).state, arena.status(0).pid, arena.status(0).reason) == (Liveness.RUNNING, os.getpid(), "")
    assert arena.status(1).reason.startswith("KV pool: no blocks éé")  # one line, cut where it must be
    arena.report(Liveness.FAILED, "rank 0 was killed", rank=0)
    assert (first.status(0).state, first.status(0).pid) == (Liveness.FAILED, os.getpid())
    with pytest.raises(ValueError, match="names it"):
        arena.report(Liveness.ENDED)


def test_the_first_reason_stays() -> None:
    arena = Arena.create(World(2))
    mine = attach(arena, 1)
    assert mine.aborted is None
    mine.check("rank 1 loading")
    mine.abort("rank 1 failed: no weights")
    arena.abort("rank 1 ended with status 1")
    assert arena.aborted == mine.aborted == "rank 1 failed: no weights"
    with pytest.raises(RankLost, match="rank 0 in exchange 3 was given up: rank 1 failed: no weights"):
        arena.check("rank 0 in exchange 3")


def test_abort_and_close_may_come_in_any_order_and_number() -> None:
    arena = Arena.create(World(2))
    fds = arena.fds
    arena.close()
    arena.abort("too late")  # must not write to descriptors that may be somebody else's by now
    arena.close()
    assert arena.aborted is None
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def children(me: Me) -> list[bool]:
    return [os.get_inheritable(fd) for fd in me.arena.fds]


def test_a_rank_s_own_children_do_not_inherit() -> None:
    with Ranks(World(2), uvloop=False) as ranks:
        assert ranks.run(children) == [[False] * 3] * 2


# -- channel ----------------------------------------------------------------------------------------------------------


def together(work: Callable[[int], Any], size: int) -> list[Any]:
    """work(0) .. work(size-1) on a thread each; results or exceptions."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, k) for k in range(size)]
        return [future.exception(timeout=60) or future.result() for future in futures]


def channels(size: int) -> tuple[Arena, list[Channel]]:
    arena = Arena.create(World(size))
    region = arena.region(Phase.D, Role.TP, 0)
    assert region is not None
    return arena, [Channel(attach(arena, k), region, k) for k in range(size)]


def header(text: str) -> bytes:
    return text.encode().ljust(HEADER, b"\0")


@settings(max_examples=15)
@given(size=st.integers(2, 4), steps=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_members_read_exactly_what_was_published_at_that_step(size: int, steps: int, seed: int) -> None:
    arena, members = channels(size)
    region = members[0].region

    def member(index: int) -> list[bytes]:
        channel, chance, seen = members[index], random.Random(seed * 8 + index), []
        memory = channel.arena.bytes
        for step in range(1, steps + 1):
            parity = channel.parity
            at = region.data(index, parity)
            memory[at : at + 2] = bytes([index, step])
            channel.take(header(f"step {step}"))
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.003)  # slow readers: the others are a step ahead meanwhile
            seen.append(b"".join(bytes(memory[region.data(k, parity) :][:2]) for k in range(size)))
        return seen

    expected = [b"".join(bytes([k, step]) for k in range(size)) for step in range(1, steps + 1)]
    assert together(member, size) == [expected] * size
    arena.close()


def test_a_new_channel_goes_on_where_the_last_one_ended() -> None:
    _, members = channels(2)
    together(lambda k: [members[k].take() for _ in range(3)], 2)
    again = [Channel(old.arena, old.region, old.rank) for old in members]
    assert [channel.step for channel in again] == [3, 3]
    assert together(lambda k: again[k].take(), 2) == [0, 0]


@pytest.mark.parametrize("odd", range(3))
def test_members_that_do_different_things_are_named_on_all(odd: int) -> None:
    _, members = channels(3)
    outcomes = together(lambda k: members[k].take(header("all_gather int64[3]" if k == odd else "all_reduce")), 3)
    for outcome in outcomes:
        assert isinstance(outcome, Divergence)
        assert outcome.ranks == (odd,)
        assert f"rank {odd}: all_gather int64[3]" in str(outcome)
        assert f"rank {(odd + 1) % 3}: all_reduce" in str(outcome)
    assert together(lambda k: members[k].take(header("same")), 3) == [0] * 3  # the steps stayed in line


def blocked(arena: Arena, members: list[Channel], index: int) -> threading.Thread:
    """`index` sleeps in a step that others do not take."""
    outcome: list[BaseException] = []

    def take() -> None:
        try:
            members[index].take()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=take)
    thread.outcome = outcome  # type: ignore[attr-defined]
    thread.start()
    region = members[index].region
    end = time.monotonic() + 20
    while not arena.u64[region.arrivals // 8 + index] and time.monotonic() < end:
        time.sleep(0.001)
    return thread


@pytest.mark.parametrize("how", ["abort", "close"])
def test_sleepers_are_woken_at_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.comm.channel.RECHECK_S", 3600.0)  # only the wake-up itself can end the wait
    arena, members = channels(3)
    threads = [blocked(arena, members, k) for k in (0, 1)]
    if how == "abort":
        arena.abort("rank 2 was killed by SIGKILL")
        reason = "rank 2 was killed by SIGKILL"
    else:
        members[0].close()
        members[1].close()
        reason = "its communicators were closed"
    for k, thread in enumerate(threads):
        thread.join(20)
        (error,) = thread.outcome  # type: ignore[attr-defined]
        assert isinstance(error, RankLost)
        assert str(error) == f"rank {k} in step 1 of TP[0, 1, 2] of D was given up: {reason}"
    with pytest.raises(RankLost, match="given up"):
        members[0].take()


def test_a_step_needs_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.comm.channel.RECHECK_S", 3600.0)
    _, members = channels(3)

    def member(index: int) -> int:
        chance = random.Random(index)
        for _ in range(300):
            if chance.random() < 0.1:
                time.sleep(0.001)
            members[index].take()
        return members[index].step

    assert together(member, 3) == [300] * 3


def test_closing_one_member_leaves_the_others_asleep_but_well() -> None:
    arena, members = channels(3)
    thread = blocked(arena, members, 0)
    members[1].close()
    twin = Channel(members[1].arena, members[1].region, 1)
    together(lambda k: [twin, members[2]][k].take(), 2)
    thread.join(20)
    assert not thread.outcome  # type: ignore[attr-defined]
    assert members[0].step == 1


def test_collectives_of_a_world_of_one_are_the_identity() -> None:
    local, x = LocalCollectives(), object()
    assert local.all_reduce(Role.TP, x) is x
    assert local.all_gather(Role.ATP, x, dim=-1) is x
    assert local.reduce_scatter(Role.EP, x, [3]) is x
    with pytest.raises(UsageError, match=r"sizes \[1, 2\]"):
        local.reduce_scatter(Role.EP, x, [1, 2])
    local.close()
