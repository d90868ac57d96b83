"""Jobs that `turnstile.record.install` records, watched while they go on: rings written by hand, and what is told."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.record import Kind, Recorder, RingFollower, read, ring_path
from tests.installed_rings import Rank, pair
from verify.blame import Certainty, Class
from verify.hosts.delta import Receiver, Sender
from verify.live import idle
from verify.live.check import Check
from verify.live.idle import Idle, Sample
from verify.live.installed import LiveInstalled
from verify.live.rings import Rings
from verify.live.threads import Moves
from verify.readers.installed_ring import Ring
from verify.top import main as top
from verify.top.follow import Follower
from verify.trace import main as trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis

MOVES = ("call", "over", "wait", "done", "store", "stored", "group", "size", "thread")


@pytest.fixture(autouse=True)
def _alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """These rings say that they began before this process, which would then be another one."""
    monkeypatch.setattr("verify.live.rings.writer_state", lambda recording, boot: "S")
    for place in ("verify.live.threads.moves", "verify.live.installed.moves"):
        monkeypatch.setattr(place, lambda pid: Moves())


class Job:
    """Rings that are followed. looks: how often to look."""

    def __init__(self, run: Path) -> None:
        self.rings, self.check = Rings(run), Check()

    def look(self, looks: int = 1) -> Diagnosis | None:
        found = None
        for _ in range(looks):
            found = self.check.take(self.rings.look(), always=True) or found
        return found


def crossed(run: Path) -> list[tuple[Rank, Any, Any]]:
    """Two ranks that wait for each other in calls of two groups. The last event of each is its wait."""
    made = []
    for number in (0, 1):
        rank = Rank(run, number)
        one, other = rank.group("P", 0, 1), rank.group("D", 0, 1)
        rank.over(rank.call(one), rank.call(other))
        rank.wait(rank.call((one, other)[number]))
        made.append((rank, one, other))
    return made


def test_a_ring_of_waits_is_certain_with_the_second_look(tmp_path: Path) -> None:
    crossed(tmp_path)
    job = Job(tmp_path)
    assert job.look() is None
    found = job.look()
    assert found is not None
    assert (found.verdict.cls, found.verdict.certainty, found.verdict.ranks) == (
        Class.CYCLE, Certainty.CERTAIN, (0, 1),
    )  # fmt: skip
    assert "call 2 on P" in found.verdict.say
    assert "call 2 on D" in found.verdict.say
    assert job.look(3) is None  # said once


def test_what_moved_between_two_looks_does_not_stand(tmp_path: Path) -> None:
    (rank, one, other), _ = crossed(tmp_path)
    job = Job(tmp_path)
    assert job.look() is None
    rank.done(read(rank.recorder.path).events[-1].a)
    rank.over(rank.call(other))
    rank.wait(rank.call(one))
    found = job.look()
    assert found is None or found.verdict.cls is not Class.CYCLE


def test_another_thread_that_moves_may_bring_what_is_lacking(tmp_path: Path) -> None:
    (rank, _, _), _ = crossed(tmp_path)
    rank.recorder._clock = time.monotonic_ns
    rank.recorder.event(Kind.DECISION, epoch=3, b=rank.recorder.site("now"))
    job = Job(tmp_path)
    assert job.look(4) is None
    assert job.check.newest is not None
    assert job.check.newest.verdict.cls is Class.CYCLE


def test_calls_that_differ(tmp_path: Path) -> None:
    (one, group), (other, _) = pair(tmp_path)
    one.wait(one.call(group))
    other.wait(other.call(group, "broadcast", root=0))
    found = Job(tmp_path).look(2)
    assert found is not None
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISMATCH, ())


def test_groups_that_are_made_with_other_members(tmp_path: Path) -> None:
    """Each rank waits in its own creation for the other one."""
    for number, members in enumerate(("0,1", "0-2")):
        rank = Rank(tmp_path, number, 3)
        rank.wait(rank.call(rank.group("new groups", 0, 1, 2), "INIT", medium="host", tag=members))
    found = Job(tmp_path).look(2)
    assert found is not None
    assert (found.verdict.cls, found.verdict.certainty) == (Class.MISMATCH, Certainty.CERTAIN)
    assert "[0,1]" in found.verdict.say
    assert "[0-2]" in found.verdict.say


def test_a_rank_that_raised_while_another_waits(tmp_path: Path) -> None:
    (one, group), (other, _) = pair(tmp_path)
    one.wait(one.call(group))
    other.text(Kind.EXCEPTION, "KeyError: 'tokens'")
    found = Job(tmp_path).look(2)
    assert found is not None
    assert (found.verdict.cls, found.verdict.ranks) == (Class.EXCEPTION, (1,))


def stuck_for(run: Path, size: int = 2) -> list[tuple[Rank, Any]]:
    """All ranks but the last one wait for it."""
    ranks = pair(run, size=size)
    for rank, group in ranks:
        rank.over(rank.call(group))
    for rank, group in ranks[:-1]:
        rank.wait(rank.call(group))
    return ranks


def idles(monkeypatch: pytest.MonkeyPatch, proven: bool) -> None:
    """Let every process look as if nothing in it went on, and has not for long."""
    monkeypatch.setattr(Idle, "look", lambda self, pid, last: setattr(self, "proven", proven))


def test_a_living_rank_is_missing_only_when_it_is_idle_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck_for(tmp_path)
    idles(monkeypatch, False)
    assert Job(tmp_path).look(5) is None
    idles(monkeypatch, True)
    job = Job(tmp_path)
    assert job.look() is None
    found = job.look()
    assert found is not None
    assert (found.verdict.cls, found.verdict.certainty, found.verdict.ranks) == (
        Class.MISSING, Certainty.CERTAIN, (1,),
    )  # fmt: skip


def test_nobody_is_missing_while_a_rank_may_be_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck_for(tmp_path, 4)
    idle_ones = {3}

    def look(self: Idle, pid: int, last: int) -> None:
        self.proven = self.rank in idle_ones  # type: ignore[attr-defined]

    made = LiveInstalled.__post_init__

    def init(self: LiveInstalled) -> None:
        made(self)
        self.idle.rank = self.rank  # type: ignore[attr-defined]

    monkeypatch.setattr(LiveInstalled, "__post_init__", init)
    monkeypatch.setattr(Idle, "look", look)
    fourth = Rank(tmp_path, 2, 4)  # takes the place of a ring
    again = fourth.group("world", 0, 1, 2, 3)
    fourth.over(fourth.call(again))
    fourth.call(again, asynchronous=True)  # what it lacks nobody waits for, and it is at work
    assert Job(tmp_path).look(4) is None
    idle_ones.add(2)
    found = Job(tmp_path).look(2)
    assert found is not None
    assert found.verdict.cls is Class.MISSING


def test_a_record_that_ended_before_its_process_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = stuck_for(tmp_path)
    ranks[-1][0].recorder.close()
    idles(monkeypatch, True)
    assert Job(tmp_path).look(4) is None


def test_records_of_two_kinds_are_refused_in_one_line(tmp_path: Path) -> None:
    Rank(tmp_path, 0)
    Recorder(ring_path(tmp_path, 1), rank=1, groups={"P.TP": (0, 1)})
    with pytest.raises(UsageError, match="rank 0 installed a record, rank 1 did not") as caught:
        Rings(tmp_path).look()
    assert "\n" not in str(caught.value)


# -- idle --------------------------------------------------------------------------------------------------------------


RARELY = st.integers(0, 7).map(lambda each: each == 7)


@example([(3.0, False, False, True, 0), (3.0, True, False, True, 0)])
@example([(3.0, False, False, True, 0), (3.0, False, True, True, 0)])
@example([(3.0, False, False, True, 0), (1.0, False, False, False, 0), (3.0, False, False, True, 0)])
@example([(3.0, False, False, True, 0), (6.0, False, False, True, 0)])
@given(
    steps=st.lists(
        st.tuples(st.floats(0.5, 3.0), RARELY, RARELY, RARELY.map(lambda each: not each), st.sampled_from([0, 1, 40])),
        max_size=12,
    )
)
def test_idle_means_that_nothing_happened_for_the_whole_time(steps: list[tuple[float, bool, bool, bool, int]]) -> None:
    """Against a plain account of it: how long ago anything that counts was seen last."""
    now, switches, ticks, last, since = 0.0, 1, 0, 0, None
    since_ticks = 0
    one = Idle(5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idle.time, "monotonic", lambda: now)
        patch.setattr(idle.os, "sysconf", lambda _: 100)
        for passed, ran, recorded, still, used in steps:
            now, switches, last, ticks = now + passed, switches + ran, last + recorded, ticks + used
            patch.setattr(idle, "sample", lambda _, now=({1: switches}, ticks, still): Sample(*now))
            one.look(1, last)
            if not still:
                since = None
            elif since is None or ran or recorded or (ticks - since_ticks) / 100 > max(0.05, 0.05 * (now - since)):
                since, since_ticks = now, ticks
            assert one.proven == (since is not None and now - since >= 5.0)


def test_a_process_that_is_not_there_or_runs_is_not_idle() -> None:
    import os

    assert idle.sample(1 << 30) is None
    mine = idle.sample(os.getpid())
    assert mine is None or not mine.still


# -- following ---------------------------------------------------------------------------------------------------------


def play(rank: Rank, moves: list[tuple[str, int]], groups: list[Any], open_: list[int]) -> None:
    for move, which in moves:
        group = groups[which % len(groups)]
        match move:
            case "call":
                open_.append(rank.call(group, "all_gather" if which > 2 else "all_reduce"))
            case "size":
                open_.append(rank.call(group, "all_to_all", ins=(which + 1, 3), outs=(2, which + 1)))
            case "over":
                rank.over(rank.call(group))
            case "wait" if open_:
                rank.wait(open_[which % len(open_)])
            case "done" if open_:
                rank.done(open_.pop(which % len(open_)))
            case "store":
                rank.text(Kind.HOST_WAIT_ENTER, f"store: get {which}")
            case "stored":
                rank.text(Kind.HOST_WAIT_LEAVE, "")
            case "group" if len(groups) < 6:
                groups.append(rank.group(f"g{len(groups)}", 0, 1))
            case "thread":
                rank.recorder.event(Kind.DECISION, epoch=0, b=rank.recorder.site(f"d{which}"))
            case _:
                pass


@given(
    parts=st.lists(
        st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 5)), max_size=15), min_size=1, max_size=6
    )
)
def test_following_comes_to_what_reading_comes_to(tmp_path_factory: pytest.TempPathFactory, parts: Any) -> None:
    """A ring taken bit by bit, most finished calls forgotten, shows the same open calls, waits and words."""
    run = tmp_path_factory.mktemp("ring")
    rank = Rank(run, 0)
    groups, open_ = [rank.group("world", 0, 1)], list[int]()
    follower, live = RingFollower(rank.recorder.path), None
    for moves in parts:
        play(rank, moves, groups, open_)
        step = follower.look()
        if live is None:
            live = LiveInstalled(step.recording)
        else:
            live.take(step.recording)
        live.forget(2)
    assert live is not None
    whole = Ring(read(rank.recorder.path))
    over = Counter(event.state.value for event in whole.events())
    assert [e for e in live.events() if e.state != "completed"] == [e for e in whole.events() if e.state != "completed"]
    assert live.standing() == whole.standing()
    assert (live.unknown, live.remarks, live.whole) == (whole.unknown, whole.remarks, whole.whole)
    assert sum(item.done for item in live.items) <= min(over["completed"], 2 * len(groups))
    follower.close()


def test_an_open_call_is_never_forgotten(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    group = rank.group("world", 0, 1)
    rank.call(group, asynchronous=True)
    rank.over(*(rank.call(group) for _ in range(20)))
    live = LiveInstalled(read(rank.recorder.path))
    live.forget(2)
    assert [item.sequence for item in live.open] == [0]
    assert [item.sequence for item in live.items] == [0, 19, 20]


def test_an_agent_sends_every_call_also_those_without_a_number(tmp_path: Path) -> None:
    """Calls launched as one, and receives from anybody, must not take each other's place."""
    (one, group), (other, _) = pair(tmp_path)
    for _ in range(2):
        first = one.call(group, "send", peer=1, tag="0", asynchronous=True)
        one.call(group, "recv", peer=1, tag="0", asynchronous=True)
        one.recorder.event(Kind.TOGETHER, epoch=0, a=first)
    one.wait(one.call(group, "recv", peer=-1, tag="0"))
    other.wait(other.call(group))
    look = Rings(tmp_path).look()
    sender, receiver = Sender(), Receiver()
    receiver.take(json.loads(json.dumps(sender.changes(look, {}))))
    for rank in (0, 1):
        sent = [event for event in look.found.events if event.rank == rank]
        assert receiver.ranks[rank].events() == sent
    assert sum(bool(event.parts) for event in look.found.events) == 2


