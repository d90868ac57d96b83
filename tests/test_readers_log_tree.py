"""The folder of torchrun's --log-dir, given whole or in part, and empty logs, as ranks that are well leave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from verify.events import Kind
from verify.readers.gather import gather
from verify.readers.log_tree import logs_below

if TYPE_CHECKING:
    from pathlib import Path

RAISED = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    step()
ValueError: {}
"""


def tree(out: Path, *attempts: dict[int, str], run: str = "none_x1") -> Path:
    """A folder of logs. attempts: rank -> what it wrote to its standard error; 12 of them have two figures."""
    for number, ranks in enumerate(attempts):
        for rank, text in ranks.items():
            folder = out / "logs" / run / f"attempt_{number}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
            (folder / "stdout.log").touch()
    return out / "logs"


def left(*paths: Path) -> dict[int, str]:
    """Rank -> the exception by which it left."""
    found = gather(paths)
    return {event.rank: event.operation for event in found.events if event.kind is Kind.EXIT}


@pytest.mark.parametrize("below", ["", "none_x1", "none_x1/attempt_10"])
def test_the_newest_attempt_of_a_log_folder_is_read_with_all_its_ranks(below: str, tmp_path: Path) -> None:
    """The tenth comes after the ninth, and not after the first one."""
    first = {0: RAISED.format("of the first life"), 1: ""}
    last = {0: "", 1: RAISED.format("one"), 10: RAISED.format("ten")}
    logs = tree(tmp_path, *[first] * 10, last)
    assert left(logs / below) == {1: "ValueError: one", 10: "ValueError: ten"}
    found = gather([logs / below])
    assert any("files are empty" in line for line in found.unknown)
    assert any("before attempt_10" in line for line in found.unknown) == (not below.endswith("_10"))


def test_of_an_earlier_attempt_that_is_named_its_own_logs_are_read(tmp_path: Path) -> None:
    logs = tree(tmp_path, {0: RAISED.format("old")}, {0: RAISED.format("new")})
    assert left(logs / "none_x1" / "attempt_0") == {0: "ValueError: old"}


def test_logs_that_say_nothing_are_one_line(tmp_path: Path) -> None:
    logs = tree(tmp_path, {0: RAISED.format("old"), 1: ""}, {0: "", 1: "INFO hello\n"})
    with pytest.raises(UsageError, match=r"attempt_1: the logs of all its ranks are empty, or hold nothing") as error:
        gather([logs])
    assert "\n" not in str(error.value)


def test_several_starts_of_torchrun_are_not_mixed(tmp_path: Path) -> None:
    tree(tmp_path, {0: RAISED.format("a")}, run="none_a")
    logs = tree(tmp_path, {0: RAISED.format("b")}, run="none_b")
    with pytest.raises(UsageError, match=r"logs of 2 starts of torchrun: name one of them; the newest is .*none_[ab]"):
        gather([logs])


def test_evidence_of_its_own_comes_before_the_logs_below(tmp_path: Path) -> None:
    logs = tree(tmp_path, {0: RAISED.format("below")})
    (logs / "rank1.log").write_text(RAISED.format("here"))
    assert left(logs) == {1: "ValueError: here"}
    assert logs_below(tmp_path / "nothing") is None


def test_empty_files_beside_others_are_noted(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(4)]
    for log in logs:
        log.touch()
    with pytest.raises(UsageError, match=r"rank0\.log: empty: nothing was written"):
        gather(logs)
    logs[2].write_text(RAISED.format("boom"))
    assert left(*logs) == {2: "ValueError: boom"}
    assert gather(logs).unknown[0].startswith("not used: 3 files are empty: ")
    assert gather(logs[1:3]).unknown[0] == f"not used: {logs[1]}: empty: nothing was written to it"
    assert gather(logs[:2], beside=True).unknown[0].startswith("not used: 2 files are empty: ")
