"""What surrounds DeepEP, on memory that all ranks of a test share: mailboxes, and how buffers go. Without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kernel.comm.deep_ep import DeepEpLowLatency, DeepEpNormal, PendingDispatch  # noqa: E402
from kernel.comm.nvshmem import Mailbox  # noqa: E402
from kernel.device.worker import Completion  # noqa: E402
from kernel.errors import RankLost, StillHeld  # noqa: E402
from kernel.exchange.states import LowLatency, Place  # noqa: E402


class Memory:
    """Symmetric memory of some ranks, and what each would have held its stream for."""

    def __init__(self, size: int) -> None:
        self.parts = [torch.zeros((2, size), dtype=torch.int64) for _ in range(size)]
        self.held: list[tuple[int, int, int]] = []
        """(rank, place of the word in its row, value)."""

    def runtime(self, rank: int) -> Any:
        def waits(word: Any, value: int, stream: object) -> None:
            assert (word.numel(), stream) == (1, "side")
            base = self.parts[rank].data_ptr()
            self.held.append((rank, (word.data_ptr() - base) // 8 % len(self.parts), value))

        return SimpleNamespace(
            rank=rank,
            size=len(self.parts),
            tensor=lambda shape, dtype: self.parts[rank],
            at=lambda mine, other: self.parts[other],
            wait_at_least=waits,
        )


@given(size=st.sampled_from([2, 4, 8]), data=st.data())
def test_counts_arrive_and_each_rank_waits_for_its_peers_alone(size: int, data: st.DataObject) -> None:
    memory = Memory(size)
    boxes = [Mailbox(memory.runtime(rank)) for rank in range(size)]
    for number in range(1, 4):
        sent = data.draw(st.lists(st.lists(st.integers(0, 1 << 20), min_size=size, max_size=size),
                                  min_size=size, max_size=size))  # fmt: skip
        memory.held.clear()
        words = [box.post(torch.tensor(row, dtype=torch.int32), "side") for box, row in zip(boxes, sent, strict=True)]
        wanted = {(mine, other, number << 32) for mine in range(size) for other in range(size) if mine != other}
        assert sorted(memory.held) == sorted(wanted)
        for rank, box in enumerate(boxes):
            assert box.counts(words[rank].tolist()) == [row[rank] for row in sent]


def test_another_operation_s_counts_are_nobody_s() -> None:
    memory = Memory(2)
    mine, other = (Mailbox(memory.runtime(rank)) for rank in range(2))
    first = mine.post(torch.tensor([1, 2]), "side")
    with pytest.raises(RankLost, match="rank 1 is at exchange 0, rank 0 at 1"):
        mine.counts(first.tolist())
    other.post(torch.tensor([3, 4]), "side")
    assert mine.counts(first.tolist()) == [1, 3]


def test_p_is_told_of_the_rows_that_come_from_each_rank() -> None:
    """Out of the words that a thread has fetched: DeepEP's exchange knows of its own rows alone."""
    memory = Memory(2)
    boxes = [Mailbox(memory.runtime(rank)) for rank in range(2)]
    words = [box.post(torch.tensor(row), "side") for box, row in zip(boxes, ([5, 7], [0, 9]), strict=True)]
    for rank, wanted in enumerate(([5, 0], [7, 9])):
        normal: Any = object.__new__(DeepEpNormal)
        normal._mailbox = boxes[rank]
        event: Completion[Any] = Completion()
        event.succeed(words[rank].tolist())
        assert normal.arriving(PendingDispatch(1, Place(0, 0), 3, None, None, event)) == wanted  # type: ignore[arg-type]


def test_a_buffer_goes_once_on_its_own_gpu_and_not_under_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    low = object.__new__(DeepEpLowLatency)
    low.states, low._index = LowLatency(0, 8), 3
    low.buffer = SimpleNamespace(destroy=lambda: done.append("destroyed"))
    with low.capture("D 8") as hold:
        pass
    with pytest.raises(StillHeld, match="while graph D 8 holds pointers into it"):
        low.close()
    assert done == []
    low.dropped(hold)
    low.close()
    low.close()
    assert done == [3, "destroyed"]
    assert low.buffer is None
