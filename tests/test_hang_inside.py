"""Ranks that left inside a call: by its arguments, which differ, or by a death that keeps everybody else there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.installed_rings import pair
from tests.test_hang_evidence import hang
from tests.test_readers_killed import after_death
from verify.blame import Certainty, Class
from verify.live.check import Check
from verify.live.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIDES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "broadcast": ({"op": "broadcast", "size": 16, "root": 0}, {"op": "broadcast", "size": 8, "root": 0}),
    "root": ({"op": "broadcast", "root": 0}, {"op": "broadcast", "root": 1}),
    "all_gather": ({"op": "all_gather", "size": 8}, {"op": "all_gather", "size": 4}),
    "dtype": ({"dtype": "float32"}, {"dtype": "float64"}),
    "operation": ({"op": "all_reduce"}, {"op": "barrier"}),
    "splits": (
        {"op": "all_to_all", "ins": (3, 1), "outs": (3, 1)}, {"op": "all_to_all", "ins": (2, 2), "outs": (2, 2)}
    ),
    "transfer": ({"op": "send", "size": 16, "peer": 1}, {"op": "recv", "size": 8, "peer": 0}),
}  # fmt: skip


def differing(out: Path, what: str, through: bool, dead: int) -> None:
    """Two ranks in calls that differ, and the one that is dead inside of its own; the other one is through perhaps."""
    for rank, world in pair(out):
        rank.over(rank.call(world))
        more = {"line": 10 + rank.rank, **SIDES[what][rank.rank]}
        number = rank.call(world, **more)
        rank.wait(number)
        if through and rank.rank != dead:
            rank.done(number)
            rank.wait(rank.call(world, line=20))


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("what", SIDES)
def test_whoever_left_inside_a_call_that_differs_is_no_mere_death(
    what: str, through: bool, dead: int, tmp_path: Path
) -> None:
    differing(tmp_path, what, through, dead)
    found = after_death(tmp_path, {0: 30.0, 1: 30.0}, frozenset({1 - dead})).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.MISMATCH, Certainty.CERTAIN, ())
    assert "rank 0" in found.say
    assert "rank 1" in found.say
    assert f"rank {dead} left inside it" in found.chain[-1]


@pytest.mark.parametrize("through", [True, False])
def test_whoever_left_inside_a_call_that_agrees_is_the_fault(through: bool, tmp_path: Path) -> None:
    for rank, world in pair(tmp_path):
        rank.over(rank.call(world))
        number = rank.call(world, "broadcast", root=0)
        rank.wait(number)
        if through and rank.rank == 0:
            rank.done(number)
            rank.wait(rank.call(world))
    found = after_death(tmp_path, {0: 30.0, 1: 30.0}, frozenset({0})).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (1,))


def test_an_exception_elsewhere_comes_before_a_call_that_differs(tmp_path: Path) -> None:
    """Rank 2 died while others waited for it; that rank 1 left in another call is not why."""
    (zero, _), (one, _), (two, _), (three, _) = pair(tmp_path, size=4)
    for rank in (zero, one):
        number = rank.call(rank.group("side", 0, 1), "broadcast", size=8 + rank.rank, root=0)
        rank.wait(number)
        if rank is zero:
            rank.done(number)
    for rank in (zero, two, three):
        number = rank.call(rank.group("main", 0, 2, 3))
        rank.wait(number)
        if rank is two:
            rank.done(number)
    for rank in (zero, three):
        rank.done(number)
        rank.wait(rank.call(rank.group("last", 0, 2, 3)))
    found = after_death(tmp_path, dict.fromkeys(range(4), 30.0), frozenset({0, 3})).verdict
    assert (found.cls, found.ranks) == (Class.EXCEPTION, (2,))


def killed_inside(out: Path, medium: str = "gloo") -> None:
    """Rank 1 dies in a call, rank 0 waits there, and rank 2 has yet to come."""
    for rank, world in pair(out, size=3):
        rank.over(rank.call(world, medium=medium))
        if rank.rank < 2:
            rank.wait(rank.call(world, medium=medium))


def test_a_death_inside_a_call_comes_before_a_rank_that_is_slow(tmp_path: Path) -> None:
    killed_inside(tmp_path)
    found = after_death(tmp_path, {0: 30.0, 1: 1.0, 2: 30.0}, frozenset({0, 2})).verdict
    assert (found.cls, found.certainty, found.ranks) == (Class.EXCEPTION, Certainty.CERTAIN, (1,))
    assert "can never end" in found.say
    assert "was in all_reduce (call 2 on world) at train.py:7 in step, where rank 0 waits" in found.say
    assert "dmesg" in found.fix


def test_a_death_in_a_call_of_a_device_may_be_by_its_watchdog(tmp_path: Path) -> None:
    """NCCL's ends a process whose call has waited too long: then it is the one that did not come."""
    killed_inside(tmp_path, "nccl")
    found = after_death(tmp_path, {0: 630.0, 1: 600.0, 2: 630.0}, frozenset({0, 2})).verdict
    assert (found.cls, found.ranks) == (Class.MISSING, (2,))


