"""A rank's log: exceptions that only speak of a backend, those that were caught, and transfers that time out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.test_readers_logs import status, timeout, written
from verify.hang.diagnosis import diagnose_found
from verify.readers import watchdog

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
