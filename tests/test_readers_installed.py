"""Records of other people's programs, written by hand: what the reader and the diagnosis make of each situation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.record import Kind, Recorder, read, ring_path
from kernel.record.foreign import LEAVES, PROGRAM, Call, Group
from verify.blame import Certainty, Class
from verify.events import Kind as What
from verify.events import Site
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import as_text
from verify.readers.found import Stack
from verify.readers.gather import merge
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from verify.hang.diagnosis import Diagnosis

PROGRAM_LINE = "train.py:7 step"


class Rank:
    """The ring of one rank. ago_s: when everything in it happened."""

    def __init__(self, out: Path, rank: int, size: int = 2, ago_s: float = 60.0, capacity: int = 1000) -> None:
        self.rank = rank
        self.recorder = Recorder(
            ring_path(out, rank), rank=rank, groups={}, meta={"program": PROGRAM, "size": size}, capacity=capacity,
            clock=lambda: time.monotonic_ns() - int(ago_s * 1e9),
        )  # fmt: skip
        self._groups = count(1)
        self._numbers: dict[Any, int] = {}

    def group(self, name: str, *ranks: int, base: int = 0, certain: bool = True) -> Group:
        made = Group(next(self._groups), name, ranks, "gloo", base, certain)
        self.recorder.site(made.text())
        return made

    def call(
        self, group: Group, op: str = "all_reduce", size: int = 4, line: int = 7,
        ins: tuple[int, ...] = (), outs: tuple[int, ...] = (), **more: Any,
    ) -> int:  # fmt: skip
        call = Call(op, dtype="float32", ins=len(ins) or 1, outs=len(outs) or 1, **{"medium": "gloo", **more})
        key = (group.number, call.peer, call.op if call.peer is not None else "")
        number = self._numbers[key] = self._numbers.get(key, group.base if call.peer is None else 0) + 1
        if ins:
            self.recorder.sizes(group.number, number, ins, Kind.INPUTS)
        if outs:
            self.recorder.sizes(group.number, number, outs, Kind.OUTPUTS)
        return self.recorder.event(
            Kind.CALL, group=group.number, seq=number, round_=sum(outs) or size, epoch=0, a=sum(ins) or size,
            b=self.recorder.site(call.text()), site=self.recorder.site(f"train.py:{line} step"),
        )  # fmt: skip

    def wait(self, number: int) -> None:
        self.recorder.event(Kind.CALL_WAIT, epoch=0, a=number)

    def done(self, number: int, why: str = "", source: int = -1) -> None:
        self.recorder.event(Kind.CALL_DONE, seq=source, epoch=0, a=number, b=self.recorder.site(why))

    def over(self, *calls: int) -> None:
        for number in calls:
            self.wait(number)
            self.done(number)

    def text(self, kind: Kind, text: str, a: int = 0) -> None:
        self.recorder.event(kind, epoch=0, a=a, b=self.recorder.site(text), site=self.recorder.site(PROGRAM_LINE))


def told(out: Path, patience_s: float = 5.0) -> Diagnosis:
    return diagnose_found(RecordReader(patience_s).read(out))


def pair(out: Path, ago_s: float = 60.0, size: int = 2) -> list[tuple[Rank, Group]]:
    ranks = [Rank(out, rank, size, ago_s) for rank in range(size)]
    return [(rank, rank.group("world", *range(size))) for rank in ranks]


@pytest.mark.parametrize(("ago_s", "code"), [(60.0, 1), (0.0, 3)])
def test_a_rank_that_moved_a_moment_ago_may_yet_come(tmp_path: Path, ago_s: float, code: int) -> None:
    """A healthy job, seen in the middle of a step."""
    (one, group), (other, same) = pair(tmp_path, ago_s)
    for rank, mine in ((one, group), (other, same)):
        rank.over(rank.call(mine))
    one.wait(one.call(group))
    found = told(tmp_path)
    assert found.code == code
    if code == 3:
        assert "rank 1 moved a moment ago and may yet come" in found.verdict.say
        assert found.verdict.certainty is Certainty.UNDECIDED
    else:
        assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (1,))


@pytest.mark.parametrize(("ago_s", "code"), [(60.0, 1), (0.0, 3)])
def test_all_in_one_call_is_a_fault_below_only_if_it_lasts(tmp_path: Path, ago_s: float, code: int) -> None:
    for rank, group in pair(tmp_path, ago_s):
        rank.wait(rank.call(group))
    found = told(tmp_path)
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (code, Class.BELOW, ())


def test_two_open_calls_in_opposite_order_without_a_wait_are_no_cycle(tmp_path: Path) -> None:
    """On gloo each call is its own; on a device two asynchronous ones of two groups are in two queues."""
    for medium in ("gloo", "nccl"):
        out = tmp_path / medium
        for rank in (0, 1):
            made = Rank(out, rank)
            groups = [made.group(name, 0, 1) for name in ("a", "b")]
            for group in groups if rank == 0 else groups[::-1]:
                made.call(group, asynchronous=True, medium=medium, stream="" if medium == "gloo" else "stream 1")
        found = told(out).verdict
        assert (found.cls, found.certainty) != (Class.CYCLE, Certainty.CERTAIN)


def test_a_call_between_an_asynchronous_one_and_its_wait_is_not_behind_it(tmp_path: Path) -> None:
    """r0: A later, B, join A; r1: B, A. Both streams go on, and both meet."""
    for rank in (0, 1):
        made = Rank(tmp_path, rank)
        a, b = made.group("a", 0, 1), made.group("b", 0, 1)
        if rank == 0:
            later = made.call(a, asynchronous=True, medium="nccl", stream="stream 1")
            made.call(b, medium="nccl", stream="stream 1")
            made.recorder.event(Kind.JOINED, epoch=0, a=later, b=made.recorder.site("stream 1"))
        else:
            made.call(b, medium="nccl", stream="stream 1")
            made.call(a, medium="nccl", stream="stream 1")
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty) != (Class.CYCLE, Certainty.CERTAIN)


def test_an_exception_of_a_call_is_told_from_its_cause(tmp_path: Path) -> None:
    (one, group), (other, same) = pair(tmp_path)
    number = one.call(group)
    one.wait(number)
    one.done(number, "RuntimeError: Connection closed by peer")
    one.text(Kind.EXCEPTION, "RuntimeError: Connection closed by peer", a=number + 1)
    other.text(Kind.EXCEPTION, "ValueError: bad batch")
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.EXCEPTION, (1,))
    assert "ValueError: bad batch" in found.verdict.say
    assert same.number == group.number


def test_an_exception_that_nobody_explains_is_the_fault(tmp_path: Path) -> None:
    (one, group), (other, same) = pair(tmp_path)
    number = one.call(group)
    one.done(number, "RuntimeError: no memory")
    one.text(Kind.EXCEPTION, "RuntimeError: no memory", a=number + 1)
    other.over(other.call(same))
    other.wait(other.call(same))
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.EXCEPTION, (0,))


@pytest.mark.parametrize("sent", [0, 1])
def test_a_recv_from_anybody_waits_for_one_of_all(tmp_path: Path, sent: int) -> None:
    """Rank 0 waits for whoever sends first; rank 1 waits for rank 0, and rank 2 computes, or has sent."""
    ranks = pair(tmp_path, size=3)
    (zero, world), (one, same), (two, its) = ranks
    zero.wait(zero.call(world, "recv", peer=-1, tag="0"))
    one.wait(one.call(same))
    if sent:
        two.wait(two.call(its, "send", peer=0, tag="0"))
    found = told(tmp_path)
    if sent:
        assert found.verdict.cls is not Class.CYCLE
    else:
        assert found.verdict.cls is Class.MISSING
        assert 2 in found.verdict.ranks


def test_splits_that_do_not_fit_though_their_sums_do(tmp_path: Path) -> None:
    plans = {0: ((1, 2, 3), (1, 4, 2)), 1: ((4, 1, 1), (2, 1, 1)), 2: ((3, 1, 0), (3, 1, 0))}
    for rank, group in pair(tmp_path, size=3):
        ins, outs = plans[rank.rank]
        rank.wait(rank.call(group, "all_to_all", ins=ins, outs=outs))
    found = told(tmp_path)
    assert (found.code, found.verdict.cls) == (1, Class.MISMATCH)
    assert "rank 2 sends 3 elements to rank 0, which expects 2" in found.verdict.say


@pytest.mark.parametrize("other", [{"root": 1}, {"reduce": "MAX"}, {"op": "broadcast"}])
def test_arguments_that_differ(tmp_path: Path, other: dict[str, Any]) -> None:
    for rank, group in pair(tmp_path, size=3):
        rank.wait(rank.call(group, **{"op": "reduce", "root": 0, "reduce": "SUM", **(other if rank.rank == 2 else {})}))
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISMATCH, (2,))


def test_ranks_that_began_at_different_places_are_not_compared(tmp_path: Path) -> None:
    """gloo's own count holds sends too, so that two counts that differ say nothing about collectives."""
    one, other = Rank(tmp_path, 0), Rank(tmp_path, 1)
    one.wait(one.call(one.group("world", 0, 1, base=7, certain=False)))
    other.wait(other.call(other.group("world", 0, 1, base=9, certain=False)))
    found = told(tmp_path)
    assert found.verdict.certainty is Certainty.UNDECIDED
    assert found.verdict.ranks == () or found.code == 3


