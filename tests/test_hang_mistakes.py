"""Inputs on which PyTorch's own analyzer was measured to be wrong, and those of its tests, with the right answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.fr_dumps import Recorder, recorders, save, write
from verify.blame import Certainty, Class
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.readers.gather import gather

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TWO = {"0": ("default_pg", (0, 1)), "1": ("pg_a", (0, 1)), "2": ("pg_b", (0, 1))}
THREE = {"0": ("default_pg", (0, 1, 2))}


def answer(folder: Path, ranks: list[Recorder], **how: Any) -> Diagnosis:
    return diagnose_found(gather([save(folder, ranks, **how)]))


def told(found: Diagnosis) -> tuple[int, str, str, tuple[int, ...]]:
    return found.code, str(found.verdict.cls), str(found.verdict.certainty), found.verdict.ranks


@pytest.mark.parametrize("state", ["scheduled", "started"])
def test_opposite_order_without_a_host_wait_is_a_cycle_only_on_a_full_device(tmp_path: Path, state: str) -> None:
    ranks = recorders(2, TWO)
    for rank, names in zip(ranks, (("1", "2"), ("2", "1")), strict=True):
        for name in names:
            rank.call(name, state=state if name == names[0] else "scheduled")
    found = answer(tmp_path, ranks)
    assert told(found) == (1, "cycle", "conditional", (0, 1))
    assert "one communication kernel at a time" in found.verdict.condition


def test_opposite_order_that_blocks_the_hosts_is_one_cycle(tmp_path: Path) -> None:
    ranks = recorders(2, TWO)
    ranks[0].call("1", state="scheduled")
    ranks[1].call("2", state="scheduled")
    found = answer(tmp_path, ranks)
    # That the hosts wait is concluded from what they have open.
    assert told(found) == (1, "cycle", "conditional", (0, 1))
    assert found.verdict.condition == "ranks 0 and 1 wait for what they have open"
    assert "pg_a" in found.verdict.chain[0]
    assert "pg_b" in found.verdict.chain[1]


def test_a_ring_over_three_pairs_is_one_cycle(tmp_path: Path) -> None:
    pairs = {"1": ("p01", (0, 1)), "2": ("p12", (1, 2)), "3": ("p02", (0, 2))}
    ranks = recorders(3, pairs)
    for rank, name in zip(ranks, ("1", "2", "3"), strict=True):
        rank.call(name, state="scheduled")
    found = answer(tmp_path, ranks)
    assert told(found) == (1, "cycle", "conditional", (0, 1, 2))
    assert len(found.verdict.chain) == 3


def test_both_send_first(tmp_path: Path) -> None:
    ranks = recorders(2, TWO)
    ranks[0].call("1", "send 0->1", state="scheduled")
    ranks[1].call("1", "send 1->0", state="scheduled")
    assert told(answer(tmp_path, ranks)) == (1, "cycle", "conditional", (0, 1))


def test_a_pipeline_that_completed_is_silent(tmp_path: Path) -> None:
    ranks = recorders(3, THREE)
    ranks[0].call("0", "send 0->1")
    ranks[1].call("0", "recv 1<-0")
    ranks[1].call("0", "send 1->2")
    ranks[2].call("0", "recv 2<-1")
    assert told(answer(tmp_path, ranks)) == (0, "none", "certain", ())


def test_a_transfer_that_rank_zero_never_sends(tmp_path: Path) -> None:
    """Rank 0 is a rank as any other."""
    ranks = recorders(3, THREE)
    for rank in ranks:
        rank.call("0")
    ranks[1].call("0", "recv 1<-0", state="scheduled")
    assert told(answer(tmp_path, ranks)) == (1, "missing", "conditional", (0,))


def test_a_broadcast_that_is_done_on_its_root_blames_nobody(tmp_path: Path) -> None:
    ranks = recorders(3, THREE)
    for rank in ranks:
        rank.call("0", "broadcast", state="completed" if rank.rank == 0 else "started")
    assert told(answer(tmp_path, ranks))[::3] == (3, ())


def test_numbers_of_the_process_do_not_matter(tmp_path: Path) -> None:
    ranks = recorders(2, TWO)
    ranks[0].call("1", "all_reduce", state="scheduled")
    ranks[1].call("1", "all_gather", out=16, state="scheduled")
    for entry in ranks[1].entries:
        entry["record_id"] += 100
    assert told(answer(tmp_path, ranks)) == (1, "mismatch", "certain", ())


def test_all_equal_and_stuck_is_undecided(tmp_path: Path) -> None:
    ranks = recorders(2, TWO)
    for rank in ranks:
        rank.call("1", state="scheduled")
    assert told(answer(tmp_path, ranks)) == (3, "below", "undecided", ())


def test_an_all_to_all_that_loses_elements(tmp_path: Path) -> None:
    ranks = recorders(2, TWO)
    ranks[0].call("1", "all_to_all", size=10, out=8)
    ranks[1].call("1", "all_to_all", size=6, out=8)
    assert told(answer(tmp_path / "even", ranks))[0] == 0
    ranks = recorders(2, TWO)
    ranks[0].call("1", "all_to_all", size=10, out=8)
    ranks[1].call("1", "all_to_all", size=6, out=9)
    assert told(answer(tmp_path / "lost", ranks)) == (1, "mismatch", "certain", ())


def test_a_dump_that_is_missing_is_no_fault_and_no_crash(tmp_path: Path) -> None:
    ranks = recorders(3, THREE)
    for rank in ranks:
        rank.call("0", state="scheduled")
    found = answer(tmp_path, ranks[:2])
    assert told(found) == (3, "missing", "undecided", ())
    assert "no dump from rank 2" in found.verdict.say


def test_the_majority_is_not_blamed_whichever_file_comes_first(tmp_path: Path) -> None:
    for odd in range(3):
        ranks = recorders(3, THREE)
        for rank in ranks:
            rank.call("0", size=9 if rank.rank == odd else 8, state="scheduled")
        assert told(answer(tmp_path / str(odd), ranks)) == (1, "mismatch", "certain", (odd,))


def test_a_call_that_nobody_saw_makes_no_majority(tmp_path: Path) -> None:
    """Rank 2's ring has lost the call: that it passed it is known, what it brought is not."""
    ranks = recorders(3, THREE)
    for rank in ranks:
        rank.call("0", size=9 if rank.rank == 1 else 8)
        rank.call("0")
    ranks[2].entries = ranks[2].entries[1:]
    assert told(answer(tmp_path, ranks)) == (1, "mismatch", "certain", ())


