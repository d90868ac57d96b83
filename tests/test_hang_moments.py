"""A job that works looks like one that hangs, at the right moment: nothing that dumps and stacks of it show is certain.
Where something shows that a call has outlasted its timeout, it is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import fr_dumps
from tests.evidence_files import nccl_lines, ras
from tests.fr_dumps import Recorder, recorders, save
from tests.healthy import SECOND, START, Working, program
from tests.stuck_jobs import RANKS, Fault, Job
from verify.blame import Certainty, Class
from verify.events import Site
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.hang.text import as_text
from verify.readers.calls import Patience
from verify.readers.flight_recorder import decode
from verify.readers.found import Found, Stack
from verify.readers.gather import gather, merge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

TWO = {"0": ("default_pg", (0, 1)), "1": ("a", (0, 1)), "2": ("b", (0, 1))}


@given(
    chance=st.randoms(use_true_random=False), length=st.integers(1, 12), backend=st.sampled_from(["nccl", "gloo"]),
    slow=st.none() | st.integers(0, RANKS - 1), keep=st.none() | st.integers(1, 5), active=st.booleans(),
    swapped=st.booleans(), pairs=st.booleans(), stacks=st.sampled_from(["none", "some", "all"]),
    apart=st.integers(0, 6),
)  # fmt: skip
def test_nothing_is_certain_of_a_job_that_works(
    chance: Random, length: int, backend: str, slow: int | None, keep: int | None, active: bool, swapped: bool,
    pairs: bool, stacks: str, apart: int, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Dumps and stacks of ranks are taken at moments of their own, at most `apart` steps after one another."""
    job = Working(chance, program(chance, length, pairs), backend, slow, swapped)
    first = chance.randrange(4 * length)
    when = [first + chance.randrange(apart + 1) for _ in range(2 * RANKS)]
    dumps: dict[int, Recorder] = {}
    seen: dict[int, Stack] = {}
    for now in range(max(when) + 1):
        for rank in range(RANKS):
            if when[rank] == now:
                dumps[rank] = job.dump(rank, keep, active)
            if when[RANKS + rank] == now:
                seen[rank] = job.stack(rank)
        job.step()
    found = gather([save(tmp_path_factory.mktemp("dumps"), [dumps[rank] for rank in range(RANKS)])])
    if stacks != "none":
        told = [stack for rank, stack in seen.items() if stacks == "all" or rank % 2]
        found = merge([found, Found("stacks", stacks=tuple(told))])
    answer = diagnose_found(found)
    assert answer.code != 1 or answer.verdict.certainty is Certainty.CONDITIONAL, as_text(answer)
    assert answer.code == 1 or not answer.verdict.ranks
    if backend == "gloo" and stacks == "none":
        assert answer.code != 0


