"""A watchdog's lines beside Flight Recorder dumps: groups that are one count once, others stay two."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from tests.fr_dumps import recorders, save
from tests.test_hang_evidence import DUMPS, hang
from tests.test_readers_logs import timeout
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from verify.hang.diagnosis import Diagnosis

GROUPS = {"0": ("default_pg", range(4)), "3": ("ep", range(4)), "5": ("tp", range(4))}


def status(rank: int, name: str, description: str, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]: [PG ID 9 PG GUID {name}({description}) Rank {rank}]  failure detected by watchdog at work"
        f" sequence id: {completed + 1} PG status: last enqueued work: {enqueued},"
        f" last completed work: {completed}\n"
    )


def told(diagnosis: Diagnosis) -> tuple[str, str, tuple[int, ...]]:
    verdict = diagnosis.verdict
    return str(verdict.cls), str(verdict.certainty), tuple(verdict.ranks)


@given(
    before=st.lists(st.sampled_from(sorted(GROUPS)), max_size=12), stuck=st.sampled_from(sorted(GROUPS)),
    late=st.integers(0, 3), dumped=st.sets(st.integers(0, 3), min_size=1), statuses=st.booleans(),
)  # fmt: skip
def test_a_log_beside_dumps_tells_the_same_story(
    before: list[str], stuck: str, late: int, dumped: set[int], statuses: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    ranks = recorders(4, GROUPS)
    before = [*GROUPS, *before]
    counts = dict.fromkeys(GROUPS, 0)
    log = ""
    for rank in ranks:
        for name in before:
            rank.call(name)
        if rank.rank != late:
            rank.call(stuck, state="scheduled")
    for name in before:
        counts[name] += 1
    for rank in range(4):
        if rank != late:
            log += timeout(rank, counts[stuck] + 1, "ALLREDUCE", 8)
        if statuses or rank not in dumped:
            for name, (described, _) in GROUPS.items():
                waits = name == stuck and rank != late
                log += status(rank, name, described, counts[name] + waits, counts[name])
    folder = tmp_path_factory.mktemp("joined")
    alone = told(diagnose_found(gather([save(folder / "all", ranks)])))
    assert alone == ("missing", "conditional", (late,))
    some = save(folder / "some", [each for each in ranks if each.rank in dumped])
    (some / "wd.log").write_text(log)
    found = gather([some])
    # Dumps do not tell how long anybody has waited; that its watchdog gave up does.
    assert told(diagnose_found(found)) == ("missing", "certain", (late,))
    # Nothing is told twice, and no group counts twice.
    names = {str(event.communicator) for event in found.events if event.communicator is not None}
    assert names <= {described for described, _ in GROUPS.values()}
    places = [(event.rank, event.communicator, event.sequence) for event in found.events if event.communicator]
    assert len(places) == len(set(places))


def test_a_status_of_the_late_rank_closes_no_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One operation that a dump and a line both show was queued behind itself."""
    shutil.copytree(DUMPS, tmp_path / "job")
    line = timeout(0, 2).replace("NumelIn=8, NumelOut=8", "NumelIn=4194304, NumelOut=4194304")
    statuses = status(0, "1", "P_full_tp", 2, 1) + status(1, "1", "P_full_tp", 1, 1)
    (tmp_path / "job" / "wd.log").write_text(line + statuses)
    code, out = hang(capsys, "--json", tmp_path / "job")
    found = json.loads(out)
    assert (code, found["class"], found["certainty"], found["ranks"]) == (1, "missing", "certain", [1])


def test_groups_that_may_not_be_one_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DUMPS, tmp_path / "job")
    (tmp_path / "job" / "wd.log").write_text(timeout(0, 2) + status(0, "7", "P_full_tp", 2, 1))
    _, out = hang(capsys, "--json", tmp_path / "job")
    (line,) = [line for line in json.loads(out)["unknown"] if "counted apart" in line]
    assert line.startswith("wd.log: whether its P_full_tp")
