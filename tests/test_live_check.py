"""The live check: certain faults from two looks at records that move, and never one that is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.record import Kind, Recorder, ring_path
from kernel.request import Phase
from rollout import cli
from tests.live_world import LiveWorld
from verify.blame import Class
from verify.live.check import Check
from verify.live.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verify.hang.diagnosis import Diagnosis


class Racing(Rings):
    """Rings that move on while they are read: before each ring, the world makes some steps."""

    def __init__(self, run: Path, between: Callable[[], None]) -> None:
        super().__init__(run)
        self._between = between

    def look(self) -> Any:
        follow = super().look
        for one in self._ranks.values():
            plain = one.follower.look

            def stepped(plain: Callable[[], Any] = plain) -> Any:
                self._between()
                return plain()

            one.follower.look = stepped  # type: ignore[method-assign]
        try:
            return follow()
        finally:
            for one in self._ranks.values():
                one.follower.__dict__.pop("look", None)


def watch(run: Path, looks: int = 2) -> Diagnosis | None:
    rings, check = Rings(run), Check()
    for _ in range(looks):
        check.take(rings.look())
    return check.diagnosis


@settings(max_examples=60)
@given(data=st.data())
def test_a_run_that_can_go_on_never_alarms(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the order of steps, of readings between them, and of looks; also with ranks that stop for a while."""
    run = tmp_path_factory.mktemp("calm")
    size = data.draw(st.integers(2, 4))
    everybody = data.draw(st.booleans())  # all wait for D before the rendezvous: an order that is the same everywhere
    capacity = data.draw(st.sampled_from([4096, 24]))  # the smaller one is lapped between two looks
    world = LiveWorld(run, size, 3, fences=range(size) if everybody else (), capacity=capacity)
    random = Random(data.draw(st.integers(0, 1 << 32)))

    def some() -> None:
        if random.random() < 0.2:
            world.stopped = {rank for rank in range(size) if random.random() < 0.3}
        for _ in range(random.randrange(4)):
            world.step(random.randrange(1 << 30))

    rings, check = Racing(run, some), Check()
    while not all(world.ended):
        some()
        if random.random() < 0.4:
            assert check.take(rings.look()) is None
        if not world.ready():
            world.stopped = set()
            assert world.ready() or all(world.ended), "the world itself must not hang"
    for _ in range(3):
        assert check.take(rings.look()) is None
    world.close()


