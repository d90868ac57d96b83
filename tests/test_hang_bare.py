"""Folders without evidence beside evidence: the logs of a job that hangs are empty."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernel.errors import UsageError
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

DUMPS = Path(__file__).parent / "data" / "fr" / "h200" / "missing_member"


@pytest.fixture(params=["empty logs", "nothing", "other files"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank in range(2) if request.param == "empty logs" else ():
        (folder / f"rank{rank}.log").touch()
    if request.param == "other files":
        shutil.copyfile(__file__, folder / "notes.bin")
    return folder


@pytest.mark.parametrize("first", [True, False])
def test_the_evidence_beside_it_still_tells(first: bool, bare: Path) -> None:
    found = diagnose_found(gather([bare, DUMPS] if first else [DUMPS, bare]))
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (1, "missing", (1,))
    assert any(line.startswith("not used: ") and "logs" in line for line in found.unknown)


def test_alone_it_is_unusable_but_not_beside_processes(bare: Path) -> None:
    with pytest.raises(UsageError, match="holds no evidence"):
        gather([bare])
    assert any("holds no evidence" in line for line in gather([bare], beside=True).unknown)