def test_the_same_record_twice_is_one(tmp_path: Path) -> None:
    """As where a run's directory and the pids of its ranks are both given."""
    (one, group), (_, _) = pair(tmp_path)
    one.over(one.call(group, "send", peer=1, tag="0"))
    one.wait(one.call(group))
    found = RecordReader().read(tmp_path)
    twice = merge([found, found])
    assert twice.events == found.events
    assert diagnose_found(twice).verdict == diagnose_found(found).verdict


def test_a_ring_that_has_wrapped_keeps_its_numbers(tmp_path: Path) -> None:
    for rank in (0, 1):
        made = Rank(tmp_path, rank, capacity=64)
        group = made.group("world", 0, 1)
        for _ in range(200 + 3 * rank):  # they have lost different calls
            made.over(made.call(group))
        if rank == 0:
            for _ in range(3):
                made.over(made.call(group))
        made.wait(made.call(group))
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.BELOW, ())
    assert "call 204 on world" in found.verdict.say


def test_no_python_for_a_while_means_that_a_thread_holds_the_lock(tmp_path: Path) -> None:
    (one, group), (other, _) = pair(tmp_path)
    one.wait(one.call(group))
    other.text(Kind.DECISION, "starts")
    other.recorder.beat()  # a minute ago
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.OUTSIDE, (1,))
    assert "interpreter lock" in found.verdict.say
    assert any("it decided last: starts" in line for line in found.verdict.chain)


