"""A process that uses NCCL and gloo leaves a dump of each: they tell of one process, or are not taken for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fr_dumps import Recorder, recorders, save
from tests.healthy import SECOND, START
from verify.blame import Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

if TYPE_CHECKING:
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis

GROUPS = {"0": ("default_pg", (0, 1, 2))}
FIXED = "2345624434003{}"
"""As where addresses are not chosen by chance: 0x155550c7e... ."""
OPEN = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}


def ranks_of(backend: str, threads: str = "7f{}") -> list[Recorder]:
    """Of a job in which three ranks have made three calls. threads: the address of the one that makes calls."""
    ranks = recorders(3, GROUPS, backend)
    for each in ranks:
        for n in range(3):
            call(each, n, threads)
    return ranks


def call(each: Recorder, at: int, threads: str = "7f{}", **more: object) -> None:
    each.call("0", time_created_ns=START + at * SECOND, thread_id=threads.format(each.rank), **{
        "time_discovered_completed_ns": START + at * SECOND + 5, **more,
    })  # fmt: skip


def judged(folder: Path, nccl: list[Recorder], gloo: list[Recorder]) -> Diagnosis:
    save(folder, nccl, name="nccl_trace_rank_{}")
    save(folder, gloo, name="fr_trace_rank_{}")
    return diagnose_found(gather([folder]))


@given(
    stuck=st.sampled_from(["nccl", "gloo"]), late=st.integers(0, 2), others=st.integers(0, 20),
    missing=st.none() | st.integers(0, 2),
)  # fmt: skip
def test_calls_of_two_backends_are_told_together_and_do_not_meet(
    stuck: str, late: int, others: int, missing: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One rank misses the fourth call of one backend. Of the other one the ranks have made more, and ended them."""
    made = {"nccl": ranks_of("nccl"), "gloo": ranks_of("gloo")}
    for each in made[stuck]:
        if each.rank != late:
            call(each, 10, **OPEN)
    (free,) = {"nccl", "gloo"} - {stuck}
    for each in made[free]:
        for n in range(others):
            call(each, 4 + n)
    # Of one rank, the dump of the backend that is not stuck has not been written.
    made[free] = [each for each in made[free] if each.rank != missing]
    found = judged(tmp_path_factory.mktemp("dumps"), made["nccl"], made["gloo"])
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (late,))
    group = "default_pg" if stuck == "nccl" or missing is not None else "default_pg (gloo)"
    assert f"(call 4 on {group})" in found.verdict.say


def test_a_ring_over_both_backends_is_seen(tmp_path: Path) -> None:
    nccl, gloo = ranks_of("nccl"), ranks_of("gloo")
    for each in nccl[1:]:
        call(each, 10, **OPEN)
    call(gloo[0], 10, **OPEN)
    found = judged(tmp_path, nccl, gloo)
    assert found.verdict.cls is Class.CYCLE
    assert 0 in found.verdict.ranks
    assert "default_pg (gloo)" in found.verdict.say


@pytest.mark.parametrize("addresses", [("140{}", ""), ("140{}", "6e{}"), ("777", "777"), (FIXED, FIXED)])
def test_dumps_of_which_nothing_shows_that_they_are_of_one_process_are_not_mixed(
    addresses: tuple[str, str], tmp_path: Path
) -> None:
    """Rank 0's latest call is one of gloo, the others' one of NCCL: no rank lacks the calls of a dump not looked at."""
    nccl, gloo = (ranks_of(backend, at) for backend, at in zip(("nccl", "gloo"), addresses, strict=True))
    call(gloo[0], 50, addresses[1])
    for each in nccl:
        call(each, 10, **OPEN)
    found = judged(tmp_path, nccl, gloo)
    assert found.verdict.cls is Class.BELOW
    told = "3 dumps of gloo: not used: whether those of ranks 0, 1 and 2 are of the same processes as nccl's"
    assert any(line.startswith(told) for line in found.unknown)
