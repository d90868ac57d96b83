"""A call that the backend refuses before it sends anything meets nobody: it is no call of the job's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.record import read
from kernel.record.foreign import REFUSED, Call
from kernel.record.layout import Kind
from tests.installed import Fake, one_rank
from tests.installed_rings import pair, told
from turnstile import record
from verify.readers.record import READER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

torch = pytest.importorskip("torch")
dist = torch.distributed


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    with one_rank(tmp_path_factory.mktemp("refused")) as made:
        yield made


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    record.uninstall()


SAYS = "ProcessGroupGloo::allgather: invalid output tensor list at index 0 (expected length 2, got 1)"
LOST = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:5851"


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (ValueError(SAYS), False), (RuntimeError(SAYS), False), (TypeError("incompatible function arguments"), False),
        (RuntimeError(LOST), True), (RuntimeError("Timed out waiting 600000ms for send operation"), True),
        (RuntimeError("CUDA error: an illegal memory access"), True), (dist.DistBackendError("anything"), True),
        (torch.OutOfMemoryError("anything"), True), (KeyboardInterrupt(), True),
    ],
)  # fmt: skip
def test_a_refused_call_gives_its_number_back(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, error: BaseException, counts: bool
) -> None:
    from torch._C._distributed_c10d import ProcessGroup

    def stub(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(ProcessGroup, "broadcast", stub)
    with record.install(fake.directory()) as made:
        dist.all_reduce(torch.ones(2))
        for _ in range(2):
            with pytest.raises(type(error)):
                dist.broadcast(torch.ones(2), src=0)
        dist.all_reduce(torch.ones(3))
        path = made.path
    assert path is not None
    ends = [event.text for event in read(path).events if event.kind is Kind.CALL_DONE and event.text]
    assert [text.startswith(f"{REFUSED}{type(error).__name__}: ") for text in ends] == [not counts] * 2
    found = [event for event in READER.read(path).events if event.calls]
    first = found[0].sequence
    assert first is not None
    done = [("all_reduce", 0), *[("broadcast", 1), ("broadcast", 2)] * counts, ("all_reduce", 1 + 2 * counts)]
    assert [(event.operation, (event.sequence or 0) - first) for event in found] == done


def test_gloo_itself_refuses_before_it_sends() -> None:
    """The real backend, with arguments that it checks: what it says is taken for that."""
    from torch._C import _distributed_c10d as c10d

    from kernel.comm.tap.notes import sent_nothing

    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    one, more = torch.ones(1), torch.ones(3)
    calls = [
        lambda: gloo.allgather([[one, one]], [one], c10d.AllgatherOptions()),
        lambda: gloo.broadcast([one], _rooted(c10d.BroadcastOptions(), 9)),
        lambda: gloo._reduce_scatter_base(more, torch.ones(8), c10d.ReduceScatterOptions()),
        lambda: gloo._allgather_base(more, torch.ones(8), c10d.AllgatherOptions()),
        lambda: gloo.allreduce([], c10d.AllreduceOptions()),
    ]
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        assert sent_nothing(Call("all_gather"), caught.value), caught.value


def _rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def test_ranks_agree_around_a_call_that_one_of_them_was_refused(tmp_path: Path) -> None:
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    bad = second.call(other, "all_gather", line=9)
    second.done(bad, f"{REFUSED}ValueError: {SAYS}")
    second._numbers.clear()  # as the tap takes it back
    second.over(second.call(other))
    assert told(tmp_path).code != 1
    first.wait(first.call(one))
    found = told(tmp_path)
    assert (str(found.verdict.cls), found.verdict.ranks) == ("missing", (1,))
    line = "rank 1: its all_gather at train.py:9 step was refused, and sent nothing: ValueError: "
    assert any(each.startswith(line) for each in found.verdict.chain), found.verdict.chain


@given(after=st.integers(0, 4), later=st.integers(0, 3))
def test_calls_that_other_threads_counted_meanwhile_move_up(
    after: int, later: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (first, one), (second, other) = pair(tmp_path_factory.mktemp("moved"))
    for _ in range(1 + after + later):
        first.over(first.call(one))
    second.over(second.call(other))
    bad = second.call(other, "all_gather")
    done = [second.call(other) for _ in range(after)]
    second.done(bad, f"{REFUSED}ValueError: {SAYS}")
    for key in second._numbers:
        second._numbers[key] -= 1
    second.over(*done, *(second.call(other) for _ in range(later)))
    path = second.recorder.path
    events = [event for event in READER.read(path).events if event.calls]
    assert [event.sequence for event in events] == list(range(1 + after + later))