def test_a_ring_without_these_events_still_reads(tmp_path: Path) -> None:
    """Rings of an earlier version have no beat, and their strings name no groups."""
    recorder = Recorder(ring_path(tmp_path, 0), rank=0, groups={"P.TP": (0, 1)})
    recorder.event(Kind.ENQUEUE, "P", "P", recorder.group("P.TP"), 1, a=4, b=recorder.site("AR"))
    recording = read(recorder.path)
    assert recording.beat_ns is None
    assert [event.kind for event in recording.events] == [Kind.ENQUEUE]
    assert [event.kind for event in RecordReader().read(recorder.path).events] == [What.COLLECTIVE]


def test_no_call_open_is_no_all_clear_while_ranks_live(tmp_path: Path) -> None:
    """They may be in a collective that torch makes below the record, or in a lock of their own."""
    ranks = pair(tmp_path)  # held: a ring that nobody maps is of a process that is gone
    for rank, group in ranks:
        rank.over(rank.call(group))
    found = told(tmp_path)
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (3, Class.NONE, ())
    assert "no call is open, and what ranks 0 and 1 do is not in the record" in found.verdict.say


def test_ranks_that_ended_in_order_are_an_all_clear(tmp_path: Path) -> None:
    for rank, group in pair(tmp_path):
        rank.over(rank.call(group))
        rank.recorder.close()
    found = told(tmp_path)
    assert (found.code, found.verdict.certainty) == (0, Certainty.CERTAIN)


