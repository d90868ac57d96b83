"""What the movement of threads and the stacks of ranks leave of a finding; creations of groups; who died first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.record import Kind
from kernel.record.foreign import members_of, members_text
from tests.fr_dumps import Recorder, save
from tests.installed_rings import Rank, pair
from verify.blame import Certainty, Class
from verify.events import Site
from verify.hang.diagnosis import diagnose_found
from verify.hang.stacks import At, places
from verify.live.outside import Outside
from verify.live.threads import Moves
from verify.matching import Host
from verify.readers import stacks
from verify.readers.found import Found, Stack
from verify.readers.gather import gather, merge
from verify.readers.record import RecordReader

if TYPE_CHECKING:
    from kernel.record.foreign import Group
    from verify.hang.diagnosis import Diagnosis

MEGATRON = Path(__file__).parent / "data" / "fr" / "megatron16"
COLLECTIVE = Site("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce")
LINE = Site("train.py", 7, "step")


def told(out: Path, *threads: Stack, now: dict[int, Moves] | None = None) -> Diagnosis:
    found = merge([RecordReader(5.0).read(out), Found("stacks", stacks=threads)])
    return diagnose_found(found, look=lambda ranks: {r: now[r] for r in ranks if r in now} if now else {})


def crossed(out: Path) -> list[Rank]:
    """Kept by who calls: a ring that nobody has mapped is that of a process that is gone."""
    ranks = [Rank(out, number) for number in (0, 1)]
    for number, rank in enumerate(ranks):
        one, other = rank.group("P", 0, 1), rank.group("D", 0, 1)
        rank.over(rank.call(one), rank.call(other))
        rank.wait(rank.call((one, other)[number]))
    return ranks


def main(rank: int, *frames: Site, awake: bool = False) -> Stack:
    return Stack(rank, "MainThread", frames, awake=awake)


# -- stacks that contradict a ring -----------------------------------------------------------------------------------


def test_stacks_in_the_calls_leave_a_ring_as_it_is(tmp_path: Path) -> None:
    ranks = crossed(tmp_path)
    found = told(tmp_path, main(0, COLLECTIVE, LINE), main(1, COLLECTIVE, LINE)).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.CYCLE, Certainty.CERTAIN, (0, 1)), ranks


@pytest.mark.parametrize("awake", [False, True])
def test_a_rank_that_stands_elsewhere_by_its_stack_waits_in_no_ring(awake: bool, tmp_path: Path) -> None:
    ranks = crossed(tmp_path)
    elsewhere = Site("/lib/python3.11/site-packages/numpy/core.py", 1, "dot")
    found = told(tmp_path, main(0, COLLECTIVE, LINE), main(1, elsewhere, Site("data.py", 3, "load"), awake=awake))
    assert (found.code, found.verdict.ranks) == (3, ()), ranks
    assert f"rank 1 {'runs' if awake else 'stands'} in dot at data.py:3 in load" in found.verdict.say
    assert "ranks 0 and 1 wait in a ring" in found.verdict.say


# -- waits that end by themselves ------------------------------------------------------------------------------------

SLEEPS = Moves(main="the clock, in 29 s", locked=False)
HELPED = Moves(others=("a thread that waits for the clock, in 9 s",))
ITSELF = Outside("pid 7 (x) writes nothing, which \0 reads", frozenset({7}))
NOBODY = Outside("nobody types")
PIPE = Moves(locked=False, pid=7, outside=Outside("pid 8 (x) writes nothing, which \0 reads", frozenset({8})))
LOOPS = Moves(locked=False, polls=True, others=("a thread that runs",))


@pytest.mark.parametrize(
    ("what", "now", "cls", "certainty", "why"),
    [
        ("Popen.wait", Moves(main="a child process", locked=False), Class.OUTSIDE, Certainty.CONDITIONAL, "child"),
        ("sleep", SLEEPS, Class.MISSING, Certainty.CONDITIONAL, "by the clock, in 29 s"),
        ("sleep", None, Class.MISSING, Certainty.CONDITIONAL, "when its sleep ends"),
        ("Event.wait", SLEEPS, Class.MISSING, Certainty.CONDITIONAL, "by the clock, in 29 s"),
        ("Event.wait", HELPED, Class.MISSING, Certainty.CONDITIONAL, "it has a thread that waits for the clock"),
        ("Event.wait", Moves(), Class.MISSING, Certainty.CERTAIN, ""),
        ("lock.acquire", Moves(), Class.MISSING, Certainty.CERTAIN, ""),
        ("Thread.join", HELPED, Class.MISSING, Certainty.CONDITIONAL, "it has a thread that waits for the clock"),
        ("EpollSelector.select", LOOPS, Class.OUTSIDE, Certainty.CONDITIONAL, "it has a thread that runs"),
        ("Event.wait", None, Class.MISSING, Certainty.CONDITIONAL, "does not come out of Event.wait"),
        ("FileIO.read", Moves(locked=False), Class.OUTSIDE, Certainty.CONDITIONAL, "does not come out of FileIO.read"),
        ("FileIO.read", PIPE, Class.OUTSIDE, Certainty.CONDITIONAL, "pid 8 (x) writes nothing, which rank 1 reads"),
        ("FileIO.read", PIPE._replace(outside=NOBODY), Class.OUTSIDE, Certainty.CONDITIONAL, "nobody types"),
        ("FileIO.read", PIPE._replace(outside=ITSELF), Class.OUTSIDE, Certainty.CERTAIN, ""),
        ("FileIO.read", PIPE._replace(outside=ITSELF, main="a signal that it catches (SIGUSR1)"), Class.OUTSIDE,
         Certainty.CONDITIONAL, "SIGUSR1"),
        ("socket.accept", PIPE._replace(outside=NOBODY, main="the clock, in 5 s"), Class.OUTSIDE,
         Certainty.CONDITIONAL, "the clock, in 5 s"),
        ("FileIO.read", PIPE._replace(outside=ITSELF, others=("a thread that runs",)), Class.OUTSIDE,
         Certainty.CONDITIONAL, "it has a thread that runs"),
    ],
)
def test_a_wait_that_ends_by_itself_convicts_nobody(
    what: str, now: Moves | None, cls: Class, certainty: Certainty, why: str, tmp_path: Path
) -> None:
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    inner = Site("/lib/python3.11/site-packages/x.py", 1, what)
    first.wait(first.call(one))
    found = told(tmp_path, main(1, inner, LINE), now={} if now is None else {1: now}).verdict
    assert (found.cls, found.certainty, found.ranks) == (cls, certainty, (1,))
    assert why in found.condition


@pytest.mark.parametrize(
    "inner",
    [
        (Site("/lib/python3.11/threading.py", 1590, "_shutdown"),),
        (Site("/lib/python3.11/threading.py", 1132, "Thread._wait_for_tstate_lock"), LINE),
        (Site("python3.11", 0, "PyThread_acquire_lock_timed"), LINE),
        (Site("/lib/python3.11/threading.py", 327, "Condition.wait"), LINE),
        (Site("/lib/python3.11/site-packages/x.py", 1, "sleep"), LINE),
    ],
    ids=lambda inner: inner[0].function,
)
def test_a_stack_gives_no_other_class_than_the_record_of_the_same_job(inner: tuple[Site, ...], tmp_path: Path) -> None:
    """It may make it more certain, if it shows that the wait lasts."""
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    bare = told(tmp_path, now={}).verdict
    for now, certainty in (({}, Certainty.CONDITIONAL), ({1: Moves()}, Certainty.CERTAIN)):
        found = told(tmp_path, main(1, *inner), now=now).verdict
        assert (found.cls, found.ranks) == (bare.cls, bare.ranks) == (Class.MISSING, (1,))
        if inner[0].function != "sleep":
            assert found.certainty is certainty
    if inner[0].function == "_shutdown":
        assert "in the join of its other threads after the end of its program" in found.say


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_a_pipe_that_only_who_waits_for_the_reader_could_write_to_stays_empty(
    moves: bool, both: bool, tmp_path: Path
) -> None:
    """Rank 0 has the other end, and waits in a call that lacks rank 1, which reads; both: pid 9 has it as well."""
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    reads = Moves(locked=False, pid=7, outside=Outside("\0 gets nothing", frozenset({8, 9} if both else {8})))
    waits = Moves(pid=8, others=("a thread that runs",) if moves else ())
    inner = Site("/lib/python3.11/site-packages/x.py", 1, "FileIO.read")
    found = told(tmp_path, main(1, inner, LINE), now={0: waits, 1: reads}).verdict
    ring = not (moves or both)
    assert (found.cls, found.ranks) == ((Class.CYCLE, (0, 1)) if ring else (Class.OUTSIDE, (1,)))
    assert (found.certainty is Certainty.CERTAIN) is ring
    assert not ring or "rank 1 gets nothing" in found.say
    # By its record alone, without its stack.
    bare = told(tmp_path, now={0: waits, 1: reads}).verdict
    assert (bare.cls, bare.certainty, bare.ranks) == (
        (Class.CYCLE, Certainty.CERTAIN, (0, 1)) if ring else (Class.MISSING, Certainty.CONDITIONAL, (1,))
    )


GIVES = "pid 8 (gone) does not release the lock, for which \0 waits"


@pytest.mark.parametrize(
    ("one", "two", "left"),
    [
        ({}, {}, None),
        ({"others": ("a thread that runs",)}, {}, (Class.MISSING, Certainty.CONDITIONAL)),
        ({"main": "the clock, in 9 s"}, {}, (Class.MISSING, Certainty.CONDITIONAL)),
        ({}, {"main": "a signal that it catches (SIGUSR1)"}, (Class.MISSING, Certainty.CONDITIONAL)),
        ({}, {"others": ("a thread that runs",)}, (Class.MISSING, Certainty.CONDITIONAL)),
    ],
)
def test_locks_of_each_other_are_a_ring_unless_somebody_may_go_on(
    one: dict[str, Any], two: dict[str, Any], left: tuple[Class, Certainty] | None, tmp_path: Path
) -> None:
    """Rank 0 waits in a call for ranks 1 and 2, of which each waits for what the other one holds."""
    ranks = pair(tmp_path, size=3)
    for rank, group in ranks:
        rank.over(rank.call(group))
    ranks[0][0].wait(ranks[0][0].call(ranks[0][1]))
    now = {0: Moves(pid=7)}
    for number, other, more in ((1, 9, one), (2, 8, two)):
        outside = Outside(f"pid {other} (gone) does not release the lock, for which \0 waits", frozenset({other}))
        now[number] = Moves(locked=False, pid=7 + number, outside=outside)._replace(**more)
    found = told(tmp_path, now=now).verdict
    if left is None:
        assert (found.cls, found.certainty, found.ranks) == (Class.CYCLE, Certainty.CERTAIN, (1, 2))
        assert "rank 2 (pid 9 (gone)) does not release the lock, for which rank 1 waits" in found.say
    else:
        assert (found.cls, found.certainty) == left
        assert 0 not in found.ranks


def test_a_thread_that_may_make_the_call_is_a_condition_of_the_ring(tmp_path: Path) -> None:
    """Rank 1 waits for a lock of rank 0, which waits in a call that another thread of rank 1 may make."""
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    first.wait(first.call(one))
    outside = Outside(GIVES, frozenset({8}))
    for others, certainty in (((), Certainty.CERTAIN), (("a thread that runs",), Certainty.CONDITIONAL)):
        mine = Moves(locked=False, pid=7, outside=outside, others=others)
        found = told(tmp_path, now={0: Moves(pid=8), 1: mine}).verdict
        assert (found.cls, found.certainty, found.ranks) == (Class.CYCLE, certainty, (0, 1))
    assert "rank 1 has a thread that runs" in found.condition


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("waited", [False, True])
def test_a_call_that_a_rank_has_open_may_let_it_go(moves: bool, waited: bool, tmp_path: Path) -> None:
    """Rank 0 waits for an event, and has a call open that rank 1 may make from another thread, if one of it moves. Its
    main thread waits for rank 0. waited: a thread of rank 0 waits for that call, and no callback of it is needed.
    """
    (first, one), (second, other) = pair(tmp_path)
    first.over(first.call(one))
    second.over(second.call(other))
    own, _ = (rank.group("own", 0, 1) for rank in (first, second))
    call = first.call(own, asynchronous=True)
    if waited:
        first.thread(1, "waiter").wait(call)
    second.wait(second.call(other))
    stands = main(0, Site("/lib/python3.11/site-packages/x.py", 1, "Event.wait"), LINE)
    others = ("a thread that waits for the clock, in 9 s",) if moves else ()
    found = told(tmp_path, stands, now={0: Moves(), 1: Moves(others=others)}).verdict
    if waited:  # a ring by way of the thread, or that thread is let go
        assert (found.cls is Class.CYCLE) or found.certainty is not Certainty.CERTAIN
        return
    assert (found.cls, found.ranks) == (Class.MISSING, (0,))
    assert found.certainty is (Certainty.CONDITIONAL if moves else Certainty.CERTAIN)
    assert ("the end of all_reduce (call 1 on own), which rank 0 has open, does not let it go on" in found.say) is moves


# -- stacks as text --------------------------------------------------------------------------------------------------


def test_short_names_of_the_interpreter_are_no_lines_of_the_program() -> None:
    text = (
        'Process 71: python train.py\nThread 71 (idle): "MainThread"\n    wait (threading.py:327)\n'
        "    result (concurrent/futures/_base.py:451)\n    fetch (data.py:31)\n    <module> (train.py:9)\n"
    )
    found = places(stacks.from_lines(text.splitlines(), Path("rank1.txt"), 1))[1]
    assert (found.at, found.what, str(found.site)) == (At.OUTSIDE, "wait", "data.py:31 in fetch")


@pytest.mark.parametrize("file", ["/lib/python3.11/site-packages/torch/futures/__init__.py", "torch/futures/a.py"])
def test_a_wait_for_a_future_is_one_for_its_call(file: str) -> None:
    found = places([main(0, Site(file, 60, "wait"), LINE)])[0]
    assert (found.at, found.site) == (At.CALL, LINE)


def test_a_wait_below_the_wrapper_of_the_record_is_one_for_its_call() -> None:
    wrapper = Site("/srv/kernel/comm/tap/groups.py", 240, "Groups._waits.<locals>.simple")
    found = places([main(0, wrapper, LINE)])[0]
    assert (found.at, found.site) == (At.CALL, LINE)


def test_a_line_that_waits_for_a_future_is_seen_where_its_file_is_here(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("dist.all_reduce(x, async_op=True).get_future().wait()\n")
    assert places([main(0, Site(str(program), 1, "step"))])[0].at is At.CALL


# -- creations of groups ---------------------------------------------------------------------------------------------


def creates(rank: Rank, made: bool, line: int, tag: str = "", group: Group | None = None) -> int:
    group = group or rank.group("new groups", *range(4 if "3" in tag else 3))
    call = rank.call(group, "INIT", line=line, medium="host", tag=tag)
    rank.wait(call)
    if made:
        rank.done(call)
    return call


def test_a_group_with_other_members_on_some_ranks_is_a_mismatch(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, number, 3) for number in (0, 1, 2)]
    for number, rank in enumerate(ranks):
        creates(rank, True, 10 if number == 1 else 20)
        rank.wait(rank.call(rank.group("group 1", *((0, 1) if number == 1 else (0, 1, 2)))))
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISMATCH, Certainty.CERTAIN, (1,))
    assert "created at train.py:10 in step" in found.say
    assert "created at train.py:20 in step" in found.say
    assert "new_group" in found.fix


def test_a_creation_that_ends_on_some_ranks_only_is_no_device_that_stalls(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, number, 3) for number in (0, 1, 2)]
    for number, rank in enumerate(ranks):
        creates(rank, number != 1, 10 + number)
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISMATCH, Certainty.CONDITIONAL, ())
    assert "rank 1 waits in it at train.py:11" in found.say


def test_creations_whose_members_are_recorded_name_the_odd_one(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, number, 3) for number in (0, 1, 2)]
    for number, rank in enumerate(ranks):
        creates(rank, number != 1, 10 + number, tag="0,1,2" if number == 1 else "0,1")
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISMATCH, Certainty.CERTAIN, (1,))
    assert any("train.py:11" in line for line in found.chain)
    assert "new_group" in found.fix


def test_parts_of_the_ranks_that_make_a_group_each_are_right(tmp_path: Path) -> None:
    """Ranks 2 and 3 have made theirs, rank 0 waits for rank 1, which has not come: no other one is at fault."""
    ranks = [Rank(tmp_path, number, 4) for number in (0, 1, 2, 3)]
    groups = [rank.group("new groups", 0, 1, 2, 3) for rank in ranks]
    open_ = creates(ranks[0], False, 10, "0,1", groups[0])
    for number in (2, 3):
        creates(ranks[number], True, 12, "2,3", groups[number])
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISSING, Certainty.CONDITIONAL, (1,))
    creates(ranks[1], True, 11, "0,1", groups[1])
    # It waits still: two groups of one number take each other's members.
    assert told(tmp_path).verdict.cls is Class.MISMATCH
    ranks[0].done(open_)
    assert told(tmp_path).verdict.cls is Class.NONE


def test_who_is_not_to_be_in_a_group_is_not_waited_for(tmp_path: Path) -> None:
    """Ranks 0 and 1 make their group; rank 2, which is to call new_group too, is late, and so is rank 1."""
    ranks = [Rank(tmp_path, number, 3) for number in (0, 1, 2)]
    creates(ranks[0], False, 10, tag="0,1")
    assert told(tmp_path).verdict.ranks == (1,)


def test_a_rank_that_makes_other_groups_in_other_order_is_the_odd_one(tmp_path: Path) -> None:
    """Rank 0 makes {0, 1, 2} first, the others {0, 1}: what is made is wrong from the first number on."""
    ranks = [Rank(tmp_path, number, 3) for number in (0, 1, 2)]
    creates(ranks[0], False, 10, tag="0-2")
    creates(ranks[1], False, 20, tag="0,1")
    group = ranks[2].group("new groups", 0, 1, 2)
    creates(ranks[2], True, 20, "0,1", group)
    creates(ranks[2], False, 21, "0-2", group)
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISMATCH, Certainty.CERTAIN, (0,))
    assert "Call 1 on new groups" in found.say


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60, unique=True), st.integers(1, 9), st.integers(1, 40))
def test_lists_of_members_are_told_shortly(ranks: list[int], step: int, count: int) -> None:
    for each in (ranks, sorted(ranks), [7 + step * n for n in range(count)]):
        text = members_text(each)
        assert len(text) <= 160
        assert members_of(text) in (tuple(each), None)
        assert len(text) < 100 or members_of(text) is None or len(each) > 20
    assert len(members_text([7 + step * n for n in range(count)])) < 16
    assert members_of(members_text(list(range(4096)))) == tuple(range(4096))


def test_members_that_differ_are_told_apart_however_many() -> None:
    one = [n * n for n in range(400)]
    assert members_of(members_text(one)) is None
    assert members_text(one) != members_text([*one[:-1], 400 * 400])
    assert members_of("#7") is None


# -- who was first, and who is not there -----------------------------------------------------------------------------


def test_who_left_comes_before_who_lost_it(tmp_path: Path) -> None:
    """Rank 1 raises; rank 2 loses its recv from it and goes elsewhere; rank 0 waits for rank 2."""
    ranks = [Rank(tmp_path, number, 3) for number in (0, 1, 2)]
    world = [rank.group("world", 0, 1, 2) for rank in ranks]
    lost = ranks[2].call(world[2], "recv", peer=1)
    ranks[2].wait(lost)
    ranks[2].done(lost, "RuntimeError: Connection closed by peer")
    ranks[1].text(Kind.EXCEPTION, "ValueError: bad batch")
    ranks[1].recorder.close()
    ranks[0].wait(ranks[0].call(ranks[0].group("both", 0, 2)))
    found = told(tmp_path).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CONDITIONAL, (1,))
    assert "failed on rank 2 at train.py:7 in step, with rank 1, which left by ValueError: bad batch" in found.say
    assert "that is why rank 2 stays away" in found.condition


@pytest.mark.parametrize(("gone", "stalls"), [(12, 14), (14, 12)])
def test_peers_that_finished_a_call_show_that_an_absent_member_made_it(gone: int, stalls: int, tmp_path: Path) -> None:
    """The devices of ranks 12 and 14 stall. Without the dump of one, the other one is told still."""
    job = tmp_path / "job"
    shutil.copytree(MEGATRON / "gpu_error", job)
    (job / f"_dump_{gone}").unlink()
    found = diagnose_found(gather([job])).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.DEVICE_STALL, Certainty.CONDITIONAL, (stalls,))
    assert f"rank {gone}, of which there is no dump" in found.condition


def test_what_ended_on_one_member_was_called_by_one_that_left_no_dump(tmp_path: Path) -> None:
    ranks = [Recorder(rank, {"0": ("default_pg", (0, 1, 2))}) for rank in (0, 1)]
    ranks[0].call("0", state="completed")
    ranks[1].call("0", state="scheduled")
    found = diagnose_found(gather([save(tmp_path / "job", ranks)])).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.DEVICE_STALL, Certainty.CONDITIONAL, (1,))
    assert "rank 2, of which there is no dump" in found.condition


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("stuck", [False, True])
def test_a_second_init_in_one_process_begins_its_numbers_anew(lost: int, stuck: bool, tmp_path: Path) -> None:
    """Five calls of 8 elements, then two of 64 in a group of the same name; lost: what rank 1's ring does not hold."""
    ranks = [Recorder(rank, {"0": ("default_pg", (0, 1))}) for rank in (0, 1)]
    for rank in ranks:
        for size, calls in ((8, 5), (64, 2)):
            rank.counts.clear()
            for _ in range(calls):
                rank.call("0", size=size)
    ranks[1].entries = ranks[1].entries[lost:]
    if stuck:
        ranks[0].call("0", size=64, state="scheduled")
    found = diagnose_found(gather([save(tmp_path / "job", ranks)])).verdict
    if stuck:
        assert (found.cls, found.ranks) == (Class.MISSING, (1,))
        assert "call 3 on default_pg (2)" in found.say
    else:
        assert found.cls is Class.NONE


