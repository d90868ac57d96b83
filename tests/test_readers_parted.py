"""Ranks of two jobs that do not meet, in one folder: never is one blamed for what the other waits for."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.fr_dumps import Recorder, save
from tests.healthy import SECOND, START
from verify.blame import Certainty, Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather
from verify.readers.parted import of_one_job

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path


def job(
    chance: Random, size: int, ranks: Collection[int], calls: int, start: int = START, step: float = 1.0,
    late: int | None = None, clocks: Mapping[int, int] | None = None, keep: int = 10_000,
) -> list[Recorder]:  # fmt: skip
    """Some ranks of a job of `size` that makes collectives one after the other. late: has not made the last one.

    clocks: by how much a rank's clock is ahead, ns. keep: how many calls its ring holds. A call begins on each rank at
    some time and ends on all when the last one has begun.
    """
    made = [Recorder(rank, {"0": ("default_pg", range(size))}) for rank in range(size)]
    now = start
    for n in range(calls):
        began = [now + chance.randrange(SECOND // 10) for _ in made]
        over = max(began) + SECOND // 1000
        stuck = late is not None and n == calls - 1
        for each in made:
            if stuck and each.rank == late:
                continue
            ahead = (clocks or {}).get(each.rank, 0)
            state = {"state": "scheduled", "retired": False} if stuck else {}
            each.call("0", **{
                "time_created_ns": began[each.rank] + ahead,
                "time_discovered_completed_ns": None if stuck else over + ahead, **state,
            })  # fmt: skip
        now = over + int(chance.uniform(0.5, 1.5) * step * SECOND)
    for each in made:
        each.entries = each.entries[-keep:]
    return [each for each in made if each.rank in ranks]


SEEDS = st.integers(0, 1 << 32)


@given(
    seed=SEEDS, cut=st.integers(1, 3), sizes=st.sampled_from([(4, 4), (4, 6), (8, 4)]), apart=st.integers(0, 3600),
    calls=st.integers(130, 300), behind=st.integers(0, 60), keep=st.sampled_from([100, 10_000]), late=st.integers(0, 3),
)  # fmt: skip
def test_ranks_of_two_jobs_are_not_blamed_for_each_other(
    seed: int, cut: int, sizes: tuple[int, int], apart: int, calls: int, behind: int, keep: int, late: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Both run the same program, and drift apart as jobs do that do not wait for one another."""
    chance, folder = Random(seed), tmp_path_factory.mktemp("dumps")
    one = job(chance, sizes[0], range(cut), calls, keep=keep)
    other = job(
        chance, sizes[1], range(cut, 4), calls + behind, START + apart * SECOND, step=1.3, late=late, keep=keep
    )
    save(folder, one, name="a_rank{}")
    save(folder, other, name="b_rank{}")
    refused = ""
    try:
        found = diagnose_found(gather([folder]))
    except UsageError as refusal:
        refused = str(refusal)
    if refused:
        assert "are of two jobs, or of two starts of one" in refused
        for pattern in ("a_rank*", "b_rank*"):
            assert f"`turnstile hang {folder / pattern}`" in refused
        return
    # Rank by rank they may stand alike by chance: then somebody may be stuck in a call of all, and nobody is blamed.
    blamed = set(found.verdict.ranks)
    if found.verdict.certainty is Certainty.CERTAIN:
        assert not blamed or blamed <= {late}
    elif blamed - {late}:
        assert "the dumps are of one job" in found.verdict.condition or apart < 30


@given(seed=SEEDS, ahead=st.integers(-200, 200), calls=st.integers(260, 400), late=st.integers(0, 3))
def test_hosts_whose_clocks_differ_are_of_one_job(
    seed: int, ahead: int, calls: int, late: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As long as the job has gone on for longer than that."""
    assume(abs(ahead) <= 9 or abs(ahead) >= 12)
    clocks = dict.fromkeys((2, 3), ahead * SECOND)
    ranks = job(Random(seed), 4, range(4), calls, late=late, clocks=clocks)
    found = diagnose_found(gather([save(tmp_path_factory.mktemp("dumps"), ranks)]))
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (late,))
    assert ("the dumps are of one job, whose hosts' clocks differ" in found.verdict.condition) is (abs(ahead) > 10)
    assert any("or their dumps are of two jobs" in line for line in found.unknown) is (abs(ahead) > 10)


def test_a_job_of_before_is_left_out(tmp_path: Path) -> None:
    """It had ended before the other began: of another size, or in another step at the same call."""
    for folder, size in (("size", 8), ("same", 4)):
        old = job(Random(1), size, [3], 200, START)
        new = job(Random(2), 4, [0, 1, 2], 200, START + 900 * SECOND, late=1)
        save(tmp_path / folder, [*old, *new])
        found = diagnose_found(gather([tmp_path / folder]))
        assert found.verdict.certainty is not Certainty.CERTAIN
        assert any("dump_rank_3: not used: " in line and "of an earlier run: " in line for line in found.unknown)
        assert 3 not in found.verdict.ranks


def test_dumps_named_in_two_ways_are_told_where_nothing_else_tells(tmp_path: Path) -> None:
    for name, rank in (("a_rank{}", 0), ("b_rank{}", 1)):
        each = Recorder(rank, {"0": ("default_pg", range(2))}, "gloo")
        each.call("0")
        save(tmp_path, [each], name=name)
    told = "a_rank* and b_rank*: whether dumps so named are of one job is not in them"
    assert told in gather([tmp_path]).unknown
    os.rename(tmp_path / "b_rank1", tmp_path / "a_rank1")
    assert told not in gather([tmp_path]).unknown


@pytest.mark.parametrize(("apart", "told"), [(0, False), (40, True)])
def test_equal_dumps_of_a_rank_count_once(apart: int, told: bool, tmp_path: Path) -> None:
    """A copy, or a rank that recorded nothing between them: nothing tells which."""
    ranks = job(Random(3), 2, range(2), 4, late=1)
    save(tmp_path, ranks)
    save(tmp_path, ranks[1:], name="later_rank_{}")
    for n, name in enumerate(("dump_rank_1", "later_rank_1")):
        os.utime(tmp_path / name, ns=(START + n * apart * SECOND,) * 2)
    found = diagnose_found(gather([tmp_path]))
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (1,))
    lines = [line for line in found.unknown if "are equal" in line]
    assert bool(lines) is told
    assert not told or "rank 1 recorded nothing in the 40 s between them: counted once" in lines[0]


def test_nothing_is_left_out_of_one_dump() -> None:
    assert of_one_job({}, []).dumps == {}