def test_a_rank_that_left_a_call_nobody_waits_in_keeps_nobody(tmp_path: Path) -> None:
    """Rank 0 has made that call, and waits for rank 2 in another one."""
    (zero, _), (one, _), (two, _) = pair(tmp_path, size=3)
    zero.call(zero.group("side", 0, 1), asynchronous=True)
    one.wait(one.call(one.group("side", 0, 1)))
    zero.wait(zero.call(zero.group("main", 0, 2)))
    two.over(two.call(two.group("own", 2)))
    found = after_death(tmp_path, {0: 30.0, 1: 1.0, 2: 30.0}, frozenset({0, 2})).verdict
    assert found.ranks != (1,)


@pytest.mark.parametrize("scene", ["killed", "splits", "broadcast"])
def test_it_is_told_while_the_others_still_run(scene: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `turnstile top --check` does."""
    if scene == "killed":
        killed_inside(tmp_path)
    else:
        differing(tmp_path, scene, through=True, dead=1)
    monkeypatch.setattr("verify.live.rings.writer_state", lambda recording, boot: "" if recording.rank == 1 else "S")
    rings, check = Rings(tmp_path), Check()
    found = [told for _ in range(4) if (told := check.take(rings.look(), always=True)) is not None]
    assert len(found) == 1
    told = found[0].verdict
    assert (told.cls, told.ranks) == ((Class.EXCEPTION, (1,)) if scene == "killed" else (Class.MISMATCH, ()))


GLOO = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /p/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 64 vs 32. Received"
    " data size doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
)
STACKS = (
    "Fatal Python error: Aborted\n\nThread 0x00007fb9583bdb80 (most recent call first):\n"
    '  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3151 in broadcast\n'
    '  File "/job/train.py", line 17 in step\n  File "/job/train.py", line 26 in <module>\n'
)
PEER = "RuntimeError: [/p/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3504: Connection reset by peer\n"


@pytest.mark.parametrize("stacks", ["", STACKS])
@pytest.mark.parametrize("name", ["rank1.log", "all.log"])
def test_logs_alone_tell_the_two_sizes(
    name: str, stacks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(GLOO + stacks)
    if name == "rank1.log":
        (tmp_path / "rank0.log").write_text(f"Traceback (most recent call last):\n{PEER}")
    code, out = hang(capsys, "--json", tmp_path)
    found = json.loads(out)
    assert (code, found["class"], found["certainty"], found["ranks"]) == (1, "mismatch", "certain", [])
    assert "64 bytes" in found["say"]
    assert "room for 32" in found["say"]
    assert ("rank 1" in found["say"]) is (name == "rank1.log")
    assert ("train.py:17" in found["say"]) is bool(stacks)


def test_a_log_of_a_rank_that_went_on_after_it_tells_nothing_of_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank1.log").write_text(f"{GLOO}step 4: loss 2.1\n")
    code, _ = hang(capsys, "--json", tmp_path)
    assert code != 1
