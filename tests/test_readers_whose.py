"""Dumps under the names of other ranks: what is in them tells whose they are, or that they are not what they seem."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from kernel.errors import UsageError
from tests.fr_dumps import Recorder, save
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

NOW_NS = 1_795_975_285_000_000_000
MEGATRON = Path(__file__).parent / "data" / "fr" / "megatron16"
GROUPS = {"0": ("default_pg", (0, 1, 2))}


def waiting(folder: Path, ranks: tuple[int, ...] = (0, 2), transfers: bool = False) -> Path:
    """Ranks that wait for rank 1 in their second all_reduce, with times and threads as processes have them."""
    made = []
    for rank in ranks:
        recorder = Recorder(rank, GROUPS)
        recorder.call("0")
        if transfers:
            recorder.call("0", f"send {rank}->{(rank + 1) % 3}")
            recorder.call("0", f"recv {rank}<-{(rank + 2) % 3}")
        recorder.call("0", state="scheduled")
        for entry in recorder.entries:
            entry["time_created_ns"] += NOW_NS + rank * 7_654_321
            entry["thread_id"] = str(140_000_000_000_000 + rank * 4096)
        made.append(recorder)
    return save(folder, made)


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_copy_under_the_name_of_another_rank_is_no_evidence_of_it(
    transfers: bool, later: bool, tmp_path: Path
) -> None:
    """Rank 1 left no dump, and that of rank 0 lies there twice; later: one of them was taken a call later, which only
    transfers tell.
    """
    folder = waiting(tmp_path / "job", transfers=transfers)
    shutil.copy(folder / "dump_rank_0", folder / "dump_rank_1")
    if later:
        dump = pickle.loads((folder / "dump_rank_1").read_bytes())
        dump["entries"].append({**dump["entries"][0], "record_id": 9, "time_created_ns": NOW_NS + 10**9})
        (folder / "dump_rank_1").write_bytes(pickle.dumps(dump))
    found = diagnose_found(gather([folder]))
    assert (found.code, found.verdict.ranks) == (3, ())
    if later and not transfers:
        return
    assert "no dump from rank" in found.verdict.say
    lines = [line for line in found.unknown if line.startswith("dump_rank_")]
    assert len(lines) == 1
    if transfers:
        more = "; not used: there is another dump of that rank" if later else ""
        assert lines == [f"dump_rank_1: its name does not say rank 0, its sends and receives do{more}"]
    else:
        same = "dump_rank_0, dump_rank_1: dumps of one process, and nothing tells of which rank"
        assert lines == [f"{same}: not used for ranks 0 and 1"]


def test_two_dumps_whose_names_were_exchanged_are_told_by_their_transfers(tmp_path: Path) -> None:
    folder = waiting(tmp_path / "job", (0, 1, 2), transfers=True)
    right = diagnose_found(gather([folder])).verdict
    (folder / "dump_rank_0").rename(folder / "x")
    (folder / "dump_rank_1").rename(folder / "dump_rank_0")
    (folder / "x").rename(folder / "dump_rank_1")
    found = diagnose_found(gather([folder]))
    assert found.verdict == right
    assert sum("its sends and receives do" in line for line in found.unknown) == 2


def test_dumps_of_one_process_alone_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = waiting(tmp_path / "job", (0,))
    shutil.copy(folder / "dump_rank_0", folder / "dump_rank_1")
    with pytest.raises(UsageError, match=r"dumps of one process.*name each dump after its own rank") as error:
        gather([folder])
    assert "\n" not in str(error.value)


def test_dumps_of_ranks_that_recorded_at_equal_times_are_theirs(tmp_path: Path) -> None:
    """Times of no clock, as tests have them, and equal times of other threads, show nothing."""
    folder = waiting(tmp_path / "job", (0, 1, 2))
    for rank in (1, 2):
        dump = pickle.loads((folder / f"dump_rank_{rank}").read_bytes())
        for entry in dump["entries"]:
            entry["time_created_ns"] -= rank * 7_654_321
        (folder / f"dump_rank_{rank}").write_bytes(pickle.dumps(dump))
    found = diagnose_found(gather([folder]))
    assert not any("one process" in line for line in found.unknown)


@pytest.mark.parametrize("fault", ["lock_gil", "gpu_error"])
def test_real_dumps_are_those_of_their_names(fault: str) -> None:
    found = gather([MEGATRON / fault])
    assert not any("one process" in line or "sends and receives do" in line for line in found.unknown)
