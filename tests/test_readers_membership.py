"""Dumps that contradict each other, or are there twice: what is not known is said, and nobody is blamed for it."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.fr_dumps import Recorder, recorders, save, write
from verify.blame import Certainty, Class
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.readers.gather import gather
from verify.readers.membership import resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

WORLD = {"0": ("default_pg", (0, 1, 2, 3)), "1": ("tp", (0, 1, 2, 3))}


def stuck(odd: int | None = None, **listed: tuple[int, ...]) -> list[Recorder]:
    """Four ranks in a call of tp that `odd` has not made. listed: r2=(0, 1): what that rank says of tp's members."""
    ranks = recorders(4, WORLD)
    for rank in ranks:
        rank.call("0")
        if rank.rank != odd:
            rank.call("1", state="scheduled")
        if members := listed.get(f"r{rank.rank}"):
            rank.groups["1"] = ("tp", members)
    return ranks


def answer(folder: Path, ranks: list[Recorder], **how: object) -> Diagnosis:
    return diagnose_found(gather([save(folder, ranks, **how)]))


def test_a_list_that_most_contradict_is_not_believed(tmp_path: Path) -> None:
    found = answer(tmp_path / "one", stuck(odd=3, r1=(0, 1, 999_999_999)))
    verdict = found.verdict
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.MISSING, Certainty.CONDITIONAL, (3,))
    assert any("the dump of rank 1 lists other members of tp" in line for line in found.unknown)
    assert not any("999999999" in line for line in (*found.unknown, found.verdict.say))
    # The rank itself does not belong there, as most see it: its calls are on nobody's side.
    ranks = recorders(4, {**WORLD, "1": ("tp", (0, 1, 2))})
    for rank in ranks[:3]:
        rank.call("1", state="scheduled")
    ranks[3].groups["1"] = ("tp", (0, 3))
    ranks[3].call("1", "all_gather", state="scheduled")
    apart = answer(tmp_path / "other", ranks)
    assert (apart.code, apart.verdict.ranks) == (3, ())


def test_lists_of_which_none_has_a_majority_blame_nobody(tmp_path: Path) -> None:
    found = answer(tmp_path, stuck(odd=3, r0=(0, 1), r1=(0, 1), r2=(0, 1, 2, 7), r3=(3, 0)))
    assert (found.code, found.verdict.ranks) == (3, ())
    assert any(line.startswith("who belongs to tp") for line in found.unknown)


def test_nothing_open_is_no_all_clear_where_lists_contradict(tmp_path: Path) -> None:
    ranks = stuck(r0=(0, 1), r2=(0, 2))
    for rank in ranks:
        rank.entries[-1]["state"] = "completed"
    found = answer(tmp_path, ranks)
    assert (found.code, found.verdict.cls) == (3, Class.NONE)
    assert "contradict each other" in found.verdict.say


def test_one_name_for_several_groups_is_no_contradiction(tmp_path: Path) -> None:
    """Processes number their groups by themselves: "1" is the pair of each."""
    ranks = [Recorder(rank, {"1": ("tp", (0, 1) if rank < 2 else (2, 3))}) for rank in range(4)]
    for rank in ranks:
        rank.call("1", state="completed" if rank.rank < 2 else "scheduled")
    ranks[3].entries.clear()
    ranks[3].call("1")
    ranks[2].call("1", state="scheduled")
    found = answer(tmp_path, ranks)
    assert not any("member" in line for line in found.unknown)
    assert 0 not in found.verdict.ranks
    assert 1 not in found.verdict.ranks


members = st.sets(st.integers(0, 5), min_size=1, max_size=4).map(lambda each: tuple(sorted(each)))


@given(st.dictionaries(st.integers(0, 5), st.one_of(st.just(()), members), min_size=1))
@example({3: (0, 1, 2), 0: (), 1: (0, 1, 4, 5), 2: (), 4: (0, 1, 4, 5)})
def test_whoever_belongs_to_a_group_belongs_to_the_same_one(listed: dict[int, tuple[int, ...]]) -> None:
    """After the contradictions are settled, all who share a group see the same members, and lists that agree stay."""
    name = ("1", "tp")
    found = resolve({rank: {name: each} for rank, each in listed.items()}, {rank: {name} for rank in listed})
    inside = {rank: found.groups[rank, name] for rank in listed if (rank, name) not in found.outside}
    for group in inside.values():
        for other in set(group.members) & inside.keys():
            if listed[other]:
                assert inside[other] == group
    told = {rank: each for rank, each in listed.items() if each}
    apart = all(
        rank in mine and all(listed.get(other) == mine for other in set(mine) & told.keys())
        for rank, mine in told.items()
    ) and all(set(one).isdisjoint(other) or one == other for one in told.values() for other in told.values())
    if apart:
        assert not found.disputed
        assert all(found.groups[rank, name].members == mine for rank, mine in told.items())


