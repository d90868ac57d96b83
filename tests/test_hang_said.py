"""What a report says in the corners: sentences with a verb, evidence called by its name, figures that are known."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from kernel.record import Kind as Record
from kernel.record.foreign import BROKEN
from tests.installed_rings import Rank, pair
from tests.test_hang_moving import LINE, SLEEPS, main, told
from tests.test_live_timed import REAL
from verify.blame import Certainty, Class, absent
from verify.events import Event, Kind, Site
from verify.hang.diagnosis import diagnose_found
from verify.hang.processes import look_at
from verify.live import threads, timed
from verify.live.threads import Moves
from verify.matching import Host, Situation, Standing
from verify.readers.gather import gather
from verify.readers.record import RecordReader
from verify.waitgraph import wait_graph

if TYPE_CHECKING:
    from pathlib import Path

ASLEEP = Site("/lib/python3.11/site-packages/x.py", 1, "sleep")


def recorded_again(out: Path) -> None:
    """Rank 1 ended its record, called on, and records again: how its calls count is not known. Rank 0 waits."""
    first, second = Rank(out, 0), Rank(out, 1)
    one = first.group("default_pg", 0, 1)
    first.over(*(first.call(one) for _ in range(5)))
    first.wait(first.call(one))
    second.over(second.call(second.group("default_pg", 0, 1, base=2, certain=False)))


def test_a_rank_whose_calls_are_not_all_known_is_told_in_a_sentence(tmp_path: Path) -> None:
    recorded_again(tmp_path)
    bare = told(tmp_path).verdict
    assert bare.certainty is Certainty.UNDECIDED
    assert "the record of rank 1 holds no call of that group, and may have lost it" in bare.say
    found = told(tmp_path, main(1, ASLEEP, LINE), now={1: SLEEPS}).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CONDITIONAL, (1,))
    said = found.say.partition(": ")[2]
    assert said.startswith("Rank 0 waits in all_reduce (call 6 on default_pg) at train.py:7 in step for rank 1, which")


def test_who_is_outside_of_calls_and_not_waited_for_is_told_in_a_sentence() -> None:
    event = Event(1, Kind.EXTERNAL, "a sleep", site=LINE)
    hosts = [Host(1, "", Standing.OUTSIDE, event), Host(2, "", Standing.OUTSIDE, event)]
    graph = wait_graph(Situation(hosts, {}, {}))
    say = "blocked outside collectives, in a sleep at train.py:7 in step."
    assert absent(Class.OUTSIDE, hosts[:1], graph).say == f"Rank 1 is {say}"
    assert absent(Class.OUTSIDE, hosts, graph).say.endswith(f"anks 1 and 2 are {say}")


def test_a_record_that_lacks_calls_is_no_dump(tmp_path: Path) -> None:
    """Groups were made anew with other numbers: what the rank called there could not be recorded."""
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    second.text(Record.MARK, f"{BROKEN}calls of this process as rank 0 of its default group no. 2")
    waits = main(1, Site("/lib/python3.11/threading.py", 327, "Condition.wait"), LINE)
    found = told(tmp_path, waits, now={1: Moves()}).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (1,))
    assert "dump" not in f"{found.say} {found.condition}"
    assert "its record does not hold all calls; look again" in found.condition


@pytest.mark.parametrize("status", ["", "running", "failed"])
def test_a_run_that_has_recorded_nothing_yet_is_said_to_start(status: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    if status:
        (run / "run.json").write_text(json.dumps({"status": status}))
    else:
        (run / "record").mkdir()
    said = "its run has ended" if status == "failed" else "look again in a while, or name their processes with --pid"
    with pytest.raises(UsageError, match=said):
        gather([run])


def test_a_folder_that_is_no_runs_is_not_said_to_start(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt_0").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no evidence that is known here: name one of its folders"):
        gather([tmp_path / "logs"])


@pytest.mark.parametrize(
    ("left", "said"),
    [(9.0, "the clock, in 9 s"), (3 * 86400.0, "the clock, in 3 days"), (36e6, "the clock, in over 100 days"),
     (None, "the clock")],
)  # fmt: skip
def test_a_limit_that_stands_for_none_has_no_figure(
    left: float | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "remaining", lambda _: left)
    assert threads._clock(tmp_path) == said


def test_a_limit_on_the_clock_of_a_container_is_not_known(tmp_path: Path) -> None:
    """A process in a time namespace of its own (time_namespaces(7)) counts from another moment."""
    task = tmp_path / "71" / "task" / "71"
    (tmp_path / "71" / "ns").mkdir(parents=True)
    task.mkdir(parents=True)
    now = 1_000_000.0
    for own, known in ((os.readlink("/proc/self/ns/time"), True), ("time:[1]", False)):
        (tmp_path / "71" / "ns" / "time").unlink(missing_ok=True)
        (tmp_path / "71" / "ns" / "time").symlink_to(own)
        # futex(FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG) with an absolute limit at address 0x10.
        (task / "syscall").write_text("202 0x55 0x89 0x0 0x10 0x0 0xffffffff 0x7f 0x7f\n")
        (task / "mem").write_bytes(bytes(16) + struct.pack("=qq", int(now * 100), 0))
        assert (timed.remaining(task, "x86_64") is not None) is known


def test_a_rank_that_failed_is_blamed_for_a_group_that_no_line_names_on_a_condition(tmp_path: Path) -> None:
    """Rank 2 is number 1 of that group: nothing says that rank 1, which ran out of memory, belongs to it."""
    line = (
        "[rank{0}]:[E1130 10:00:00.0] [Rank {1}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
        " OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600009 milliseconds before timing out.\n"
    )
    trace = "[rank1]: Traceback (most recent call last):\n"
    trace += '[rank1]:   File "t.py", line 3, in step\n[rank1]: KeyError: 4\n'
    (tmp_path / "job.log").write_text(line.format(0, 0) + line.format(2, 1) + trace)
    verdict = diagnose_found(gather([tmp_path / "job.log"])).verdict
    assert (verdict.cls, verdict.certainty, verdict.ranks) == (Class.EXCEPTION, Certainty.CONDITIONAL, (1,))
    assert "rank 1 belongs to the group of these calls, which the log does not say" in verdict.condition


@REAL
def test_a_process_that_moved_since_its_record_was_read_is_not_looked_at(tmp_path: Path) -> None:
    """What it does now, and what the record that was read shows of it, are of two moments."""
    rank = Rank(tmp_path, 0, ago_s=0.0)
    group = rank.group("default_pg", 0, 1)
    rank.over(rank.call(group))
    found = RecordReader().read(tmp_path)
    look = look_at([str(tmp_path)], [], found)
    assert look([0]).keys() == {0}
    call = rank.call(group)
    assert look([0]) == {}
    rank.wait(call)
    assert look_at([str(tmp_path)], [], RecordReader().read(tmp_path))([0]).keys() == {0}
