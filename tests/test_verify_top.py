"""`turnstile top`: where ranks stand, from whole and from followed records; who stands out; the page it serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.record import HOST, Kind, Recorder, RingFollower, read, ring_path
from kernel.record.layout import LISTS
from kernel.request import Phase
from rollout import cli
from verify.live.process import process_state
from verify.top import state, web
from verify.top.follow import Follower
from verify.top.state import RankState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GROUPS = {"D.TP": (0, 1, 2), "P.TP": (0, 1, 2)}


def writer(folder: Path, rank: int, size: int = 3, **options: Any) -> Recorder:
    meta = {"size": size, "policy": "fine", "world": "g3"}
    sizes = {"capacity": 2048, "strings": 1 << 16, **options}
    return Recorder(ring_path(folder, rank), rank=rank, groups=GROUPS, meta=meta, **sizes)


def enter(rec: Recorder, seq: int, tag: str = "pre-d") -> None:
    rec.event(Kind.EXCHANGE_ENTER, seq=seq, b=rec.site(tag))


def leave(rec: Recorder, seq: int, tag: str = "pre-d") -> None:
    rec.event(Kind.EXCHANGE_LEAVE, seq=seq, b=rec.site(tag))


def call(rec: Recorder, kind: Kind, seq: int, group: str = "D.TP") -> None:
    rec.event(kind, Phase.D, "D", rec.group(group), seq, b=rec.site("AR"), site=rec.site("model.py:7 forward"))


def submit(rec: Recorder, label: str) -> None:
    rec.event(Kind.SUBMIT, Phase.D, "D", a=8, b=3, site=rec.site(label))


# -- the state of a rank ---------------------------------------------------------------------------------------------

EVENTS = st.tuples(
    st.sampled_from([kind for kind in Kind if kind not in LISTS]),
    st.sampled_from([None, Phase.D, Phase.P]),
    st.sampled_from([HOST, "D", "P"]),
    st.integers(0, 2),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(-1, 2),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 2),
)


def told(found: RankState) -> dict[str, Any]:
    return {
        name: getattr(found, name)
        for name in ("open", "started", "enqueued", "exchange", "exchanges", "wait", "flying", "round", "epoch",
                     "boundary", "permit", "finished", "exception", "gap_ns", "phase", "pending", "idle", "newest")
    } | {"recent": list(found.recent)}  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.lists(EVENTS, max_size=30), min_size=1, max_size=4))
def test_following_a_record_comes_to_the_same_as_reading_it_at_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[Any]]
) -> None:
    folder = tmp_path_factory.mktemp("follow")
    rec = writer(folder, 0)
    rec.site("a"), rec.site("b"), rec.site("c")
    follower = RingFollower(rec.path)
    followed = RankState(follower.look().recording)
    for part in parts:
        for event in part:
            rec.event(*event)
        later = follower.look()
        assert not later.fresh
        followed.follow(later.recording)
    assert told(followed) == told(RankState(read(rec.path)))


def test_a_late_event_is_not_lost(tmp_path: Path) -> None:
    """A thread that was interrupted in the middle of an event finishes it after the next reading."""
    rec = writer(tmp_path, 0)
    call(rec, Kind.START, 1)
    call(rec, Kind.START, 2)
    whole = read(rec.path)
    followed = RankState(replace(whole, events=whole.events[1:]))
    assert list(followed.open) == [("D.TP", 2)]
    followed.follow(replace(whole, events=whole.events[:1]))
    assert set(followed.open) == {("D.TP", 1), ("D.TP", 2)}


def test_a_ring_that_was_lapped_or_replaced_is_read_anew(tmp_path: Path) -> None:
    rec = writer(tmp_path, 0, capacity=4)
    call(rec, Kind.START, 1)
    follower = Follower(tmp_path)
    assert follower.look().rows[0].operation == "AR D.TP #1"
    for seq in range(2, 700):
        call(rec, Kind.START, seq)
        call(rec, Kind.FINISH, seq)
    frame = follower.look()
    assert not frame.rows[0].open, "what was open before the lap may have ended out of sight"
    assert frame.rows[0].operation == "AR D.TP #699"
    again = writer(tmp_path, 0)
    enter(again, 5)
    assert follower.look().rows[0].operation == "rendezvous pre-d #5"


def test_the_row_says_what_the_rank_has(tmp_path: Path) -> None:
    rec = writer(tmp_path, 0, size=1)
    rec.event(Kind.PLAN, round_=12, epoch=4, b=8)
    rec.event(Kind.BOUNDARY, Phase.P, round_=12, epoch=4, a=0)
    rec.event(Kind.PERMIT, Phase.P, round_=12, epoch=4, a=0, b=2)
    rec.event(Kind.SUBMIT, Phase.P, "P", epoch=4, a=0, b=2, site=rec.site("P e4 [0,2)"))
    rec.event(Kind.SUBMIT, Phase.D, "D", a=8, b=3, site=rec.site("D 12"))
    for seq in (1, 2, 3):
        call(rec, Kind.ENQUEUE, seq)
    call(rec, Kind.START, 1)
    call(rec, Kind.FINISH, 1)
    call(rec, Kind.START, 2)
    rec.event(Kind.BOUNDARY, Phase.P, round_=12, epoch=4, a=2)
    rec.event(Kind.MARK, a=7_500_000, b=rec.site(state.GAP))
    (row,) = Follower(tmp_path).look().rows
    assert (row.round, row.epoch, row.boundary, row.permit, row.phase) == (12, 4, 2, 2, "P+D")
    assert (row.operation, row.open, row.site) == ("AR D.TP #2", True, "model.py:7 forward")
    assert (row.d_queue, row.p_queue, row.pending, row.gap_ms) == (1, 1, 2, 7.5)
    assert row.status == "running"


# -- who stands out --------------------------------------------------------------------------------------------------


def test_the_rank_that_others_wait_for_stands_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recs = [writer(tmp_path, rank) for rank in range(3)]
    for rec in recs:
        enter(rec, 1)
        leave(rec, 1)
    enter(recs[0], 2)
    enter(recs[2], 2)
    follower = Follower(tmp_path, stalled_s=0)
    frame = follower.look()
    assert [row.rank for row in frame.rows if row.blocks] == [1]
    assert frame.waits == ("ranks 0 and 2 wait in rendezvous pre-d #2 for rank 1",)
    assert not frame.cycle
    assert cli.main(["top", str(tmp_path), "--once", "--stalled", "86400"]) == 0
    calm = capsys.readouterr().out
    assert "3 running" in calm
    assert "wait in" not in calm
    enter(recs[1], 2)
    assert not follower.look().waits, "everybody is there, and has only to wake up"


def test_of_a_chain_only_its_end_is_blamed(tmp_path: Path) -> None:
    """Rank 0 waits for ranks 1 and 2, and rank 1 for its device, which waits for rank 2."""
    recs = [writer(tmp_path, rank) for rank in range(3)]
    enter(recs[0], 1)
    submit(recs[1], "D 0")
    call(recs[1], Kind.ENQUEUE, 1)
    call(recs[1], Kind.START, 1)
    recs[1].event(Kind.HOST_WAIT_ENTER, b=recs[1].site("D 0"))
    recs[2].event(Kind.PLAN)
    frame = Follower(tmp_path, stalled_s=0).look()
    assert [row.rank for row in frame.rows if row.blocks] == [2]


def test_a_loop_that_only_notes_its_gap_does_not_move(tmp_path: Path) -> None:
    rec = writer(tmp_path, 0, size=1)
    enter(rec, 1)
    first = Follower(tmp_path).look().rows[0].quiet_s
    rec.event(Kind.MARK, a=5, b=rec.site(state.GAP))
    row = Follower(tmp_path).look().rows[0]
    assert first is not None
    assert row.quiet_s is not None
    assert row.quiet_s >= first
    assert row.quiet_s == row.age_s, "quiet since it entered the rendezvous"


def test_a_ring_is_found_and_told(tmp_path: Path) -> None:
    """Rank 0's device waits in a collective that rank 1's host has not enqueued; that waits in a rendezvous for rank 0,
    whose host waits for its own device."""
    recs = [writer(tmp_path, rank, size=2) for rank in range(3)]
    submit(recs[0], "D 3")
    call(recs[0], Kind.ENQUEUE, 1)
    call(recs[0], Kind.START, 1)
    recs[0].event(Kind.HOST_WAIT_ENTER, b=recs[0].site("D 3"))
    enter(recs[1], 4)
    enter(recs[2], 4)
    call(recs[2], Kind.ENQUEUE, 1)
    call(recs[2], Kind.START, 1)
    frame = Follower(tmp_path, stalled_s=0).look()
    assert {node[1] for node in frame.cycle if node[0] != "op"} == {0, 1}
    assert frame.waits[0].startswith("in a ring: rank ")
    recs[0].event(Kind.HOST_WAIT_LEAVE, b=recs[0].site("D 3"))
    assert not Follower(tmp_path, stalled_s=0).look().cycle


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 3)), max_size=30))
def test_ranks_that_go_on_together_are_in_no_ring(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int]]
) -> None:
    """Any moment of a run in which everybody makes the same calls in the same order: somebody can always go on."""
    folder = tmp_path_factory.mktemp("calm")
    recs = [writer(folder, rank) for rank in range(3)]
    script: list[Any] = []
    for seq in range(1, 5):
        script += [(call, Kind.ENQUEUE, seq), (enter, seq), (leave, seq)]
        script += [(call, Kind.START, seq), (call, Kind.FINISH, seq)]
    at = [0, 0, 0]
    for rank, _, count in steps:
        for _ in range(count):
            if at[rank] == len(script):
                break
            step, *rest = script[at[rank]]
            if step is leave and any(
                all(each != (enter, rest[0]) for each in script[: at[other]]) for other in range(3)
            ):
                break  # not everybody is there
            step(recs[rank], *rest)
            at[rank] += 1
    frame = Follower(folder, stalled_s=0).look()
    assert not frame.cycle
    blocked = {row.rank for row in frame.rows if row.blocks}
    assert all(at[rank] <= max(at) for rank in blocked)
    assert blocked != {0, 1, 2}


def test_a_rank_that_died_failed_or_ended(tmp_path: Path) -> None:
    recs = [writer(tmp_path, rank) for rank in (0, 1)]
    recs[0].close()
    recs[1].event(Kind.EXCEPTION, b=recs[1].site("ValueError: no"))
    program = f"""
        from kernel.record import Kind, Recorder
        rec = Recorder({str(ring_path(tmp_path, 2))!r}, rank=2, groups={{}}, capacity=16, strings=4096)
        rec.event(Kind.PLAN)
        import os; os._exit(3)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, timeout=60)
    frame = Follower(tmp_path).look()
    assert [row.status for row in frame.rows] == ["ended", "failed", "died"]
    assert frame.stalled == (1, 2)
    assert frame.rows[1].exception == "ValueError: no"


