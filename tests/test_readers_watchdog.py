"""A rank's log: exceptions that only speak of a backend, those that were caught, and transfers that time out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.test_readers_logs import status, timeout, written
from verify.events import Communicator, Event, Kind, State
from verify.hang.diagnosis import diagnose_found
from verify.readers import watchdog
from verify.readers.found import UNNAMED_GROUP, Found, nothing_open

if TYPE_CHECKING:
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis

STUCK = "".join(timeout(rank, 50) + status(rank, 50, 50, 49) for rank in (0, 1))


def read(tmp_path: Path, text: str) -> Diagnosis:
    return diagnose_found(watchdog.READER.read(written(tmp_path, text)))


def trace(rank: int, error: str) -> str:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 3, in main', error)
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


@pytest.mark.parametrize(
    "error", ["KeyError: 'gloo_port'", "torch.OutOfMemoryError: CUDA out of memory. NCCL has 3 GiB", "ValueError: c10d"]
)
def test_an_exception_that_names_a_backend_is_one_of_its_own(error: str, tmp_path: Path) -> None:
    found = read(tmp_path, trace(2, error) + STUCK)
    assert (str(found.verdict.cls), found.verdict.ranks) == ("exception", (2,))


@pytest.mark.parametrize(
    "error", ["torch.distributed.DistBackendError: aborted", "RuntimeError: [gloo/pair.cc:5] Connection closed by peer"]
)
def test_what_a_rank_raises_as_another_is_gone_is_no_cause(error: str, tmp_path: Path) -> None:
    chained = "\n[rank2]: During handling of the above exception, another exception occurred:\n"
    for more in ("", chained + trace(2, "AttributeError: no attribute 'close'")):
        assert str(read(tmp_path, trace(2, error) + more + STUCK).verdict.cls) != "exception"


def test_a_rank_that_goes_on_after_its_exception_has_not_left(tmp_path: Path) -> None:
    text = trace(2, "ConnectionError: retry")
    assert str(read(tmp_path, text + STUCK).verdict.cls) == "exception"
    assert str(read(tmp_path, text + "[rank2]: step 100 loss 1.0\n" + STUCK).verdict.cls) != "exception"
    again = text + "[rank2]: step 100 loss 1.0\n" + trace(2, "ValueError: bad batch") + "[rank2]: in epoch of doubt\n"
    assert "bad batch" in read(tmp_path, again + STUCK).verdict.say


def test_sends_and_receives_of_equal_numbers_are_not_compared(tmp_path: Path) -> None:
    pp = "PG ID 3 PG GUID 9(pp)"
    text = "".join(timeout(rank, 7, op) + status(rank, 7, 7, 6, pp) for rank, op in ((0, "SEND"), (1, "RECV")))
    text += status(2, 4, 4, 4, pp)
    found = read(tmp_path, text)
    assert (found.code, found.verdict.ranks) == (3, ())
    assert any("with whom sends and receives pair" in line for line in found.unknown)


def test_groups_without_a_description_are_told_apart_by_their_guid(tmp_path: Path) -> None:
    """Ranks 0 and 2 are in group 3, rank 1 in group 7: their calls of one number are not compared."""
    text = "".join(
        timeout(rank, 32, op) + status(rank, 32, 32, 31, f"PG ID 2 PG GUID {guid}")
        for rank, op, guid in ((0, "ALLREDUCE", 3), (1, "BROADCAST", 7), (2, "ALLREDUCE", 3))
    )
    found = watchdog.READER.read(written(tmp_path, text))
    groups = {event.rank: (str(event.communicator), event.operation) for event in found.events if event.communicator}
    assert groups == {0: ("3", "all_reduce"), 1: ("7", "broadcast"), 2: ("3", "all_reduce")}
    assert diagnose_found(found).code == 3
    same = text.replace("GUID 7", "GUID 3")
    assert (str((odd := read(tmp_path, same)).verdict.cls), odd.verdict.ranks) == ("mismatch", (1,))


def test_a_number_of_the_process_is_no_name_of_a_group(tmp_path: Path) -> None:
    """Group 2 of one process may be another one's group 5."""
    found = watchdog.READER.read(written(tmp_path, timeout(0, 32) + status(0, 32, 32, 31, "PG 2")))
    assert {each.name for each in found.loose} == {""}


@pytest.mark.parametrize("gap", [" ", "  "])
@pytest.mark.parametrize("more", ["", status(1, -1, 4, 4)])
def test_the_signal_of_another_rank_tells_what_one_has_not_enqueued(gap: str, more: str, tmp_path: Path) -> None:
    signal = (
        "[rank1]:[E1130 10:00:00.1 ProcessGroupNCCL.cpp:1794] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump"
        f" signal due to a collective timeout from{gap}rank 0 and we will try our best to dump the debug info. Last"
        " enqueued NCCL work: 4, last completed NCCL work: 4.This is most likely caused by incorrect usages\n"
    )
    found = read(tmp_path, timeout(0, 5) + status(0, 5, 5, 4) + signal + more)
    told = found.verdict
    assert (str(told.cls), str(told.certainty), told.ranks) == ("missing", "certain", (1,))
    alone = watchdog.READER.read(written(tmp_path, signal))
    assert alone.present == {1}
    assert not alone.overdue, "its own watchdog has not given up"


OTHER = timeout(1, 5, "_ALLGATHER_BASE", 8)
UNNAMED = [
    ("mismatch", (), timeout(0, 5, "ALLREDUCE", 4) + OTHER),
    ("mismatch", (1,), timeout(0, 5) + OTHER + timeout(2, 5)),
    ("device_stall", (0, 2), "".join(timeout(rank, 5 + rank % 2, "ALLREDUCE") for rank in range(4))),
]


@pytest.mark.parametrize(("cls", "ranks", "text"), UNNAMED, ids=["two sides", "odd one", "stall"])
def test_calls_of_which_no_line_names_the_group_may_be_of_several(
    cls: str, ranks: tuple[int, ...], text: str, tmp_path: Path
) -> None:
    told = read(tmp_path, text).verdict
    assert (str(told.cls), told.ranks) == (cls, ranks)
    assert (str(told.certainty), told.condition) == (
        "conditional", "these calls are of one group, which the log does not say"
    )  # fmt: skip


@pytest.mark.parametrize(("name", "certainty"), [(UNNAMED_GROUP, "conditional"), ("tp", "certain")])
def test_who_is_missing_may_not_belong_to_a_group_that_no_line_names(name: str, certainty: str) -> None:
    group = Communicator((0, 1), name)
    waits = Event(0, Kind.COLLECTIVE, "all_reduce", communicator=group, sequence=4, state=State.SCHEDULED)
    found = Found("log", (waits, nothing_open(1)), frozenset({0, 1}), overdue=frozenset({0}))
    told = diagnose_found(found).verdict
    assert (str(told.cls), told.ranks, str(told.certainty)) == ("missing", (1,), certainty)
    assert ("rank 1 belongs to the group of these calls" in told.condition) == (certainty == "conditional")


@pytest.mark.parametrize("more", ["", status(0, 5, 5, 4)], ids=["unnamed", "named"])
def test_one_rank_in_the_evidence_is_not_all_members(more: str, tmp_path: Path) -> None:
    found = read(tmp_path, timeout(0, 5) + more)
    assert found.code == 3
    assert "which others belong to that group is not in the evidence" in found.verdict.say
    assert "all members" not in found.verdict.say