def test_equal_calls_from_other_lines(tmp_path: Path) -> None:
    ranks = recorders(3, THREE)
    for rank in ranks:
        rank.call("0", line=7)
        rank.call("0", line=9 if rank.rank == 2 else 7, state="scheduled")
    found = answer(tmp_path, ranks)
    assert told(found) == (1, "mismatch", "conditional", (2,))
    assert "Only if these lines are not meant to meet" in found.verdict.say
    assert "train.py:9" in found.verdict.say


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("open_on", "line", "expected"),
    [
        ((), 7, (0, "none", "certain", ())),
        ((0, 1, 2), 8, (1, "missing", "conditional", (3,))),
        ((0, 1, 2), 9, (1, "missing", "conditional", (3,))),
        ((0, 1, 2, 3), 9, (3, "below", "undecided", ())),
    ],
    ids=["completed", "a member never comes", "nor to the lines that met", "all are in it"],
)
def test_lines_that_met_and_completed_are_no_mismatch(
    open_on: tuple[int, ...], line: int, expected: tuple[Any, ...], long: bool, tmp_path: Path
) -> None:
    """As of code that depends on the rank: rank 0 makes the call of the others at a line of its own."""
    ranks = recorders(4, {"0": ("default_pg", range(4))})
    for rank in ranks:
        for n in range(200 if long else 3):
            rank.call("0", line=7 if n != 1 else 9 if rank.rank else 70)
        if rank.rank in open_on:
            rank.call("0", line=70 if line == 9 and not rank.rank else line, state="scheduled")
    assert told(answer(tmp_path, ranks)) == expected


