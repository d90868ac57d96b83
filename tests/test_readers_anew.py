"""A process that destroys its groups and makes them anew, so that their numbers start again: dumps and records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kernel.record import read
from kernel.record.foreign import groups_of
from tests.fr_dumps import Recorder, recorders, save
from verify.blame import Certainty, Class
from verify.hang.diagnosis import diagnose_found
from verify.readers.gather import gather

if TYPE_CHECKING:
    import pytest

GROUPS = {"0": ("default_pg", range(3)), "1": ("tp", range(3))}


def anew(rank: Recorder) -> None:
    """What comes is of groups of the same names, made after the old ones were destroyed."""
    rank.counts.clear()
    rank.first = rank.entries[-1]["pg_id"] + 5  # type: ignore[attr-defined]


def call(rank: Recorder, name: str, **how: object) -> None:
    rank.call(name, **how)  # type: ignore[arg-type]
    rank.entries[-1]["pg_id"] += getattr(rank, "first", 0)


@given(
    lives=st.lists(st.lists(st.sampled_from(sorted(GROUPS)), min_size=1, max_size=5), min_size=2, max_size=3),
    late=st.none() | st.integers(0, 2), lost=st.integers(0, 3), data=st.data(),
)  # fmt: skip
def test_calls_before_and_after_are_kept_apart(
    lives: list[list[str]], late: int | None, lost: int, data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """As if the dumps were of the last life alone, also where a ring lost its first entries."""
    ranks, alone = recorders(3, GROUPS), recorders(3, GROUPS)
    for rank, only in zip(ranks, alone, strict=True):
        for at, life in enumerate(lives):
            if at:
                anew(rank)
            # Of each life all have made a call in each group: which were made anew is in no dump that shows one only.
            for name in (*GROUPS, *life):
                call(rank, name)
                if at == len(lives) - 1:
                    only.call(name)
        if rank.rank != late:
            call(rank, "1", state="scheduled")
            only.call("1", state="scheduled")
        rank.entries = rank.entries[min(lost, len(lives[0])) :]
    folder = tmp_path_factory.mktemp("anew")
    got = diagnose_found(gather([save(folder / "all", ranks)])).verdict
    want = diagnose_found(gather([save(folder / "alone", alone)])).verdict
    assert (got.cls, got.ranks, got.certainty) == (want.cls, want.ranks, want.certainty)
    assert got.cls is (Class.BELOW if late is None else Class.MISSING)


def test_a_rank_that_is_still_in_the_old_group_does_not_meet_those_in_the_new_one(tmp_path: Path) -> None:
    ranks = recorders(3, GROUPS)
    for rank in ranks:
        call(rank, "0")
        if rank.rank == 2:
            call(rank, "0", state="scheduled")
            continue
        anew(rank)
        call(rank, "0")
        call(rank, "0", state="scheduled")
    found = diagnose_found(gather([save(tmp_path / "job", ranks)]))
    assert (found.verdict.cls, found.verdict.certainty) == (Class.MISSING, Certainty.UNDECIDED)
    assert "for rank 2, which has not called it" in found.verdict.say
    assert "dump_rank_2: what it shows of default_pg is of before that" in found.unknown


def test_groups_of_one_name_at_a_time_are_no_new_ones(tmp_path: Path) -> None:
    ranks = recorders(3, GROUPS)
    for rank in ranks:
        for own in (0, 7, 0, 7):
            call(rank, "0")
            rank.entries[-1]["pg_id"] = own
        if rank.rank != 1:
            call(rank, "0", state="scheduled")
    found = diagnose_found(gather([save(tmp_path / "job", ranks)]))
    assert (found.verdict.cls, found.verdict.ranks, found.verdict.certainty) == (
        Class.MISSING, (1,), Certainty.CONDITIONAL,
    )  # fmt: skip
    assert not any("anew" in line for line in found.unknown)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from turnstile import record
rank, folder = int(os.environ["RANK"]), sys.argv[1]
record.install(folder)
x = torch.ones(4)
for life in range(2):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{life}", rank=rank, world_size=3)
    tp = dist.new_group([0, 1, 2], group_desc="tp")
    if not life and rank < 2:
        (dist.recv if rank else dist.send)(x, 1 - rank, group=tp)
    if life:
        dist.all_reduce(x, group=tp)
        dist.all_reduce(x)
        dist.all_reduce(x)
    if not life:
        dist.destroy_process_group()
record.uninstall()
os._exit(0)
"""


def test_a_record_names_a_group_made_anew_by_its_life_on_every_rank(tmp_path: Path) -> None:
    """Also where a rank made no call in the old one."""
    script = tmp_path / "twice.py"
    script.write_text(SCRIPT)
    house = str(Path(__file__).resolve().parent.parent)
    jobs = [
        subprocess.Popen(
            [sys.executable, script, tmp_path],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "PYTHONPATH": house},
        )
        for rank in range(3)
    ]
    try:
        assert [job.wait(120) for job in jobs] == [0, 0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    names = [
        {group.name for group in groups_of(read(tmp_path / "record" / f"rank{rank}.ring").strings).values()}
        for rank in range(3)
    ]
    for name in ("default_pg (2)", "tp"):
        assert all(any(each.startswith(name) and each.endswith("(2)") for each in mine) for mine in names)
    out = subprocess.run(
        [sys.executable, "-m", "turnstile", "hang", "--json", tmp_path], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": house},
    )  # fmt: skip
    assert json.loads(out.stdout)["class"] == "none"
