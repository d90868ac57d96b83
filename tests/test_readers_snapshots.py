"""Answers of RAS at one moment and at several: who is behind once may only be a moment late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.test_readers_logs import answer, written
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(50, 49, 50)], (1, "missing", "conditional", (1,))),
        ([(50, 49, 50), (50, 49, 50)], (1, "missing", "certain", (1,))),
        ([(50, 49, 50), (57, 49, 58)], (1, "missing", "certain", (1,))),
        ([(57, 49, 58), (50, 49, 50)], (1, "missing", "certain", (1,))),
        ([(50, 49, 50), (60, 60, 59)], (3, "none", "undecided", ())),
        ([(50, 49, 50), (60, 60, 60)], (3, "none", "undecided", ())),
        ([(50, 49, 50, 49), (57, 49, 57, 57)], (1, "missing", "certain", (1,))),
    ],
    ids=["once", "twice the same", "others go on", "the newer one first", "moving", "equal since", "one of two came"],
)
def test_only_a_rank_that_stays_behind_is_blamed_for_certain(
    answers: list[tuple[int, ...]], expected: tuple[int, str, str, tuple[int, ...]], tmp_path: Path
) -> None:
    for number, counts in enumerate(answers):
        written(tmp_path, answer([{"AllReduce": count, "AllGather": 3} for count in counts]), f"ras{number}.json")
    found = diagnose_found(gather([tmp_path]))
    assert (found.code, str(found.verdict.cls), str(found.verdict.certainty), found.verdict.ranks) == expected
