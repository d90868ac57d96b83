"""Some of a job's dumps, of gloo, which do not list who belongs to a group: whoever left none may be elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from tests.fr_dumps import Recorder, write
from verify import words
from verify.blame import Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis

SIZE = 3


def dumped(out: Path, kept: Sequence[int], last: Sequence[str], group: str = "default_pg") -> Diagnosis:
    """What the dumps of some ranks tell of a job of three on gloo, whose ranks wait in these operations."""
    dumps = {}
    for rank in kept:
        one = Recorder(rank, {"0": (group, range(SIZE))}, backend="gloo")
        one.call("0")
        one.call("0", last[rank], state="scheduled")
        dumps[rank] = one.dump()
        dumps[rank]["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
    return diagnose_found(gather([write(out / "job", dumps)]))


MISMATCH = ("all_reduce", "all_reduce", "broadcast")


@pytest.mark.parametrize("kept", [[0], [1], [2], [0, 1]])
def test_who_left_no_dump_may_be_elsewhere(kept: list[int], tmp_path: Path) -> None:
    found = dumped(tmp_path, kept, MISMATCH)
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "all members are in" not in found.verdict.say
    if lower := [rank for rank in range(max(kept)) if rank not in kept]:
        assert "no dump from rank" in found.verdict.say
        assert all(str(rank) in found.unknown[0] for rank in lower)
    else:
        assert "who else belongs to default_pg is not in dumps of gloo" in found.verdict.say


def test_a_group_of_another_name_is_inferred_as_well(tmp_path: Path) -> None:
    found = dumped(tmp_path, [1, 2], ("all_reduce",) * SIZE, group="tp")
    assert (found.code, found.verdict.cls) == (3, Class.NONE)
    assert "who else belongs to tp is not in dumps of gloo" in found.verdict.say


def test_what_two_dumps_show_of_each_other_is_certain_and_who_left_none_is_said(tmp_path: Path) -> None:
    found = dumped(tmp_path, [1, 2], MISMATCH)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISMATCH, ())
    assert found.unknown[0] == "no dump, log or stack from rank 0"


def test_with_all_dumps_the_odd_one_is_named(tmp_path: Path) -> None:
    assert dumped(tmp_path, range(SIZE), MISMATCH).verdict.ranks == (2,)


def test_dumps_that_list_the_members_are_believed(tmp_path: Path) -> None:
    one = Recorder(0, {"0": ("default_pg", (0,))})
    one.call("0", state="scheduled")
    found = diagnose_found(gather([write(tmp_path / "job", {0: one.dump()})]))
    assert "who else belongs" not in found.verdict.say


def test_of_an_operation_that_thousands_are_missing_from_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for each of them, which took a time that grew with their square."""
    asked: list[int] = []
    waiters = words.waiters
    monkeypatch.setattr(words, "waiters", lambda meeting: (asked.append(1), waiters(meeting))[1])
    one = Recorder(0, {"0": ("default_pg", range(3000))})
    one.call("0", state="scheduled")
    found = diagnose_found(gather([write(tmp_path / "job", {0: one.dump()})]))
    assert (found.code, found.verdict.ranks) == (3, ())
    assert len(found.situation.hosts) == 3000
    assert len(asked) < 20


def test_a_number_that_is_no_rank_is_not_cut_to_one(tmp_path: Path) -> None:
    one = Recorder(0, {"0": ("default_pg", (0,))}, backend="gloo")
    one.call("0", state="scheduled")
    dump = one.dump() | {"pg_config": {}}
    with pytest.raises(UsageError, match="cannot tell its rank"):
        gather([write(tmp_path / "job", {4000000000: dump})])