# -- what people see ---------------------------------------------------------------------------------------------------


def test_rows_say_the_last_call_its_line_what_is_open_and_the_last_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one, group), (other, _) = stuck_for(tmp_path)
    other.text(Kind.DECISION, "skips step 3")
    one.call(group, asynchronous=True, line=99)
    first, second = Follower(tmp_path).look().rows
    assert (first.status, first.operation, first.open) == ("stalled", "all_reduce world #2", True)
    assert (first.site, first.pending) == ("train.py:7 step", 2)
    assert first.waits == "waits for all_reduce world #2; open: all_reduce world #3"
    assert first.age_s is not None
    assert first.age_s > 50
    assert (second.status, second.operation) == ("quiet", "all_reduce world #1")
    assert (second.open, second.blocks) == (False, True)
    assert second.decision.startswith("skips step 3")
    assert top("top", ["--once", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "in all_reduce world #2" in told
    assert "skips step 3" in told
    assert "boundary" not in told
    assert "rank 0 waits in all_reduce world #2 for rank 1" in told


def test_check_of_a_ring_of_waits_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crossed(tmp_path)
    assert top("top", ["--check", "--every", "0.05", str(tmp_path)]) == 1
    assert "cycle (certain)" in capsys.readouterr().out


def traced(run: Path) -> list[dict[str, Any]]:
    assert trace("trace", [str(run)]) == 0
    found: list[dict[str, Any]] = json.loads((run / "trace.json").read_text())["traceEvents"]
    return found


def bars(events: list[dict[str, Any]], rank: int, kind: str) -> Iterator[dict[str, Any]]:
    return (e for e in events if e["ph"] in "XB" and e["pid"] == 1000 + rank and e["cat"] == kind)


def test_a_trace_has_a_lane_a_group_and_joins_the_calls_that_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, one, _ in crossed(tmp_path):
        if rank.rank == 0:
            rank.call(one, "send", peer=1, tag="5")
        else:
            rank.call(one, "recv", peer=0, tag="5")
        rank.text(Kind.DECISION, "odd")
    events = traced(tmp_path)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"waits", "calls on P", "calls on D"}
    told = [(e["name"], e["ph"]) for e in bars(events, 0, "call")]
    assert told == [
        ("all_reduce P #1", "X"), ("all_reduce P #2", "B"), ("send to 1 on P #1", "B"), ("all_reduce D #1", "X"),
    ]  # fmt: skip
    assert [(e["name"], e["ph"]) for e in bars(events, 1, "waits")][-1] == ("waits for all_reduce D #2", "B")
    joined: dict[int, list[tuple[str, int, str]]] = {}
    for e in events:
        if e["ph"] in "stf":
            joined.setdefault(e["id"], []).append((e["ph"], e["pid"], e["name"]))
    assert sorted(each[0][2] for each in joined.values()) == ["call 1 on D", "call 1 on P", "call 1 on P"]
    assert all([phase for phase, _, _ in each] == ["s", "f"] for each in joined.values())
    assert all({pid for _, pid, _ in each} == {1000, 1001} for each in joined.values())
    assert [e["name"] for e in events if e["ph"] == "i"] == ["decided: odd"] * 2
    capsys.readouterr()