@pytest.mark.parametrize(("ago_s", "code"), [(600.0, 1), (20.0, 3)])
def test_a_rank_that_has_recorded_nothing_may_be_on_its_way(tmp_path: Path, ago_s: float, code: int) -> None:
    """Rank 1 loads its data before it joins the default group."""
    one = Rank(tmp_path, 0)
    group = one.group("world", 0, 1)
    one.wait(one.call(group))
    empty = Rank(tmp_path, 1, ago_s=ago_s)
    assert not read(empty.recorder.path).events
    found = told(tmp_path)
    assert found.code == code
    expected = (Certainty.UNDECIDED, ()) if code == 3 else (Certainty.CONDITIONAL, (1,))
    assert (found.verdict.certainty, found.verdict.ranks) == expected


@pytest.mark.parametrize("open_", [False, True])
def test_a_rank_that_may_be_running_is_missing_only_if_it_never_comes(tmp_path: Path, open_: bool) -> None:
    """The main process does the work first, and the others wait; it may have an asynchronous call open."""
    ranks = pair(tmp_path, size=3)
    for rank, group in ranks:
        other = rank.group("other", 0, 1, 2)
        if rank.rank == 0:
            rank.over(rank.call(group))
            if open_:
                rank.call(other, asynchronous=True)
        else:
            rank.over(rank.call(group))
            rank.wait(rank.call(group))
    found = told(tmp_path)
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (1, Class.MISSING, (0,))
    assert found.verdict.certainty is Certainty.CONDITIONAL
    assert found.condition == "rank 0 does not come after all"
    assert "blocked" not in found.verdict.say
    assert "returning early" not in found.verdict.fix
    assert any("its main thread runs" in line for line in found.verdict.chain)


def test_a_rank_that_is_blocked_outside_stays_certain(tmp_path: Path) -> None:
    (one, group), (other, same) = pair(tmp_path)
    one.over(one.call(group))
    one.wait(one.call(group))
    other.over(other.call(same))
    sleeps = Stack(1, "MainThread", (Site("[kernel]", 0, "pipe_read"), Site("train.py", 9, "step")))
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=(sleeps,)))
    assert (found.verdict.certainty, found.verdict.ranks) == (Certainty.CERTAIN, (1,))


def test_a_collective_that_torch_makes_below_the_record_is_named(tmp_path: Path) -> None:
    """Rank 0 builds DDP, rank 1 never does, and sleeps."""
    ranks = pair(tmp_path)
    for rank, group in ranks:
        rank.over(rank.call(group))
    builds = Site("/x/site-packages/torch/distributed/utils.py", 9, "_verify_param_shape_across_processes")
    sleeps = Site("[kernel]", 0, "hrtimer_nanosleep")
    stacks = [Stack(n, "MainThread", (inner, Site("train.py", 7, "step"))) for n, inner in enumerate((builds, sleeps))]
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=tuple(stacks)))
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "rank 0 is in _verify_param_shape_across_processes at train.py:7" in found.verdict.say
    assert "nobody waits" not in found.verdict.say


def lost(out: Path, leave: Any) -> Diagnosis:
    """Rank 0 waits in a call that rank 1 has not made when it left."""
    one, other = Rank(out, 0), Rank(out, 1)
    for rank in (one, other):
        group = rank.group("world", 0, 1)
        rank.over(rank.call(group))
    one.wait(one.call(Group(1, "world", (0, 1), "gloo", 0, True)))
    leave(other)
    return told(out)


def test_a_rank_that_returned_is_missing(tmp_path: Path) -> None:
    found = lost(tmp_path, lambda rank: rank.recorder.close()).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CERTAIN, (1,))
    assert "instead of returning early" in found.fix


def test_a_rank_that_left_by_an_exit_code_says_so(tmp_path: Path) -> None:
    def leave(rank: Rank) -> None:
        rank.text(Kind.DECISION, f"{LEAVES}fatal: config 7 missing")
        rank.recorder.close()

    found = lost(tmp_path, leave).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (1,))
    assert "rank 1, which left by SystemExit: fatal: config 7 missing at train.py:7" in found.say