def test_copies_of_a_dump_are_used_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "job", stuck(odd=3))
    alone = diagnose_found(gather([folder]))
    shutil.copy(folder / "dump_rank_1", folder / "copy_of_dump_rank_1")
    (folder / "again").mkdir()
    shutil.copy(folder / "dump_rank_2", folder / "again" / "dump_rank_2")
    twice = diagnose_found(gather([folder, folder / "dump_rank_0", folder / "again" / "dump_rank_2"]))
    assert twice.verdict == alone.verdict
    assert twice.unknown == alone.unknown


def test_of_several_dumps_of_a_rank_the_latest_is_used_and_all_others_are_named(tmp_path: Path) -> None:
    latest = stuck()[1].dump()
    older = [{**latest, "entries": latest["entries"][:n]} for n in range(2)]
    for name, dump in zip(("a_rank_1", "b_rank_1", "c_rank_1"), (older[0], latest, older[1]), strict=True):
        write(tmp_path, {1: dump}, name=name)
    (line,) = [line for line in gather([tmp_path]).unknown if "dumps of rank 1" in line]
    assert line == "3 dumps of rank 1: b_rank_1, which saw the latest call, is used, without a_rank_1, c_rank_1"


@pytest.mark.parametrize(
    "name", ["nccl:all_rfduce", "nccl:all\x00reduce", "nccl:", "ncclXallYreduce!", "nccl:all reduce"]
)
def test_a_damaged_name_of_an_operation_is_no_mismatch(tmp_path: Path, name: str) -> None:
    ranks = stuck(odd=3)
    ranks[2].entries[-1]["profiling_name"] = name
    found = answer(tmp_path, ranks)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (3,))
    assert any("no operation that is known" in line for line in found.unknown)
    assert all(line.isprintable() for line in found.unknown)


def test_an_operation_of_a_later_version_still_differs(tmp_path: Path) -> None:
    ranks = stuck()
    ranks[2].entries[-1]["profiling_name"] = "nccl:all_reduce_sparse"
    found = answer(tmp_path, ranks)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISMATCH, (2,))


def test_a_name_that_contradicts_the_groups_is_told_apart_from_one_without_a_rank(tmp_path: Path) -> None:
    folder = save(tmp_path / "job", stuck())
    (folder / "dump_rank_2").rename(folder / "dump_rank_7")
    with pytest.raises(UsageError) as refused:
        gather([folder])
    what = "its name says rank 7, the groups in it have ranks 0, 1, 2 and 3 only"
    assert str(refused.value) == f"{folder / 'dump_rank_7'}: {what}: name it after its own rank, or leave it out"


def test_where_the_groups_leave_one_rank_only_that_one_is_believed(tmp_path: Path) -> None:
    ranks = recorders(2, {"0": ("default_pg", (0, 1)), "1": ("mine", (1,))})
    for rank in ranks:
        rank.call("0")
    folder = save(tmp_path / "job", ranks)
    (folder / "dump_rank_1").rename(folder / "dump_rank_5")
    found = gather([folder])
    assert found.present == {0, 1}
    assert "dump_rank_5: its name says rank 5, its groups rank 1, which is believed" in found.unknown


def lines_run(work: Callable[[], object]) -> int:
    """Lines of the module that some work goes through, each turn of a loop one by one."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        if not frame.f_code.co_filename.endswith("membership.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(("groups", "members", "dumps"), [(300, 400, 1), (2, 400, 400), (1, 2, 400)])
def test_groups_times_members_are_not_looked_through_one_by_one(groups: int, members: int, dumps: int) -> None:
    """Many groups of one long list, a long list that many ranks hold, and many short ones that share a name."""
    everybody = tuple(range(members))
    listed = {
        rank: {
            (str(name), "g"): everybody if members > 2 else (rank - rank % 2, rank - rank % 2 + 1)
            for name in range(groups)
        }
        for rank in range(dumps)
    }
    used = lines_run(lambda: resolve(listed, {}))
    assert used < 55 * (groups * dumps + members)


@given(st.lists(st.sets(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=8), st.data())
def test_lists_that_have_ranks_in_common_are_found_together(lists: list[set[int]], data: st.DataObject) -> None:
    """Against the closure of what two lists have in common."""
    views = {tuple(sorted(each)): [data.draw(st.sampled_from(sorted(each)))] for each in lists}
    name = ("0", "g")
    listed = {rank: {name: members} for members, (rank,) in views.items()}
    parts = [{members} for members in listed_of(listed)]
    while (pair := joint(parts)) is not None:
        one, other = pair
        parts = [part for part in parts if part not in (one, other)] + [one | other]
    found = resolve(listed, {})
    contradicted = sum(len(part) > 1 for part in parts)
    assert len(found.unknown) == contradicted


def listed_of(listed: dict[int, dict[tuple[str, str], tuple[int, ...]]]) -> set[tuple[int, ...]]:
    return {members for groups in listed.values() for members in groups.values()}


def joint(parts: list[set[tuple[int, ...]]]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]] | None:
    """Two parts that have a rank in common."""
    for at, one in enumerate(parts):
        for other in parts[at + 1 :]:
            if {rank for members in one for rank in members} & {rank for members in other for rank in members}:
                return one, other
    return None