def pair(first: dict[str, Any], second: dict[str, Any]) -> Callable[[Path], Diagnosis]:
    def run(folder: Path) -> Diagnosis:
        ranks = recorders(2, {"0": ("default_pg", (0, 1))})
        for rank, call in zip(ranks, (first, second), strict=True):
            rank.call("0", **call)
        return answer(folder, ranks)

    return run


AR, AG = {"operation": "all_reduce", "size": 4}, {"operation": "all_gather", "size": 4, "out": 8}
A2A = {"operation": "all_to_all", "size": 4}


@pytest.mark.parametrize(
    ("first", "second", "cls"),
    [
        (AR, AR, Class.NONE),
        (AR, AG, Class.MISMATCH),
        (A2A, A2A, Class.NONE),
        (AR, {**AR, "size": 6}, Class.MISMATCH),
        (AR, {**AR, "out": 6}, Class.MISMATCH),
        ({**AR, "out": 8}, {**AR, "out": 8}, Class.MISMATCH),
        ({**AR, "state": "scheduled"}, AR, Class.DEVICE_STALL),
        (AR, {**AR, "output_dtypes": ["Half"]}, Class.MISMATCH),
        (AR, {**AR, "input_dtypes": "Float", "output_dtypes": "Float"}, Class.NONE),
        ({"operation": "gather", "output_sizes": [[8], [8]]}, {"operation": "gather", "output_sizes": []}, Class.NONE),
        ({"operation": "gather", "output_sizes": [[8], [8]]}, {"operation": "gather"}, Class.NONE),
    ],
)
def test_pairs_of_calls(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], cls: Class) -> None:
    found = pair(first, second)(tmp_path)
    assert found.verdict.cls is cls
    # A device that has not finished may do so the next moment, as far as dumps tell.
    assert found.verdict.certainty is (Certainty.CONDITIONAL if cls is Class.DEVICE_STALL else Certainty.CERTAIN)


OPERATIONS = (
    "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "all_gather_v", "all_reduce", "gather", "scatter",
    "all_to_all", "all_to_all_v_single", "all_reduce_barrier", "barrier", "allreduce_coalesced", "split", "of_tomorrow",
    "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "ALLGATHER_coalesced",
)  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", ["nccl", "gloo", "xccl", "of_tomorrow"])
def test_every_operation_against_itself(tmp_path: Path, operation: str, backend: str) -> None:
    ranks = recorders(2, {"0": ("default_pg", (0, 1))}, backend)
    for rank in ranks:
        rank.call("0", operation)
    # Flight Recorder on gloo holds no sends and receives, in which both may wait.
    nothing_wrong = (3, "none", "undecided", ()) if backend == "gloo" else (0, "none", "certain", ())
    assert told(answer(tmp_path, ranks)) == nothing_wrong


def coalesced(rank: Recorder, *calls: tuple[str, int], end: str = "coalesced", state: str = "completed") -> None:
    for n, (operation, size) in enumerate(calls):
        rank.call("0", operation, size=size, same=n > 0, state="scheduled", input_sizes=[[size]])
    rank.call("0", end, same=True, input_sizes=[], output_sizes=[], state=state)