def test_lines_of_a_log_that_repeat_calls_of_a_dump_are_no_second_init(tmp_path: Path) -> None:
    ranks = [Recorder(rank, {"0": ("default_pg", (0, 1))}) for rank in (0, 1)]
    for rank in ranks:
        rank.call("0")
    ranks[0].call("0", state="scheduled")
    ranks[0].call("0", state="scheduled")
    job = save(tmp_path / "job", ranks)
    (job / "watchdog.log").write_text(
        "[rank0]:[E810 03:04:11.0 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout:"
        " WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600096 milliseconds"
        " before timing out.\n[rank0]:[E810 03:04:11.1 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg)"
        " Rank 0]  failure detected by watchdog at work sequence id: 2 PG status: last enqueued work: 3, last completed"
        " work: 1\n"
    )
    found = diagnose_found(gather([job])).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (1,))
    assert "call 2 on default_pg at" not in found.say
    assert "(2)" not in found.say


def test_ranks_without_a_dump_are_not_compared_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work grows with the world, not with its square."""
    compared = 0

    def equal(one: Host, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    monkeypatch.setattr(Host, "__eq__", equal)
    size = 400
    rank = Recorder(0, {"0": ("default_pg", range(size))})
    rank.call("0", state="scheduled")
    found = diagnose_found(gather([save(tmp_path / "job", [rank])])).verdict
    assert found.certainty is Certainty.UNDECIDED
    assert compared < 10 * size


# -- calls in a helper of the program --------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [False, True])
def test_from_where_ranks_came_to_a_line_that_makes_the_calls_of_all(same: bool, tmp_path: Path) -> None:
    """Of the functions between, which are the same on all ranks, the one is told that differs; or the nearest."""
    ranks = crossed(tmp_path)
    between = Site("helpers.py", 20, "timed")
    outer = [Site("train.py", 50, "forward"), Site("train.py", 50 if same else 60, "forward")]
    found = told(tmp_path, *(main(rank, COLLECTIVE, LINE, between, outer[rank]) for rank in (0, 1))).verdict
    assert found.cls is Class.CYCLE, ranks
    lines = [line for line in found.chain if " came to " in line]
    if same:
        assert lines == [f"ranks 0 and 1 came to {LINE} from {between}"]
    else:
        assert lines == [f"rank {rank} came to {LINE} from {outer[rank]}" for rank in (0, 1)]


def test_callers_of_lines_that_differ_are_not_told(tmp_path: Path) -> None:
    ranks = crossed(tmp_path)
    stacks = [main(0, COLLECTIVE, LINE, LINE), main(1, COLLECTIVE, Site("train.py", 8, "step"), LINE)]
    assert not any(" came to " in line for line in told(tmp_path, *stacks).verdict.chain), ranks
