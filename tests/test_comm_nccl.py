"""NCCL's collectives: their arithmetic over a group of threads, and the real communicators on two GPUs."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kernel.comm import nccl  # noqa: E402
from kernel.comm.nccl import NcclCollectives, NcclWorld, padded  # noqa: E402
from kernel.errors import RankLost, UsageError  # noqa: E402
from kernel.request import Phase  # noqa: E402
from kernel.topology import Role, World  # noqa: E402
from tests.ranks import Me, Ranks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BOUND_S = 30.0


# -- arithmetic, over threads ---------------------------------------------------------------------------------------


class Meeting:
    """What the members of a group have brought."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=BOUND_S)
        self.brought: list[Any] = [None] * size
        self.moved = 0


class Member:
    """A communicator whose members are threads. It checks what NCCL demands: contiguous and equal parts."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.index, self.size, self.closed, self.name = meeting, index, len(meeting.brought), False, "it"

    def _exchange(self, x: Any) -> list[Any]:
        assert x.is_contiguous()
        self.meeting.brought[self.index] = x.clone()
        self.meeting.barrier.wait()
        found = list(self.meeting.brought)
        self.meeting.barrier.wait()
        assert len({each.shape for each in found}) == 1
        return found

    def all_reduce(self, x: Any) -> None:
        self.meeting.moved = 2 * x.numel()
        x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, out: Any, x: Any) -> None:
        assert out.is_contiguous()
        assert out.numel() == self.size * x.numel()
        out.copy_(torch.cat(self._exchange(x)))

    def reduce_scatter(self, out: Any, x: Any) -> None:
        assert out.is_contiguous()
        assert x.numel() == self.size * out.numel()
        self.meeting.moved = x.numel()
        out.copy_(torch.stack(self._exchange(x)).sum(0).chunk(self.size)[self.index])

    def abort(self) -> None:
        self.closed = True


def together(size: int, work: Any) -> tuple[list[Any], Meeting]:
    """work(collectives, index) on `size` threads; their results."""
    meeting, results = Meeting(size), [None] * size

    def run(index: int) -> None:
        groups: Any = dict.fromkeys(Role, Member(meeting, index))
        results[index] = work(NcclCollectives(Phase.D, index, groups, 32), index)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    return results, meeting


SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 3))


@given(size=st.integers(2, 4), shape=SHAPES, dim=st.integers(-3, 2))
def test_all_gather_is_a_concatenation_along_any_dimension(size: int, shape: tuple[int, ...], dim: int) -> None:
    parts = [torch.randn(shape) for _ in range(size)]
    found, _ = together(size, lambda it, index: it.all_gather(Role.TP, parts[index], dim))
    for each in found:
        assert torch.equal(each, torch.cat(parts, dim))


@given(size=st.integers(2, 4), shape=SHAPES)
def test_all_reduce_sums_and_leaves_its_argument_alone(size: int, shape: tuple[int, ...]) -> None:
    parts = [torch.randn(shape).transpose(0, 2) for _ in range(size)]
    before = [part.clone() for part in parts]
    found, _ = together(size, lambda it, index: it.all_reduce(Role.TP, parts[index]))
    for each, part, old in zip(found, parts, before, strict=True):
        assert torch.equal(each, torch.stack(before).sum(0))
        assert torch.equal(part, old)


@given(sizes=st.lists(st.integers(0, 6), min_size=2, max_size=4))
def test_reduce_scatter_of_any_sizes_keeps_own_rows_and_never_moves_more_than_an_all_reduce(sizes: list[int]) -> None:
    parts = [torch.randint(-9, 9, (sum(sizes), 2)) for _ in sizes]
    found, meeting = together(len(sizes), lambda it, index: it.reduce_scatter(Role.TP, parts[index], sizes))
    for each, wanted in zip(found, torch.stack(parts).sum(0).split(sizes), strict=True):
        assert torch.equal(each, wanted)
    assert meeting.moved <= 2 * 2 * sum(sizes)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8))
def test_two_members_always_pad(sizes: list[int]) -> None:
    assert padded(sizes) in (0, max(sizes))
    if len(sizes) == 2:
        assert padded(sizes) == max(sizes)


def test_sizes_that_do_not_fit_are_refused() -> None:
    groups: Any = dict.fromkeys(Role, Member(Meeting(2), 0))
    it = NcclCollectives(Phase.P, 0, groups, 32)
    for sizes in ([3], [1, 1], [1, 1, 1]):
        with pytest.raises(UsageError, match="one size for each of 2 members, 3 in total"):
            it.reduce_scatter(Role.TP, torch.zeros(3, 2), sizes)


def test_alone_everything_is_the_identity_and_holds_no_room() -> None:
    it = NcclCollectives(Phase.P, 0, dict.fromkeys(Role), 32)
    x = torch.ones(2, 3)
    assert it.ctas == 0
    assert it.all_reduce(Role.TP, x) is x
    assert it.all_gather(Role.TP, x, -1) is x
    assert it.reduce_scatter(Role.TP, x, [2]) is x
    it.close()


def test_after_close_every_call_says_so_and_the_communicator_is_aborted_once() -> None:
    member = Member(Meeting(2), 0)
    groups: Any = dict.fromkeys(Role, member)
    it = NcclCollectives(Phase.P, 5, groups, 32)
    it.close()
    assert member.closed
    it.close()
    with pytest.raises(RankLost, match="rank 5 in all_reduce over TP of P was given up"):
        it.all_reduce(Role.TP, torch.zeros(2))


def test_an_abort_that_never_returns_does_not_hold_whoever_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_GRACE_S", 0.05)
    member = Member(Meeting(2), 0)
    release = threading.Event()
    monkeypatch.setattr(member, "abort", lambda: release.wait(BOUND_S))
    groups: Any = dict.fromkeys(Role, member)
    NcclCollectives(Phase.P, 0, groups, 32).close()
    release.set()


def test_what_nccl_says_becomes_one_line() -> None:
    text = (
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.28.9\n"
        "ncclRemoteError: A call failed possibly due to a network error.\nLast error:\nsocket closed by peer\n"
    )

    class Broken(Member):
        def all_reduce(self, x: Any) -> None:
            raise RuntimeError(text)

    groups: Any = dict.fromkeys(Role, Broken(Meeting(2), 0))
    with pytest.raises(RankLost) as lost:
        NcclCollectives(Phase.D, 1, groups, 32).all_reduce(Role.TP, torch.zeros(2))
    assert str(lost.value) == "rank 1 in all_reduce over TP of D failed: socket closed by peer"


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UsageError, match=r"rank 0 of 2: .* has no GPU, or no NCCL"):
        NcclWorld(World(2), 0, torch.distributed.HashStore(), 0)


# -- two GPUs -------------------------------------------------------------------------------------------------------


def open_world(me: Me, port: int, **settings: Any) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, me.world.size, me.rank == 0)
    me.keep["store"] = store
    me.keep["nccl"] = NcclWorld(me.world, me.rank, store, me.rank, **settings)
    me.keep["nccl"].warm()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def need_two() -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@contextlib.contextmanager
def two(world: World, **settings: Any) -> Iterator[Ranks]:
    need_two()
    with Ranks(world, timeout_s=120.0) as ranks:
        ranks.run(_open, free_port(), settings)
        yield ranks


def _open(me: Me, port: int, settings: dict[str, Any]) -> None:
    open_world(me, port, **settings)


def _values(me: Me, sizes: Sequence[int], dtype: Any) -> list[Any]:
    it = me.keep["nccl"].collectives(Phase.P)
    gpu = torch.device("cuda", me.rank)
    torch.manual_seed(7)
    parts = torch.randn(2, sum(sizes), 5).to(dtype)
    x = parts[me.rank].to(gpu)
    results = [
        it.all_reduce(Role.TP, x),
        it.all_gather(Role.TP, x),
        it.all_gather(Role.TP, x, dim=-1),
        it.reduce_scatter(Role.TP, x, sizes),
    ]
    return [result.cpu() for result in results]


@pytest.mark.gpu
def test_values_on_two_gpus_are_those_of_plain_sums() -> None:
    with two(World(2)) as ranks:
        for dtype in (torch.float32, torch.bfloat16):
            for sizes in ([4, 4], [1, 6], [0, 3], [5, 0], [0, 0]):
                torch.manual_seed(7)
                parts = torch.randn(2, sum(sizes), 5).to(dtype)
                total = parts[0] + parts[1]
                for rank, found in enumerate(ranks.run(_values, sizes, dtype)):
                    wanted = [total, torch.cat(list(parts)), torch.cat(list(parts), -1), total.split(sizes)[rank]]
                    for each, want in zip(found, wanted, strict=True):
                        assert torch.equal(each, want), (dtype, sizes, rank)


def _no_wait(me: Me) -> bool:
    """Rank 0 enqueues everything before rank 1 enqueues anything: nothing of it may wait on the host."""
    it = me.keep["nccl"].collectives(Phase.D)
    x = torch.ones(64, 8, device=torch.device("cuda", me.rank))

    def enqueue() -> None:
        it.all_reduce(Role.TP, x)
        it.all_gather(Role.TP, x, -1)
        it.reduce_scatter(Role.TP, x, [32, 32])
        it.reduce_scatter(Role.TP, x, [63, 1])

    enqueue()  # what is used for the first time loads modules, and that waits
    torch.cuda.synchronize()
    if me.rank == 1:
        me.keep["store"].wait(["enqueued"])
    enqueue()
    running = not torch.cuda.current_stream().query()
    if me.rank == 0:
        me.keep["store"].set("enqueued", "1")
    torch.cuda.synchronize()
    return running or me.rank == 1


@pytest.mark.gpu
def test_calls_only_enqueue() -> None:
    with two(World(2)) as ranks:
        assert ranks.run(_no_wait) == [True, True]


def _captured(me: Me) -> list[float]:
    from kernel.device.cuda_graph import CudaGraph

    it = me.keep["nccl"].collectives(Phase.D)
    stream = torch.cuda.Stream()
    x = torch.zeros(8, 4, device=torch.device("cuda", me.rank))
    graph = CudaGraph(stream)
    out = graph.capture(lambda: it.reduce_scatter(Role.TP, it.all_gather(Role.TP, x) + 1, [8, 8]))
    seen = []
    for value in (1.0, 2.0):
        with torch.cuda.stream(stream):
            x.fill_(value + me.rank)
        graph.replay()
        stream.synchronize()
        seen.append(float(out.sum()))
    graph.reset()
    return seen


@pytest.mark.gpu
def test_collectives_are_captured_and_replayed() -> None:
    with two(World(2), max_ctas=8) as ranks:
        # Both ranks hold the same gathered rows, so the sum is twice them: rank r keeps r's part, 32 elements.
        assert ranks.run(_captured) == [[128.0, 192.0], [192.0, 256.0]]


def _stuck(me: Me) -> str:
    """Rank 0 waits in a collective that rank 1 never enters, and closes its world all the same."""
    world = me.keep["nccl"]
    if me.rank == 0:
        world.collectives(Phase.P).all_reduce(Role.TP, torch.ones(1 << 20, device=torch.device("cuda", 0)))
        time.sleep(0.2)
        assert not torch.cuda.current_stream().query()
    world.close()
    torch.cuda.synchronize()
    try:
        world.collectives(Phase.P).all_reduce(Role.TP, torch.ones(1, device=torch.device("cuda", me.rank)))
    except RankLost as error:
        return str(error)
    return "no error"


@pytest.mark.gpu
def test_close_frees_a_gpu_that_waits_for_a_lost_peer() -> None:
    with two(World(2)) as ranks:
        for rank, text in enumerate(ranks.run(_stuck, timeout_s=60.0)):
            assert text == f"rank {rank} in all_reduce over TP of P was given up: its communicators were closed"
