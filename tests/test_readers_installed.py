"""Records of other people's programs, written by hand: what the reader and the diagnosis make of each situation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kernel.record import Kind, Recorder, read, ring_path
from tests.installed_rings import Rank, pair, told
from verify.blame import Certainty, Class
from verify.events import Kind as What
from verify.events import Site
from verify.hang.diagnosis import diagnose_found
from verify.hang.text import timetable
from verify.readers.found import Stack
from verify.readers.gather import merge
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.record.foreign import Group


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
    # It moved a moment ago: it may yet call something.
    assert [event.kind for event in RecordReader().read(recorder.path).events] == [What.COLLECTIVE, What.WAIT]


def threaded(out: Path, names: str = "abcd") -> list[tuple[Rank, list[Group]]]:
    """Two ranks with groups of both."""
    ranks = [Rank(out, rank) for rank in range(2)]
    return [(rank, [rank.group(name, 0, 1) for name in names]) for rank in ranks]


@pytest.mark.parametrize("seen", [False, True], ids=["new group", "that thread called it before"])
def test_threads_that_wait_for_threads_that_compute_are_no_cycle(tmp_path: Path, seen: bool) -> None:
    """Rank 0's thread waits for rank 1's, and rank 1's main thread for rank 0's main thread; both compute."""
    (zero, (a, b, *_)), (one, (c, d, *_)) = threaded(tmp_path)
    for rank, own, main in ((zero, a, b), (one, c, d)):
        rank.over(rank.call(main))
        if seen:
            rank.thread(1).over(rank.call(own))
            rank.thread(0)
    zero.thread(1).wait(zero.call(a))
    one.wait(one.call(d))
    found = told(tmp_path).verdict
    # Whether they compute or wait for their own threads, the record does not tell.
    assert (found.cls, found.certainty, found.ranks) == (Class.CYCLE, Certainty.UNDECIDED, ())
    assert "rank 0 (main thread)" in found.say or "the main thread of rank 0" in found.say
    assert any("call 2 on b" in line for line in found.chain)


def test_threads_that_all_wait_for_each_other_are_a_cycle(tmp_path: Path) -> None:
    """As each thread made the earlier calls of its group, it may be the one that would make the next one; it is no more
    than that as long as another thread may come.
    """
    (zero, (a, b, *_)), (one, (c, d, *_)) = threaded(tmp_path)
    for rank, own, main in ((zero, a, b), (one, c, d)):
        rank.over(rank.call(main))
        rank.thread(1).over(rank.call(own))
        rank.thread(0)
    zero.wait(zero.call(a))  # which rank 1's thread does not call, as it waits in b
    one.thread(1).wait(one.call(d))  # which rank 0's main thread does not call
    assert told(tmp_path).verdict.certainty is Certainty.UNDECIDED
    found = told(tmp_path, closed=True).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.CYCLE, Certainty.CERTAIN, (0, 1))


def test_a_ring_that_another_thread_may_open_is_on_that_condition(tmp_path: Path) -> None:
    """Nobody has called these groups before, and there are threads: of one that was not seen yet nothing is known."""
    (zero, (a, b, *_)), (one, (c, d, *_)) = threaded(tmp_path)
    zero.wait(zero.call(a))
    zero.thread(1).wait(zero.call(a))
    one.wait(one.call(d))
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty) == (Class.CYCLE, Certainty.CONDITIONAL)
    assert "no thread of ranks 0 and 1 that made no call so far" in found.condition
    assert (b.number, c.number) == (2, 1)


@pytest.mark.parametrize("own", [False, True], ids=["autograd", "own"])
def test_threads_of_autograd_work_for_the_main_one(tmp_path: Path, own: bool) -> None:
    """They made the earlier calls, and make none while the main thread waits; another thread may go on."""
    (zero, (a, b, *_)), (one, (c, d, *_)) = threaded(tmp_path)
    for rank, mine, other in ((zero, a, b), (one, c, d)):
        rank.thread(1, "loop" if own else "Dummy-3")
        rank.over(rank.call(mine))
        rank.over(rank.call(other))
        rank.thread(0)
    zero.wait(zero.call(a))
    one.wait(one.call(d))
    assert (told(tmp_path).verdict.certainty is Certainty.CERTAIN) is not own
    assert told(tmp_path, closed=True).verdict.cls is Class.CYCLE


@pytest.mark.parametrize("first", [False, True], ids=["main called it before", "nobody did"])
def test_a_thread_that_died_is_the_fault_if_the_call_was_its_own(tmp_path: Path, first: bool) -> None:
    """The same thread makes the call on the other rank."""
    (zero, (a, b, *_)), (one, (c, d, *_)) = threaded(tmp_path)
    for rank, group, other in ((zero, a, b), (one, c, d)):
        rank.over(rank.call(other if first else group))
    zero.thread(1).wait(zero.call(a))
    one.thread(1).text(Kind.EXCEPTION, "RuntimeError: no shard 7")
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.EXCEPTION, (1,))
    assert "RuntimeError: no shard 7" in found.say
    assert sum("no shard 7" in line for line in found.chain) == 1


def test_a_thread_that_died_is_told_where_the_call_was_not_its_own(tmp_path: Path) -> None:
    (zero, (a, *_)), (one, (c, *_)) = threaded(tmp_path)
    for rank, group in ((zero, a), (one, c)):
        rank.over(rank.call(group))
    zero.wait(zero.call(a))
    one.thread(1, "logger").text(Kind.EXCEPTION, "RuntimeError: disk full")
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (1,))
    assert any("thread logger ended by RuntimeError: disk full" in line for line in found.chain)


def test_a_main_thread_that_raised_left_though_its_process_stays(tmp_path: Path) -> None:
    """A thread keeps it; its main thread's stack is in the interpreter's end."""
    (zero, (a, *_)), (one, (c, *_)) = threaded(tmp_path)
    zero.over(zero.call(a))
    zero.wait(zero.call(a))
    one.over(one.call(c))
    one.thread(1).over(one.call(c, "send", peer=0, tag="0"))
    one.thread(0).text(Kind.EXCEPTION, "RuntimeError: main died")
    frames = (Site("/usr/lib/python3.11/threading.py", 1553, "_shutdown"),)
    found = replace(RecordReader().read(tmp_path), stacks=(Stack(1, "MainThread", frames),))
    verdict = diagnose_found(found).verdict
    assert (verdict.cls, verdict.ranks) == (Class.EXCEPTION, (1,))
    assert "main died" in verdict.say


@pytest.mark.parametrize("op", ["recv", "all_reduce"])
@pytest.mark.parametrize("waits", [False, True])
def test_an_open_call_that_nobody_waits_for_is_no_certain_fault(tmp_path: Path, op: str, waits: bool) -> None:
    """A prefetch: rank 1 asks early and computes; rank 0 computes too, and answers later."""
    (zero, world), (one, same) = pair(tmp_path)
    for rank, group in ((zero, world), (one, same)):
        rank.over(rank.call(group))
    number = one.call(same, op, asynchronous=True, **({"peer": 0, "tag": "0"} if op == "recv" else {}))
    if waits:
        one.wait(number)
    found = told(tmp_path).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (0,))
    assert found.certainty is Certainty.CONDITIONAL
    assert "rank 0 does not come after all" in found.condition
    assert ("rank 1 needs what it has open: its record shows no wait" in found.condition) is not waits


def test_a_call_that_is_waited_for_comes_before_one_that_is_not(tmp_path: Path) -> None:
    """Rank 0 has left a call of rank 2 open, and rank 1 waits for rank 0, which computes."""
    ranks = pair(tmp_path, size=3)
    (zero, world), (one, same), (two, its) = ranks
    for rank, group in ranks:
        rank.over(rank.call(group))
    zero.call(world, "recv", peer=2, tag="0", asynchronous=True)
    one.wait(one.call(same, "recv", peer=0, tag="0"))
    found = told(tmp_path).verdict
    assert (found.cls, found.condition, found.ranks) == (Class.MISSING, "rank 0 does not come after all", (0,))
    assert (two.rank, its.number) == (2, 1)


def test_a_call_that_raised_is_not_finished(tmp_path: Path) -> None:
    """Rank 0 caught the exception of its call and goes on; rank 1 came later and waits in it."""
    (zero, world), (one, same) = pair(tmp_path)
    number = zero.call(world)
    zero.wait(number)
    zero.done(number, "RuntimeError: no memory")
    one.wait(one.call(same))
    diagnosis = told(tmp_path)
    found = diagnosis.verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (0,))
    assert "it failed on rank 0 at train.py:7 in step: RuntimeError: no memory" in found.say
    assert "failed" in "".join(timetable(diagnosis))
    assert "done" not in "".join(timetable(diagnosis))


def test_a_call_that_raised_before_the_others_came_is_told_as_failed(tmp_path: Path) -> None:
    (zero, world), (one, same) = pair(tmp_path)
    for rank, group in ((zero, world), (one, same)):
        rank.over(rank.call(group))
    number = zero.call(world)
    zero.wait(number)
    zero.done(number, "RuntimeError: no memory")
    found = told(tmp_path)
    assert found.code == 3
    assert "it failed on rank 0" in found.verdict.say
    assert "finished" not in found.verdict.say


@pytest.mark.parametrize("over", [False, True])
def test_calls_that_raised_everywhere_are_not_said_to_complete(tmp_path: Path, over: bool) -> None:
    for rank, group in pair(tmp_path):
        number = rank.call(group)
        rank.wait(number)
        rank.done(number, "RuntimeError: timed out")
        if over:
            rank.recorder.close()
    found = told(tmp_path)
    assert found.code == (0 if over else 3)
    assert "it failed on ranks 0 and 1 at train.py:7 in step: RuntimeError: timed out" in found.verdict.say
    assert "and completes" not in found.verdict.say


def test_a_prefetch_of_a_job_that_moves_is_not_decided(tmp_path: Path) -> None:
    """Stacks show both outside, for a moment."""
    (zero, world), (one, same) = pair(tmp_path, ago_s=0.0)
    zero.call(world, asynchronous=True)
    one.over(one.call(same, "send", peer=0, tag="0"))
    frames = (Site("time.py", 1, "sleep"), Site("train.py", 9, "step"))
    stacks = tuple(Stack(rank, "MainThread", frames) for rank in (0, 1))
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=stacks))
    assert (found.code, found.verdict.certainty) == (3, Certainty.UNDECIDED)


def test_the_line_is_that_of_the_thread_whose_call_it_is(tmp_path: Path) -> None:
    """And where the main thread stands is not where the rank does."""
    (zero, (a, *_)), (one, (c, *_)) = threaded(tmp_path)
    for rank, group in ((zero, a), (one, c)):
        rank.over(rank.call(group))
        rank.thread(1).over(rank.call(group, line=19))
    zero.wait(zero.call(a, line=20))
    frames = (Site("/usr/lib/python3.11/threading.py", 1119, "join"), Site("train.py", 40, "main"))
    stacks = tuple(Stack(rank, "MainThread", frames) for rank in (0, 1))
    found = diagnose_found(replace(RecordReader().read(tmp_path), stacks=stacks)).verdict
    assert found.ranks == (1,)
    assert "Rank 0 waits in all_reduce (call 3 on a) at train.py:20 in step" in found.say
    told_of = " ".join((found.say, *found.chain)).lower()
    assert "the main thread of rank 1 stands at train.py:40" in told_of


def test_in_a_ring_the_lines_are_those_of_the_threads_in_it(tmp_path: Path) -> None:
    (zero, (a, b, *_)), (one, (c, d, *_)) = threaded(tmp_path)
    for rank, own, main in ((zero, a, b), (one, c, d)):
        rank.thread(1).over(rank.call(own, line=19))
        rank.over(rank.call(main, line=19))
        rank.thread(0)
    zero.thread(1).wait(zero.call(a, line=20))
    zero.thread(0).over(zero.call(zero.group("e", 0), line=40))
    one.thread(1).wait(one.call(d, line=21))
    found = told(tmp_path, closed=True).verdict
    assert (found.cls, found.ranks) == (Class.CYCLE, (0, 1))
    assert "train.py:20" in found.say
    assert "train.py:21" in found.say
    assert "train.py:40" not in found.say


def test_calls_that_all_made_and_nobody_waits_for_are_no_fault(tmp_path: Path) -> None:
    """Their end was not seen, as the program has dropped what would tell it."""
    for rank, group in pair(tmp_path):
        rank.call(group, asynchronous=True)
    found = told(tmp_path)
    assert (found.code, found.verdict.ranks) == (3, ())
    assert "no call that is open lacks a member" in found.verdict.say


def test_a_rank_that_left_left_with_its_threads(tmp_path: Path) -> None:
    (zero, (a, *_)), (one, (c, *_)) = threaded(tmp_path)
    for rank, group in ((zero, a), (one, c)):
        rank.thread(1).over(rank.call(group))
        rank.thread(0)
    zero.thread(1).wait(zero.call(a))
    one.call(c, "recv", peer=0, tag="0", asynchronous=True)
    one.recorder.close()
    found = RecordReader().read(tmp_path)
    assert {event.thread for event in found.events if event.rank == 1 and event.calls} == {"", "Thread-1 (work)"}
    verdict = diagnose_found(found).verdict
    assert (verdict.cls, verdict.ranks) == (Class.MISSING, (1,))
    assert "rank 1, which has left" in verdict.say


def test_transfers_of_other_tags_are_told_apart(tmp_path: Path) -> None:
    (zero, world), (one, same) = pair(tmp_path)
    zero.wait(zero.call(world, "send", peer=1, tag="1"))
    one.wait(one.call(same, "recv", peer=0, tag="2"))
    found = told(tmp_path)
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISMATCH, ())
    heads = timetable(found)[1].split("transfer 1")[1:]
    assert [head.strip() for head in heads] == ["tag 1", "tag 2"]