@given(
    chance=st.randoms(use_true_random=False), length=st.integers(1, 10), slow=st.none() | st.integers(0, RANKS - 1),
    pairs=st.booleans(), apart=st.integers(0, 6), told=st.sampled_from([(nccl_lines,), (ras,), (nccl_lines, ras)]),
)  # fmt: skip
def test_nor_do_logs_of_launches_and_counters_show_anything_certain(
    chance: Random, length: int, slow: int | None, pairs: bool, apart: int, told: tuple[Callable[..., None], ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    working = Working(chance, program(chance, length, pairs), "nccl", slow, swapped=True)
    first = chance.randrange(4 * length)
    when = [first + chance.randrange(apart + 1) for _ in range(RANKS)]
    launches = {}
    for now in range(max(when) + 1):
        launches |= {rank: working.launches(rank) for rank in range(RANKS) if when[rank] == now}
        working.step()
    assume(ras in told or any(launches.values()))
    folder = tmp_path_factory.mktemp("logs")
    for write in told:
        write(folder, Job(Fault.NONE, 0, "0", launches, {}), range(RANKS))
    answer = diagnose_found(gather([folder]))
    assert answer.code == 3 or answer.verdict.certainty is Certainty.CONDITIONAL, as_text(answer)


def late(folder: Path, backend: str = "nccl", **more: int) -> Diagnosis:
    """Rank 0 waits for rank 1. more: seconds after which rank 0 recorded something else, and its timeout."""
    ranks = recorders(2, TWO, backend)
    for rank in ranks:
        rank.call("0", time_created_ns=START)
    limit = {"timeout_ms": 1000 * more["timeout"]} if "timeout" in more else {}
    ranks[0].call("0", state="scheduled", retired=False, time_created_ns=START + SECOND, **limit)
    if "after" in more:
        ranks[0].call("1", state="scheduled", time_created_ns=START + SECOND * (1 + more["after"]), retired=False)
    return diagnose_found(gather([save(folder, ranks)]))


@pytest.mark.parametrize(("after", "timeout", "certain"), [(599, 600, False), (600, 600, True), (31, 30, True)])
def test_a_call_that_outlasted_its_timeout_makes_it_certain(
    after: int, timeout: int, certain: bool, tmp_path: Path
) -> None:
    found = late(tmp_path, after=after, timeout=timeout)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (1,))
    assert found.verdict.certainty is (Certainty.CERTAIN if certain else Certainty.CONDITIONAL)
    told = " ".join(as_text(found).split())
    assert ("dump again, or look for timeouts in the logs" in told) is not certain


@pytest.mark.parametrize(
    ("written", "certain"), [(5, False), (580, False), (602, True), (10**6, True)],
    ids=["at once", "before the time-out", "with it", "a copy"],
)  # fmt: skip
def test_a_dump_of_before_the_time_out_does_not_show_that_its_rank_never_came(
    written: int, certain: bool, tmp_path: Path
) -> None:
    """Rank 0 calls at 1 s, and may wait until 601 s; its dump is of 701 s. written: when rank 1's file was, s."""
    assert late(tmp_path, after=700, timeout=600).verdict.certainty is Certainty.CERTAIN
    os.utime(tmp_path / "dump_rank_1", ns=(START + written * SECOND,) * 2)
    found = diagnose_found(gather([tmp_path])).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (1,))
    assert found.certainty is (Certainty.CERTAIN if certain else Certainty.CONDITIONAL)
    if not certain:
        assert found.condition == (
            "rank 1 still stands where its dump shows it, perhaps before any call here had outlasted its timeout; dump"
            " all ranks at one moment"
        )


@pytest.mark.parametrize("empty", [True, False])
def test_an_empty_dump_tells_no_time(empty: bool, tmp_path: Path) -> None:
    """Its counters alone say that rank 1 has made no call."""
    ranks = recorders(2, {"0": ("default_pg", (0, 1)), "1": ("a", (0,)), "2": ("b", (1,))})
    ranks[0].call("0", state="scheduled", retired=False, time_created_ns=START)
    ranks[0].call("1", time_created_ns=START + 700 * SECOND)
    if not empty:
        ranks[1].call("2", time_created_ns=START + 700 * SECOND)
    counts = [{0: (1, -1), 1: (1, 1)}, {0: (-1, -1), 1: (-1, -1) if empty else (1, 1)}]
    for rank, mine in zip(ranks, counts, strict=True):
        status = {
            at: {"last_enqueued_collective": sent, "last_completed_collective": done}
            for at, (sent, done) in mine.items()
        }
        fr_dumps.write(tmp_path, {rank.rank: {**rank.dump(), "pg_status": status}})
    found = diagnose_found(gather([tmp_path])).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (1,))
    assert found.certainty is (Certainty.CONDITIONAL if empty else Certainty.CERTAIN)


def test_a_newer_record_in_an_old_file_counts(tmp_path: Path) -> None:
    """A file system that keeps no times: what the dump itself tells is enough."""
    ranks = recorders(2, TWO)
    ranks[0].call("0", state="scheduled", retired=False, time_created_ns=START)
    ranks[0].call("1", time_created_ns=START + 700 * SECOND)
    ranks[1].call("1", time_created_ns=START + 700 * SECOND)
    os.utime(save(tmp_path, ranks) / "dump_rank_1", ns=(0, 0))
    found = diagnose_found(gather([tmp_path])).verdict
    assert (found.cls, found.ranks, found.certainty) == (Class.MISSING, (1,), Certainty.CERTAIN)