@settings(max_examples=60)
@given(data=st.data())
def test_a_ring_is_told_once_it_has_closed_and_not_before(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("hangs")
    size = data.draw(st.integers(2, 4))
    fences = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    world = LiveWorld(run, size, 6, fences=sorted(fences), since=data.draw(st.integers(0, 3)))
    random = Random(data.draw(st.integers(0, 1 << 32)))

    def step() -> None:
        world.step(random.randrange(1 << 30))

    rings, check = Racing(run, step), Check()
    while world.ready() and check.diagnosis is None:
        step()
        if random.random() < 0.2:
            check.take(rings.look())
    check.take(rings.look())
    check.take(rings.look())
    found = check.diagnosis
    # Told early or late, it is a world that hangs: whatever steps remain, nobody gets to the end.
    while world.step(0):
        pass
    assert not any(world.ended)
    assert found is not None
    assert found.verdict.cls is Class.CYCLE
    ring = {int(word) for word in found.verdict.chain[0].replace(",", " ").split() if word.isdecimal()}
    assert ring & fences
    assert check.take(rings.look()) is None, "once"
    world.close()


# -- what is no ring -------------------------------------------------------------------------------------------------


def writer(folder: Path, rank: int, size: int = 2) -> Recorder:
    meta = {"size": size, "policy": "fine", "world": f"g{size}"}
    groups = {"D.TP": tuple(range(size)), "P.TP": tuple(range(size))}
    return Recorder(ring_path(folder, rank), rank=rank, groups=groups, meta=meta, capacity=256, strings=1 << 14)


def submit(rec: Recorder, label: str, phase: Phase, seq: int) -> None:
    rec.event(Kind.SUBMIT, phase, phase, a=0, b=1, site=rec.site(label))
    rec.event(Kind.ENQUEUE, phase, phase, rec.group(f"{phase}.TP"), seq, b=rec.site("AR"), site=rec.site("x 1"))


def wait(rec: Recorder, text: str, leaves: bool = False) -> None:
    rec.event(Kind.HOST_WAIT_LEAVE if leaves else Kind.HOST_WAIT_ENTER, b=rec.site(text))


def enter(rec: Recorder, seq: int) -> None:
    rec.event(Kind.EXCHANGE_ENTER, seq=seq, b=rec.site("pre-d"))


def ring(run: Path) -> list[Recorder]:
    """Rank 0 waits for its D, which rank 1 launches only after a rendezvous that rank 0 comes to later."""
    recs = [writer(run, rank) for rank in range(2)]
    submit(recs[0], "D 0", Phase.D, 1)
    wait(recs[0], "D 0")
    enter(recs[1], 1)
    return recs


def test_one_look_is_not_enough_and_two_are(tmp_path: Path) -> None:
    ring(tmp_path)
    rings, check = Rings(tmp_path), Check()
    assert check.take(rings.look()) is None
    found = check.take(rings.look())
    assert found is not None
    assert (found.verdict.cls, found.verdict.ranks) == (Class.CYCLE, (0, 1))


def test_progress_of_a_member_between_the_looks_takes_the_first_one_back(tmp_path: Path) -> None:
    recs = ring(tmp_path)
    rings, check = Rings(tmp_path), Check()
    check.take(rings.look())
    recs[1].event(Kind.PLAN)
    assert check.take(rings.look()) is None
    recs[1].event(Kind.MARK, a=5, b=recs[1].site("longest loop gap, ns"))
    assert check.take(rings.look()) is not None, "a remark is no progress"


@pytest.mark.parametrize("busy", ["code between calls", "another task"])
def test_a_host_whose_device_may_still_move_is_in_no_ring(busy: str, tmp_path: Path) -> None:
    """Another task of its turn may wait for that, and then make the call that is lacking."""
    recs = ring(tmp_path)
    if busy == "code between calls":
        # A segment that runs, and has no call open: whoever waits for its end goes on by itself.
        recs[0].event(Kind.SUBMIT, Phase.P, "P", a=0, b=1, site=recs[0].site("P e0 [0,1)"))
        assert watch(tmp_path) is None
        recs[0].event(Kind.WORK_FINISH, Phase.P, "P", site=recs[0].site("P e0 [0,1)"))
    else:
        for rec in recs:
            submit(rec, "P e0 [0,1)", Phase.P, 1)  # everybody is in it, and it works
        assert watch(tmp_path) is None
        for rec in recs:
            rec.event(Kind.WORK_FINISH, Phase.P, "P", site=rec.site("P e0 [0,1)"))
    assert watch(tmp_path) is not None


def test_streams_in_opposite_order_are_a_ring_whatever_their_hosts_do(tmp_path: Path) -> None:
    recs = [writer(tmp_path, rank) for rank in range(2)]
    for rank, rec in enumerate(recs):
        rec.event(Kind.SUBMIT, Phase.D, "D", site=rec.site("D 0"))
        for group in ("D.TP", "P.TP") if rank else ("P.TP", "D.TP"):
            rec.event(Kind.ENQUEUE, Phase.D, "D", rec.group(group), 1, b=rec.site("AR"), site=rec.site("x 1"))
        rec.event(Kind.SUBMIT, Phase.P, "P", site=rec.site("P e0 [0,1)"))
    found = watch(tmp_path)
    assert found is not None
    assert (found.verdict.cls, found.verdict.ranks) == (Class.CYCLE, (0, 1))
    assert "stream D" in found.verdict.say


def test_a_rank_that_raised_is_told_and_one_that_gave_up_is_not(tmp_path: Path) -> None:
    recs = [writer(tmp_path, rank) for rank in range(2)]
    enter(recs[0], 1)
    recs[1].event(Kind.EXCEPTION, b=recs[1].site("RankLost: the launcher has ended"))
    recs[1].close()
    assert watch(tmp_path) is None
    recs[1].event(Kind.EXCEPTION, b=recs[1].site("ValueError: no"))
    found = watch(tmp_path)
    assert found is not None
    assert (found.verdict.cls, found.verdict.ranks) == (Class.EXCEPTION, (1,))
    assert "ValueError: no" in found.verdict.say


def test_a_rank_that_ended_in_order_though_others_wait_for_it(tmp_path: Path) -> None:
    recs = [writer(tmp_path, rank) for rank in range(2)]
    enter(recs[0], 1)
    assert watch(tmp_path) is None
    recs[1].close()
    found = watch(tmp_path)
    assert found is not None
    assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (1,))


