"""The table of `turnstile top` on terminals of any width: what a stall is told by is never cut."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from kernel.record import Kind
from tests.installed_rings import pair
from tests.test_verify_top import call, enter, writer
from verify.top.follow import Follower
from verify.top.screen import picture

if TYPE_CHECKING:
    from pathlib import Path


def shown(run: Path, width: int) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(picture(Follower(run, 2.0).look(), 40, width))
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in out.splitlines())
    return " ".join(str(out).split())


@pytest.mark.parametrize("width", [80, 100, 150])
def test_a_rank_of_ours_that_waits(tmp_path: Path, width: int) -> None:
    recorders = [writer(tmp_path, rank, 2) for rank in (0, 1)]
    enter(recorders[0], 12345, "pre-d")
    call(recorders[1], Kind.ENQUEUE, 4337)
    out = shown(tmp_path, width)
    for word in ("in rendezvous pre-d #12345", "quiet for", "last operation", "age"):
        assert word in out
    assert ("permit" in out) is (width == 150)
    for recorder in recorders:
        recorder.close()


@pytest.mark.parametrize("width", [80, 150])
def test_a_rank_of_another_program_that_waits(tmp_path: Path, width: int) -> None:
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    out = shown(tmp_path, width)
    assert "train.py:7" in out
    assert "waits for all_reduce world #2" in out
    assert ("decided last" in out) is (width == 150)