@pytest.mark.parametrize("calls", [3, 300])
@pytest.mark.parametrize("done", [True, False])
def test_what_a_coalesced_group_holds_does_not_wait_by_itself(calls: int, done: bool, tmp_path: Path) -> None:
    """Flight Recorder never sets the state of the single transfers: they look open for ever."""
    ranks = recorders(2, TWO)
    for rank in ranks:
        for n in range(calls):
            at = {"time_created_ns": START + n * SECOND * 10, "timeout_ms": 30_000}
            for name in (f"send {rank.rank}->{1 - rank.rank}", f"recv {rank.rank}<-{1 - rank.rank}"):
                rank.call("0", name, state="scheduled", retired=False, same=name.startswith("recv"), **at)
            state = "completed" if done or n else "scheduled"
            rank.call("0", "coalesced", state=state, retired=state == "completed", same=True, is_p2p=True, **at)
    late = decode(save(tmp_path, ranks) / "dump_rank_0").patience
    assert late == (Patience() if done else Patience(30_000, calls > 3, START + 30 * SECOND))


def test_the_condition_names_the_timeout_and_what_to_look_at(tmp_path: Path) -> None:
    found = late(tmp_path)
    assert found.code == 1
    assert found.verdict.condition == (
        "rank 1 does not come any more: no call here is known to have outlasted its timeout (600 s); dump again, or"
        " look for timeouts in the logs"
    )
    assert "if it is only slow, wait" in found.verdict.fix
    assert found.to_dict()["say"].count("Only if") == 1


def test_gloo_shows_no_transfer_in_which_the_rank_may_wait(tmp_path: Path) -> None:
    condition = late(tmp_path, "gloo").verdict.condition
    assert condition.startswith("rank 1 waits in no send or recv, which Flight Recorder on gloo does not record, and")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("transfers", [False, True])
def test_no_all_clear_where_transfers_are_not_recorded(backend: str, transfers: bool, tmp_path: Path) -> None:
    """Both may wait in a recv. A gloo that records transfers, as a later one may, would show it."""
    ranks = recorders(2, TWO, backend)
    for rank in ranks:
        rank.call("0")
    if transfers:
        ranks[0].call("0", "send 0->1")
        ranks[1].call("0", "recv 1<-0")
    found = diagnose_found(gather([save(tmp_path, ranks)]))
    unheard = backend == "gloo" and not transfers
    assert found.code == (3 if unheard else 0)
    assert ("ranks 0 and 1 may wait in a send or recv" in found.verdict.say) is unheard


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    ("line", "other", "certainty"),
    [(7, None, Certainty.CERTAIN), (9, None, Certainty.CONDITIONAL), (7, 5, Certainty.CONDITIONAL)],
    ids=["in the calls that are open", "after them", "and one before it is open too"],
)
def test_a_ring_of_open_calls_is_certain_only_where_the_stacks_are_in_them(
    backend: str, line: int, other: int | None, certainty: Certainty, tmp_path: Path
) -> None:
    """What was open when the dump was written may have ended when the stack was taken."""
    ranks = recorders(2, TWO, backend)
    for rank, group in zip(ranks, "12", strict=True):
        for each in TWO:
            rank.call(each, line=3)
        if other is not None:
            rank.call(group, line=other, state="scheduled", retired=False)
        rank.call(group, line=7, state="scheduled", retired=False)
    inside = Site("/lib/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
    stacks = tuple(Stack(rank, "MainThread", (inside, Site("/job/train.py", line, "step"))) for rank in (0, 1))
    found = diagnose_found(merge([gather([save(tmp_path, ranks)]), Found("stacks", stacks=stacks)]))
    assert (found.verdict.cls, found.verdict.ranks, found.verdict.certainty) == (Class.CYCLE, (0, 1), certainty)