def test_an_exit_that_somebody_caught_is_none(tmp_path: Path) -> None:
    def leave(rank: Rank) -> None:
        rank.text(Kind.DECISION, f"{LEAVES}1")
        rank.over(rank.call(rank.group("alone", 1)))
        rank.recorder.close()

    assert lost(tmp_path, leave).verdict.cls is Class.MISSING


@pytest.mark.parametrize(
    ("how", "reaped", "said"),
    [
        ("os.kill(os.getpid(), 9)", False, "being killed by SIGKILL (by hand, or by the OOM killer)"),
        ("os._exit(3)", False, "os._exit with exit code 3"),
        ("os._exit(3)", True, "being killed, or by os._exit: its record was not closed"),
    ],
)
def test_a_rank_that_is_gone_did_not_return(tmp_path: Path, how: str, reaped: bool, said: str) -> None:
    """Until its parent asks, Linux keeps how a process ended."""

    def leave(rank: Rank) -> None:
        code = (
            "import os, pathlib, sys, tests.test_readers_installed as it;"
            "rank = it.Rank(pathlib.Path(sys.argv[1]), 1, ago_s=0);"
            f"rank.over(rank.call(rank.group('world', 0, 1))); {how}"
        )
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent)
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        children.append(process)

    children: list[subprocess.Popen[bytes]] = []
    try:
        found = lost(tmp_path, leave).verdict
    finally:
        for child in children:
            child.wait()
    assert (found.cls, found.ranks) == (Class.EXCEPTION, (1,))
    assert f"rank 1, which left by {said}" in found.say
    assert found.fix.startswith("Look at why that rank left")


def test_a_rank_that_raised_comes_before_those_that_were_killed_after_it(tmp_path: Path) -> None:
    ranks = pair(tmp_path, size=3)
    ranks[0][0].text(Kind.EXCEPTION, "ValueError: bad batch")
    ranks[1][0].wait(ranks[1][0].call(ranks[1][1]))
    del ranks[2]  # its ring is of no process any more
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.EXCEPTION, (0,))


def test_what_is_undecided_blames_nobody(tmp_path: Path) -> None:
    """Rank 1 has finished what rank 0 waits in, a moment ago."""
    ranks = pair(tmp_path, ago_s=0.0)
    for rank, group in ranks:
        number = rank.call(group)
        rank.wait(number)
        if rank.rank == 1:
            rank.done(number)
            rank.wait(rank.call(rank.group("other", 1)))
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.certainty) == (Class.DEVICE_STALL, Certainty.UNDECIDED)
    assert found.verdict.ranks == ()
    assert found.to_dict()["ranks"] == []
    assert ">" not in as_text(found)


@pytest.mark.parametrize(
    ("inner", "certain"),
    [
        ((), True),
        ((("/x/site-packages/torch/_ops.py", "__call__"),), True),
        ((("<frozen importlib._bootstrap_external>", "_path_stat"), ("/x/torch/_dynamo/a.py", "go")), False),
    ],
)
def test_a_call_that_a_stack_is_below_is_waited_for_only_by_torch(
    tmp_path: Path, inner: tuple[tuple[str, str], ...], certain: bool
) -> None:
    """A functional all_reduce is made, not waited for, and then imports what traces it."""
    ranks = pair(tmp_path)
    for rank, group in ranks:
        rank.call(group, asynchronous=True)
    inside = [*inner, ("/x/site-packages/torch/distributed/_functional_collectives.py", "all_reduce")]
    frames = (*(Site(file, 9, name) for file, name in inside), Site("train.py", 7, "step"))
    stacks = tuple(Stack(rank, "MainThread", frames) for rank in (0, 1))
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=stacks)).verdict
    assert (found.cls is Class.BELOW and found.certainty is Certainty.CERTAIN) is certain


def test_a_rank_that_is_gone_is_named_though_nobody_waits_for_it(tmp_path: Path) -> None:
    ranks = pair(tmp_path)
    for rank, group in ranks:
        rank.over(rank.call(group))
    del ranks[1], rank  # its ring is of no process any more
    found = told(tmp_path)
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "no call is open that waits for rank 1, which left by being killed, or by os._exit" in found.verdict.say