def test_groups_of_calls(tmp_path: Path) -> None:
    """The analyzer's own cases: own groups, two broadcasts as one call, uneven gathers and scatters."""
    groups = {"0": ("default_pg", (0, 1))}
    own = [Recorder(rank, {**groups, "1": ("sub_pg", (rank,))}) for rank in range(2)]
    for rank in own:
        rank.call("0")
        rank.call("1")
    assert told(answer(tmp_path / "own", own))[0] == 0
    cases: list[tuple[str, str, tuple[tuple[str, int], ...], tuple[tuple[str, int], ...], str]] = [
        ("equal", "coalesced", (("broadcast", 8), ("broadcast", 8)), (("broadcast", 8), ("broadcast", 8)), "none"),
        (
            "uneven", "ALLGATHER_coalesced", (("_broadcast_oop", 8), ("_broadcast_oop", 9)),
            (("_broadcast_oop", 8), ("_broadcast_oop", 7)), "mismatch",
        ),
        ("scatter", "REDUCE_SCATTER_coalesced", (("_reduce_oop", 8), ("_reduce_oop", 9)),
         (("_reduce_oop", 8), ("_reduce_oop", 9)), "none"),
    ]  # fmt: skip
    for name, end, first, second, cls in cases:
        ranks = recorders(2, groups)
        coalesced(ranks[0], *first, end=end)
        coalesced(ranks[1], *second, end=end)
        assert told(answer(tmp_path / name, ranks))[1] == cls, name
    ranks = recorders(2, groups)
    for rank in ranks:
        rank.call("0")
    coalesced(ranks[1], ("_reduce_oop", 8), ("_reduce_oop", 9), end="REDUCE_SCATTER_coalesced")
    found = answer(tmp_path / "never", ranks)
    assert found.code == 3
    assert "rank 0 did not call" in found.verdict.say
    ranks[1].entries[-1]["state"] = "scheduled"
    assert told(answer(tmp_path / "stuck", ranks)) == (1, "missing", "conditional", (0,))


def test_sends_and_receives_of_a_batch(tmp_path: Path) -> None:
    """Both ranks send and receive in one batch: no cycle. With one recv less, the batch waits for ever."""
    groups = {"0": ("default_pg", (0, 1))}
    ranks = recorders(2, groups)
    for rank in ranks:
        other = 1 - rank.rank
        coalesced(rank, (f"send {rank.rank}->{other}", 8), (f"recv {rank.rank}<-{other}", 8), state="completed")
        for entry in rank.entries:
            entry.update(is_p2p=True, p2p_seq_id=1)
    assert told(answer(tmp_path, ranks)) == (0, "none", "certain", ())
    for rank in ranks:
        rank.entries[-1]["state"] = "scheduled"
    assert told(answer(tmp_path, ranks))[0] == 3


def test_sequence_numbers_as_text_and_json(tmp_path: Path) -> None:
    ranks = recorders(2, TWO)
    for rank in ranks:
        rank.call("1")
    ranks[0].call("1", state="scheduled")
    dumps = {rank.rank: rank.dump("2.8") for rank in ranks}
    for dump in dumps.values():
        for entry in dump["entries"]:
            entry |= {key: str(entry[key]) for key in ("collective_seq_id", "p2p_seq_id", "op_id")}
    for as_json in (False, True):
        folder = write(tmp_path / str(as_json), dumps, as_json=as_json)
        assert told(diagnose_found(gather([folder]))) == (1, "missing", "conditional", (1,))


@pytest.mark.parametrize(
    ("operation", "backend", "expected"),
    [
        ("all_reduce", "nccl", (3, "undecided", ())),
        ("broadcast", "nccl", (1, "conditional", (2,))),
        ("all_reduce", "gloo", (1, "conditional", (2,))),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_dumps_that_cannot_be_of_one_moment_blame_nobody(
    operation: str, backend: str, expected: tuple[int, str, tuple[int, ...]], begun: bool, tmp_path: Path
) -> None:
    """Ranks 0 and 1 finished calls that rank 2's dump does not have. An all_reduce cannot end so; a broadcast can, and
    what looks finished on gloo may have failed. begun: rank 2 stands in a call that the others have finished.
    """
    ranks = recorders(3, THREE, backend)
    for rank in ranks:
        for _ in range(4):
            rank.call("0", operation)
        if begun and rank.rank == 2:
            rank.call("0", operation, state="scheduled")
        if rank.rank != 2:
            for _ in range(3):
                rank.call("0", operation)
            rank.call("0", operation, state="scheduled", retired=False)
    found = answer(tmp_path, ranks)
    assert (found.code, str(found.verdict.certainty), found.verdict.ranks) == expected, found.verdict
    assert expected[2] or "is of different moments, or of different runs" in found.verdict.say
