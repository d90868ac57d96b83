"""Rings of an earlier job beside those of the present one, watched and drawn: no rank of it is one of this."""

from __future__ import annotations

import json
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from kernel.record import Kind, Recorder, ring_path
from rollout import cli
from tests.installed_rings import Rank
from tests.test_readers_jobs import stuck
from tests.test_verify_top import call, submit, writer
from verify.live.check import Check
from verify.live.rings import Rings
from verify.top.follow import Follower
from verify.top.screen import picture
from verify.top.web import frame_body

if TYPE_CHECKING:
    from pathlib import Path

LINE = "rank 2: its ring is stale, of another job: rank 2 is one of 3, rank 1 one of 2"


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of three ranks whose last one failed; then one of two in the same directory, whose rank 0 waits."""
    monkeypatch.setattr("verify.live.rings.writer_state", lambda recording, boot: "S")
    old = stuck(tmp_path, 3)
    old[2].text(Kind.EXCEPTION, "RuntimeError: Connection closed by peer")
    for rank in old:
        rank.recorder.close()
    stuck(tmp_path, 2)
    return tmp_path


def test_the_picture_and_the_page_show_the_ranks_of_the_present_job(
    shrunk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = Follower(shrunk).look()
    assert [row.rank for row in frame.rows] == [0, 1]
    assert frame.missing == ()
    assert not any("rank 2" in line for line in frame.waits)
    assert frame.stale == (f"{LINE}: not shown",)
    console = Console(file=StringIO(), width=150, highlight=False)
    console.print(picture(frame, 40, 150))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (shown, frame_body(frame)):
        assert LINE in text
        assert "RuntimeError" not in text
    assert cli.main(["top", "--json", str(shrunk)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["stale"], len(told["ranks"])) == ([f"{LINE}: not shown"], 2)


def test_the_live_check_knows_nothing_of_it(shrunk: Path) -> None:
    rings, check = Rings(shrunk), Check()
    for _ in range(3):
        look = rings.look()
        check.take(look, always=True)
        assert look.facts.keys() == {0, 1}
        assert {event.rank for event in look.found.events} == {0, 1}
        assert any(LINE in line for line in look.found.unknown)
    assert check.newest is not None
    assert 2 not in check.newest.verdict.ranks


def test_a_job_that_begins_while_it_is_followed_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.live.rings.writer_state", lambda recording, boot: "S")
    old = stuck(tmp_path, 3)
    follower = Follower(tmp_path)
    assert [row.rank for row in follower.look().rows] == [0, 1, 2]
    for rank in old:
        rank.recorder.close()
    made = [Rank(tmp_path, 0, 2)]
    # Its rank 1 has not come yet: whoever is 1 in the directory is none of it.
    frame = follower.look()
    assert [row.rank for row in frame.rows] == [0]
    assert len(frame.stale) == 2
    made.append(Rank(tmp_path, 1, 2))
    frame = follower.look()
    assert [row.rank for row in frame.rows] == [0, 1]
    assert len(frame.stale) == 1
    # And a larger one again.
    for rank in made:
        rank.recorder.close()
    made = stuck(tmp_path, 3)
    frame = follower.look()
    assert [row.rank for row in frame.rows] == [0, 1, 2]
    assert frame.stale == ()


def test_rings_of_ours_that_an_earlier_run_left_are_no_ranks_of_this_one(tmp_path: Path) -> None:
    for rank in range(3):
        writer(tmp_path, rank, 3).close()
    recorders = [writer(tmp_path, rank, 2) for rank in range(2)]
    frame = Follower(tmp_path).look()
    assert [row.rank for row in frame.rows] == [0, 1]
    assert len(frame.stale) == 1
    for recorder in recorders:
        recorder.close()


def test_a_job_of_another_size_that_still_runs_is_said_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs that write to one directory: the picture is that of the newest one."""
    monkeypatch.setattr("verify.live.rings.writer_state", lambda recording, boot: "S")
    held = stuck(tmp_path, 3), stuck(tmp_path, 2)
    frame = Follower(tmp_path).look()
    assert [row.rank for row in frame.rows] == [0, 1]
    assert "rank 2: its ring is of another job that runs as well: rank 2 is one of 3" in frame.stale[0]
    assert len(held) == 2


def test_a_timeline_shows_one_job(shrunk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(shrunk)]) == 0
    out = capsys.readouterr().out
    assert f"not shown: {LINE}" in out
    assert "ranks 0 and 1" in out


def test_the_order_of_a_run_is_that_of_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size in (3, 2):
        for rank in range(size):
            groups = {"D.TP": tuple(range(size))}
            rec = Recorder(ring_path(tmp_path, rank), rank=rank, groups=groups, meta={"size": size}, capacity=256)
            submit(rec, "D 0")
            call(rec, Kind.ENQUEUE, 1)
            rec.close()
    assert cli.main(["check", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == [0, 1]
    assert any(LINE in line for line in told["rings"])
