"""What a report tells to do: what helps there, and not what has been done; and sentences that say what is so."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernel.record import Kind
from kernel.record.foreign import UNINSTALLED
from tests.installed_rings import pair
from tests.test_hang_moving import COLLECTIVE, LINE, main, told
from verify import words
from verify.blame import Class
from verify.events import KERNEL, Site
from verify.hang.case import Case
from verify.hang.diagnosis import diagnose_found
from verify.hang.stacks import At, places
from verify.readers.found import Found, Stack
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from pathlib import Path

BACKWARD = Site("/lib/python3.11/site-packages/torch/autograd/graph.py", 1, "_engine_run_backward")
NATIVE = Site("libtorch_cpu.so", 1, "c10::Something::waits")
STOPPED = Site(KERNEL, 0, "do_signal_stop")
OUTSIDE = Site("/lib/python3.11/threading.py", 1, "Event.wait")


def idle(out: Path) -> None:
    """Two ranks whose records show nothing open."""
    for rank, group in pair(out):
        rank.over(rank.call(group))


@pytest.mark.parametrize(
    ("frames", "has", "lacks"),
    [
        ([(OUTSIDE, LINE)], ["turnstile hang --pid"], []),
        ([(OUTSIDE, LINE)] * 2, ["py-spy dump --native", "rank0.txt"], ["turnstile hang --pid", "record"]),
        ([(NATIVE, OUTSIDE, LINE)] * 2, ["Look again after a while."], ["--native", "turnstile hang --pid", "record"]),
        ([(STOPPED, LINE)] * 2, ["kill -CONT 70 71"], ["Look again after"]),
    ],
)
def test_what_is_here_is_not_asked_for(
    frames: list[tuple[Site, ...]], has: list[str], lacks: list[str], tmp_path: Path
) -> None:
    idle(tmp_path)
    stacks = [replace(main(rank, *each), pid=70 + rank) for rank, each in enumerate(frames)]
    found = told(tmp_path, *stacks)
    assert found.code == 3
    assert all(part in found.verdict.fix for part in has), found.verdict.fix
    assert not any(part in found.verdict.fix for part in lacks), found.verdict.fix


def test_stacks_alone_lack_a_record_and_dumps() -> None:
    stacks = tuple(main(rank, BACKWARD, LINE) for rank in (0, 1))
    fix = diagnose_found(Found("stacks", stacks=stacks)).verdict.fix
    assert "record of the next run" in fix.replace(" (turnstile.record.install)", "")
    assert "dumps of all ranks" in fix
    assert "turnstile hang --pid" not in fix


def test_stacks_of_no_rank_are_to_be_named() -> None:
    stacks = (Stack(None, "MainThread", (OUTSIDE, LINE), pid=7),)
    assert "rank0.txt" in diagnose_found(Found("stacks", stacks=stacks)).verdict.fix


def test_a_rank_that_is_stopped_and_keeps_others_is_to_be_let_go_on(tmp_path: Path) -> None:
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    found = told(tmp_path, main(0, COLLECTIVE, LINE), replace(main(1, STOPPED, LINE), pid=71)).verdict
    assert (found.cls, found.ranks) == (Class.OUTSIDE, (1,))
    assert "kill -CONT 71" in found.fix


def test_of_a_thread_that_raised_its_exception_is_to_be_read(tmp_path: Path) -> None:
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    second.thread(3).text(Kind.EXCEPTION, "ValueError: boom in thread")
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (1,))
    assert found.fix == words.THREAD


@pytest.mark.parametrize(("op", "first", "second"), [("recv", "receives", "sends"), ("send", "sends", "receives")])
def test_a_ring_of_ranks_that_all_begin_alike_is_not_told_to_take_one_order(
    op: str, first: str, second: str, tmp_path: Path
) -> None:
    made = pair(tmp_path, size=3)
    for number, (rank, group) in enumerate(made):
        rank.wait(rank.call(group, op, peer=(number + (1 if op == "send" else -1)) % 3))
    found = told(tmp_path).verdict
    assert found.cls is Class.CYCLE
    assert f"each {first} before it {second}" in found.fix
    assert "one order" not in found.fix


def test_a_ring_of_collectives_is_told_to_take_one_order(tmp_path: Path) -> None:
    made = pair(tmp_path)
    for number, (rank, _) in enumerate(made):
        groups = rank.group("P", 0, 1), rank.group("D", 0, 1)
        rank.wait(rank.call(groups[number]))
    assert told(tmp_path).verdict.fix == words.FIXES["cycle"]


def test_each_rank_outside_of_calls_is_told_where_it_is(tmp_path: Path) -> None:
    idle(tmp_path)
    say = told(tmp_path, main(0, OUTSIDE, LINE), main(1, OUTSIDE, Site("data.py", 3, "load"))).verdict.say
    assert "rank 0 is in Event.wait at train.py:7 in step" in say
    assert "rank 1 is in Event.wait at data.py:3 in load" in say


def test_the_wait_of_a_functional_collective_is_a_call(tmp_path: Path) -> None:
    inner = (
        Site("/lib/python3.11/site-packages/torch/_ops.py", 1, "OpOverloadPacket.__call__"),
        Site("/lib/python3.11/site-packages/torch/distributed/_functional_collectives.py", 9, "wait_tensor"),
    )
    assert places([main(0, *inner, LINE)])[0].at is At.CALL
    stacks = (main(0, *inner, LINE), main(1, OUTSIDE, Site("data.py", 3, "load")))
    found = diagnose_found(Found("stacks", stacks=stacks)).verdict
    assert found.ranks == (1,)


def test_records_that_were_ended_are_no_dumps(tmp_path: Path) -> None:
    for rank, group in pair(tmp_path):
        rank.over(rank.call(group))
        rank.text(Kind.MARK, UNINSTALLED)
        rank.recorder.close()
    found = told(tmp_path)
    assert "only a record that was ended from ranks 0 and 1" in found.verdict.say
    assert "no dump" not in found.verdict.say
    assert Case.of(RecordReader(5.0).read(tmp_path), True).absent == [0, 1]