def test_a_process_that_is_stopped_is_told_from_one_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(child.pid, 1 << 62) == "T"
        assert process_state(child.pid, -(1 << 62)) == "", "its number belonged to another process then"
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid, 1 << 62) == ""


# -- the command -----------------------------------------------------------------------------------------------------


def test_one_frame_as_json_and_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        enter(writer(tmp_path / "fine", rank), 1)
    assert cli.main(["top", str(tmp_path), "--json", "--stalled", "60"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == [1]
    assert [row["rank"] for row in found["ranks"]] == [0, 2]
    assert set(found) == {"run", "about", "ended", "stalled", "missing", "cycle", "waits", "ranks", "check", "hosts",
                          "stale"}  # fmt: skip
    assert cli.main(["top", str(tmp_path)]) == 0  # no terminal: one frame
    text = capsys.readouterr().out
    assert "no record of rank 1" in text
    assert re.search(r"^ +2 +running .*in rendezvous pre-d #1", text, re.MULTILINE)


def test_unusable_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer(tmp_path, 0)
    for arguments, said in (
        ([str(tmp_path / "absent"), "--once"], "no such directory"),
        ([str(tmp_path), "--once", "--web"], "not allowed with"),
        ([str(tmp_path), "--port", "80"], "give --web as well"),
        ([str(tmp_path), "--web", "--port", "70000"], "from 0 to 65535"),
        ([str(tmp_path), "--every", "nan"], "from 0.05 to 3600"),
        ([str(tmp_path), "--stalled", "x"], "invalid float"),
    ):
        assert cli.main(["top", *arguments]) == 2
        out, err = capsys.readouterr()
        assert said in err
        assert err.count("\n") == 1
        assert not out


# -- the page --------------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = web.make_server(Follower(folder, stalled_s=0), 0, 0.2)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def get(url: str, host: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def stuck_run(folder: Path) -> None:
    recs = [writer(folder, rank) for rank in range(3)]
    hostile = "<script>alert(1)</script>"
    for rec in recs:
        for number in range(3):
            label = rec.site(f"D {number}")
            for kind in (Kind.SUBMIT, Kind.WORK_START, Kind.WORK_FINISH):
                rec.event(kind, Phase.D, "D", a=4, b=2, site=label)
    for rec in recs[:2]:
        enter(rec, 1, hostile)
        call(rec, Kind.ENQUEUE, 1)
        call(rec, Kind.START, 1)


def test_the_page_is_served_to_this_machine_only(tmp_path: Path) -> None:
    stuck_run(tmp_path)
    with served(tmp_path) as url:
        code, page = get(f"{url}/")
        assert code == 200
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert(1)" in page
        assert not re.search(r"(?:src|href)=\"(?!data:)", page)
        assert "rank 2" in page
        assert get(f"{url}/body")[1] in page or "<h1>" in get(f"{url}/body")[1]
        assert json.loads(get(f"{url}/state.json")[1])["ranks"][0]["open"] is True
        assert get(f"{url}/etc/passwd")[0] == 404
        assert get(f"{url}/", host="evil.example")[0] == 403
        assert get(f"{url}/", host="localhost:1234")[0] == 200
    with pytest.raises(web.UsageError, match="choose another one"), served(tmp_path) as url:
        web.make_server(Follower(tmp_path), int(url.rpartition(":")[2]), 1)


@pytest.mark.parametrize(
    ("host", "ours"),
    [("127.0.0.1:80", True), ("[::1]:80", True), ("localhost", True), ("", False), ("10.0.0.1", False),
     ("127.0.0.1.evil.example", False), ("localhost.evil.example:80", False)],
)  # fmt: skip
def test_names_of_this_machine(host: str, ours: bool) -> None:
    assert web.local(host) is ours


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a headless Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    stuck_run(tmp_path)
    with served(tmp_path) as url:
        shown = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", f"{url}/"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert "keeps others waiting" in shown.stdout
    assert shown.stdout.count("<svg") == 2
    assert "Content Security Policy" not in shown.stderr
    assert "Uncaught" not in shown.stderr


def test_the_graph_names_what_is_lacking(tmp_path: Path) -> None:
    stuck_run(tmp_path)
    graph = Follower(tmp_path).look().graph
    (op,) = (node for node in graph if graph.nodes[node].get("label") == "AR D.TP #1")
    assert set(graph.predecessors(op)) == {("device", 0, "D"), ("device", 1, "D")}
    assert set(graph.successors(op)) == {("host", 2, "")}


def test_what_is_queued_behind_a_call_is_left_out_and_makes_nobody_a_root(tmp_path: Path) -> None:
    """Rank 0 waits for D 1, which stands behind D 0, which rank 1 has not launched."""
    recs = [writer(tmp_path, rank, size=2) for rank in range(2)]
    for seq in (1, 2):
        submit(recs[0], f"D {seq - 1}")
        call(recs[0], Kind.ENQUEUE, seq)
    recs[0].event(Kind.HOST_WAIT_ENTER, b=recs[0].site("D 1"))
    enter(recs[1], 1)
    frame = Follower(tmp_path, stalled_s=0).look()
    assert frame.check is not None
    assert not any(row.blocks for row in frame.rows)
    calls = Follower(tmp_path, stalled_s=0)
    recs[1].event(Kind.EXCHANGE_LEAVE, seq=1, b=recs[1].site("pre-d"))
    frame = calls.look()
    assert [row.rank for row in frame.rows if row.blocks] == [1]
    submit(recs[0], "D 2")
    call(recs[0], Kind.ENQUEUE, 3)
    assert not any("#3" in line for line in calls.look().waits)