WRITER = """
    import sys, time
    from kernel.record import Kind, Recorder, ring_path
    rec = Recorder(ring_path(sys.argv[1], 1), rank=1, groups={"D.TP": (0, 1)}, meta={"size": 2}, capacity=256)
    rec.event(Kind.PLAN)
    print(flush=True)
    time.sleep(600)
"""


def test_a_stopped_process_is_no_fault_and_a_killed_one_is(tmp_path: Path) -> None:
    enter(writer(tmp_path, 0), 1)
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert watch(tmp_path, 4) is None
        child.kill()
        child.wait()
        child.stdout.close()
        found = watch(tmp_path)
        assert found is not None
        assert (found.verdict.cls, found.verdict.ranks) == (Class.MISSING, (1,))
    finally:
        child.kill()
        child.wait()


def test_rings_of_another_time_are_left_alone(tmp_path: Path) -> None:
    ring(tmp_path)
    rings = Rings(tmp_path, only_new=True)
    with pytest.raises(Exception, match="no rank<k>"):
        rings.look()
    enter(writer(tmp_path, 1), 1)
    assert list(rings.look().facts) == [1]


# -- the command -----------------------------------------------------------------------------------------------------


def test_check_prints_one_report_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring(tmp_path)
    assert cli.main(["top", "--check", "--every", "0.05", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("verdict   cycle (certain): ranks 0 and 1")
    assert out.count("\n") <= 25
    assert cli.main(["top", "--check", "--json", "--every", "0.05", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["class"], found["certainty"], found["ranks"]) == ("cycle", "certain", [0, 1])


def test_check_of_a_run_that_ended_well_or_gave_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = LiveWorld(tmp_path / "well", 2, 2)
    while world.step(0):
        pass
    assert cli.main(["top", "--check", str(tmp_path / "well")]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    for rank in range(2):
        rec = writer(tmp_path / "gave-up", rank)
        rec.event(Kind.EXCEPTION, b=rec.site("RankLost: the launcher has ended"))
        rec.close()
    assert cli.main(["top", "--check", "--json", str(tmp_path / "gave-up")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == []
    assert "outside these records" in found["say"]


def test_check_follows_the_policies_of_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        world = LiveWorld(tmp_path / name, 2, 1)
        while world.step(0):
            pass
    ring(tmp_path / "c")
    assert cli.main(["top", "--check", "--every", "0.05", str(tmp_path)]) == 1
    assert "cycle (certain)" in capsys.readouterr().out


def test_ranks_that_have_ended_are_in_no_ring(tmp_path: Path) -> None:
    """They dropped what they had in their queues: it may never have begun."""
    recs = [writer(tmp_path, rank) for rank in range(2)]
    for rank, rec in enumerate(recs):
        rec.event(Kind.SUBMIT, Phase.D, "D", site=rec.site("D 0"))
        for group in ("D.TP", "P.TP") if rank else ("P.TP", "D.TP"):
            rec.event(Kind.ENQUEUE, Phase.D, "D", rec.group(group), 1, b=rec.site("AR"), site=rec.site("x 1"))
        rec.close()
    assert watch(tmp_path, 3) is None
