"""Real dumps of finished and stuck jobs: each gets its verdict, in one report of at most 25 lines."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel.errors import UsageError
from kernel.record import GraphCall, Kind, Recorder, ring_path
from rollout.cli import main
from verify import words
from verify.blame import Certainty, Class
from verify.events import Site
from verify.hang.diagnosis import Diagnosis, diagnose_found
from verify.hang.text import as_text
from verify.readers.found import LOOK_AGAIN, Found, Stack
from verify.readers.gather import gather, merge
from verify.readers.lines import brief

DUMPS = Path(__file__).parent / "data" / "fr"
H200, MEGATRON = DUMPS / "h200", DUMPS / "megatron16"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["hang", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.err == "" or code == 2
    return code, captured.out if code != 2 else captured.err


@pytest.mark.parametrize(
    ("scenario", "code", "cls", "certainty", "ranks"),
    [
        ("h200/consistent", 0, "none", "certain", []),
        ("h200/crossed_async_completes", 0, "none", "certain", []),
        ("h200/crossed_residency_resolved", 0, "none", "certain", []),
        ("h200/crossed_same_stream_graph", 3, "below", "undecided", []),
        ("h200/host_blocked", 3, "none", "undecided", []),
        ("h200/missing_member", 1, "missing", "conditional", [1]),
        ("h200/op_mismatch", 1, "mismatch", "certain", []),
        ("h200/size_mismatch_completes", 1, "mismatch", "certain", []),
        ("megatron16/lock_gil", 1, "missing", "conditional", [9, 14]),
        ("megatron16/gpu_error", 1, "device_stall", "conditional", [12, 14]),
    ],
)
def test_the_verdict_on_real_dumps(
    scenario: str, code: int, cls: str, certainty: str, ranks: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    got, text = run(capsys, "--json", DUMPS / scenario)
    answer: dict[str, Any] = json.loads(text)
    assert list(answer) == ["class", "certainty", "ranks", "chain", "say", "fix", "unknown"]
    assert (got, answer["class"], answer["certainty"], answer["ranks"]) == (code, cls, certainty, ranks)
    assert any("graph replays" in line for line in answer["unknown"])
    again, text = run(capsys, DUMPS / scenario)
    lines = text.splitlines()
    assert again == code
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 120
    assert text.count("verdict") == 1


@pytest.mark.parametrize("fault", ["lock_gil", "gpu_error"])
def test_the_truth_about_the_injected_faults_is_not_read(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted((MEGATRON / fault).glob("_dump_*"))
    assert len(files) == 16
    truth = (MEGATRON / fault / "fault_injection.log").read_text()
    code, text = run(capsys, "--json", *reversed(files))
    assert code == 1
    assert f"Fault ranks: {json.loads(text)['ranks']}" in truth


def test_what_the_sentences_say(capsys: pytest.CaptureFixture[str]) -> None:
    say = json.loads(run(capsys, "--json", H200 / "op_mismatch")[1])["say"]
    assert "all_reduce" in say
    assert "broadcast" in say
    assert "rank 0" in say
    assert "rank 1" in say
    say = json.loads(run(capsys, "--json", H200 / "size_mismatch_completes")[1])["say"]
    assert "[4194304] Float on rank 0" in say
    assert "[2097152] Float on rank 1" in say
    assert "graph replays" in json.loads(run(capsys, "--json", H200 / "crossed_same_stream_graph")[1])["say"]
    assert "no dump from rank 0, nothing open on rank 1" in run(capsys, H200 / "host_blocked")[1]
    assert "probe/hang.py:29 in P" in run(capsys, H200 / "missing_member")[1]


TORCH = "/usr/lib/python3.12/site-packages/torch"
WAITS_FOR_ITS_DEVICE = (
    Site(f"{TORCH}/cuda/__init__.py", 1083, "synchronize"), Site("probe/hang.py", 49, "<module>"),
)  # fmt: skip
WAITS_FOR_A_KEY = (
    Site("libc.so.6", 0, "__poll"), Site("libtorch_cpu.so", 0, "c10d::TCPStore::doWait"),
    Site("libtorch_cpu.so", 0, "c10d::PrefixStore::wait"), Site("probe/hang.py", 52, "<module>"),
)  # fmt: skip


def stacks(**frames: tuple[Site, ...]) -> Found:
    """Stacks of main threads: r0=..., r1=..."""
    return Found("stacks", stacks=tuple(Stack(int(rank[1:]), "MainThread", each) for rank, each in frames.items()))


def with_stacks(scenario: str, **frames: tuple[Site, ...]) -> Diagnosis:
    return diagnose_found(merge([gather([H200 / scenario]), stacks(**frames)]))


def test_stacks_close_the_ring_that_dumps_cannot_show() -> None:
    """Rank 0 waits for its device and then would set the key; rank 1 waits for the key and then would enter."""
    found = with_stacks("host_blocked", r0=WAITS_FOR_ITS_DEVICE, r1=WAITS_FOR_A_KEY)
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (1, Class.CYCLE, (0, 1))
    assert found.verdict.certainty is Certainty.CONDITIONAL
    assert [line.partition(" waits")[0] for line in found.verdict.chain] == ["rank 0", "rank 1"]
    assert "probe/hang.py:49" in found.verdict.chain[0]
    assert "probe/hang.py:52" in found.verdict.chain[1]
    assert not any("no dump" in line for line in found.unknown)
    assert "not called" not in as_text(found)


def test_stack_files_beside_the_dumps_close_the_ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same, as an engineer has it: dumps and what `py-spy dump --native` printed, in one folder."""
    shutil.copytree(H200 / "host_blocked", tmp_path / "job")
    for rank, frames in enumerate((WAITS_FOR_ITS_DEVICE, WAITS_FOR_A_KEY)):
        lines = [f"    {site.function} ({site.file}{f':{site.line}' if site.line else ''})" for site in frames]
        (tmp_path / "job" / f"rank{rank}.txt").write_text(
            f'Process {70 + rank}: python probe/hang.py\nPython v3.12.1 (/usr/bin/python3.12)\n\n'
            f'Thread {70 + rank} (idle): "MainThread"\n' + "\n".join(lines) + "\n"
        )
    code, text = run(capsys, "--json", tmp_path / "job")
    answer = json.loads(text)
    assert (code, answer["class"], answer["ranks"]) == (1, "cycle", [0, 1])
    assert "probe/hang.py:49" in answer["say"]
    assert "probe/hang.py:52" in answer["say"]
    assert answer["say"].endswith("Only if what ranks 0 and 1 wait for is up to another rank of the job.")
    code, text = run(capsys, tmp_path / "job")
    assert (code, len(text.splitlines()) <= 25) == (1, True)


@pytest.mark.parametrize("opposite", [True, False])
def test_our_record_shows_the_crossing_with_a_graph(
    opposite: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of crossed_same_stream_graph under our record: P's all_reduce and a graph of D on one stream."""
    for rank in range(2):
        groups = {"P.TP": (0, 1), "D.TP": (0, 1)}
        ring = Recorder(ring_path(tmp_path, rank), rank=rank, groups=groups, meta={"size": 2}, clock=lambda: 1)
        graph = ring.graph([GraphCall("AG", "D.TP", 64)])
        for kind in (Kind.ENQUEUE, Kind.GRAPH_LAUNCH)[:: -1 if opposite and rank else 1]:
            if kind is Kind.ENQUEUE:
                line = ring.site("probe/cross.py:39 P")
                ring.event(kind, "P", "D", ring.group("P.TP"), 1, a=64, b=ring.site("AR"), site=line)
            else:
                ring.event(kind, "D", "D", a=1, b=graph, site=ring.site("probe/cross.py:44 D"))
        ring.event(Kind.HOST_WAIT_ENTER, b=ring.site("P device"))
        del ring
    code, text = run(capsys, "--json", tmp_path)
    answer = json.loads(text)
    if opposite:
        assert (code, answer["class"], answer["ranks"]) == (1, "cycle", [0, 1])
        assert "all_gather" in answer["say"]
        assert "all_reduce" in answer["say"]
    else:
        assert answer["class"] != "cycle"


def test_the_page_does_not_say_what_no_record_tells(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 has left stacks only: whether it made the calls of rank 1 is not known, and the page names its waits."""
    page = run(capsys, H200 / "host_blocked", DUMPS.parent / "joined" / "host_blocked", "--html", "-")[1]
    assert "rank 0 has not called Call" not in page
    assert "rank 0 has not called What rank 1 waits for (a key of the store)" in page
    assert ">a key of the store<" in page
    assert "? store" not in page
    assert "rank 1 has not called Call 2 on P_full_tp" in run(capsys, H200 / "missing_member", "--html", "-")[1]


def test_a_stack_is_no_record_of_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 stands in a line that may be in the very call that it seems to lack."""
    (tmp_path / "rank1.txt").write_text(
        'Process 71: python train.py\nPython v3.12.1 (/usr/bin/python3.12)\n\nThread 71 (idle): "MainThread"\n'
        "    train (train.py:9)\n"
    )
    code, text = run(capsys, "--json", H200 / "missing_member" / "dump_rank_0", tmp_path / "rank1.txt")
    assert (code, json.loads(text)["ranks"]) == (3, [])
    code, text = run(capsys, H200 / "missing_member" / "dump_rank_0", tmp_path / "rank1.txt")
    assert "no evidence" in text
    assert "not called" not in text


def test_half_of_the_stacks_closes_no_ring() -> None:
    key = with_stacks("host_blocked", r1=WAITS_FOR_A_KEY)
    assert key.verdict.cls is not Class.CYCLE
    assert 0 not in key.verdict.ranks
    device = with_stacks("host_blocked", r0=WAITS_FOR_ITS_DEVICE)
    assert (device.code, device.verdict.ranks) == (3, ())
    own_line = (Site("probe/hang.py", 52, "<module>"),)
    unclear = with_stacks("host_blocked", r0=WAITS_FOR_ITS_DEVICE, r1=own_line)
    assert (unclear.code, unclear.verdict.ranks) == (3, ())
    assert any("probe/hang.py:52" in line for line in unclear.unknown)


def test_a_stack_says_what_keeps_a_member_away() -> None:
    reads = (Site("/usr/lib/python3.12/gzip.py", 90, "read"), Site("data.py", 7, "load"))
    found = with_stacks("missing_member", r1=reads)
    assert (found.code, found.verdict.cls, found.verdict.ranks) == (1, Class.OUTSIDE, (1,))
    assert "data.py:7 in load" in found.verdict.say
    unclear = with_stacks("missing_member", r1=(Site("data.py", 7, "load"),))
    assert (unclear.verdict.cls, unclear.verdict.ranks) == (Class.MISSING, (1,))
    assert "stands at data.py:7" in unclear.verdict.say


def test_a_rank_whose_device_waits_for_what_no_dump_shows_is_not_blamed() -> None:
    """Rank 1 has nothing open, and stands in a device wait: for a graph replay, perhaps."""
    found = with_stacks("missing_member", r1=WAITS_FOR_ITS_DEVICE)
    assert found.verdict.certainty is not Certainty.CERTAIN
    assert found.code != 1 or found.verdict.cls is Class.CYCLE


def test_a_recorder_of_everything_decides_what_dumps_cannot() -> None:
    """All arrived and equal, and everything that can wait was recorded: not a fault of order, unless it is slow."""
    found = replace(gather([H200 / "crossed_same_stream_graph"]), whole=frozenset({0, 1}))
    answer = diagnose_found(found)
    assert (answer.code, answer.verdict.cls, answer.verdict.certainty) == (1, Class.BELOW, Certainty.CONDITIONAL)
    late = diagnose_found(replace(found, overdue=frozenset({0, 1}))).verdict
    assert (late.cls, late.certainty) == (Class.BELOW, Certainty.CERTAIN)


def test_lines_of_the_program_are_quoted_where_they_are_here(tmp_path: Path) -> None:
    program = tmp_path / "data.py"
    program.write_text("import time\nrows = store.get('rows')\n")
    found = with_stacks("host_blocked", r0=WAITS_FOR_ITS_DEVICE, r1=(Site(str(program), 2, "<module>"),))
    assert found.verdict.cls is Class.CYCLE
    text = as_text(found)
    assert "rows = store.get('rows')" in text


@pytest.mark.parametrize(
    ("line", "outside"),
    [
        ("rows = os.read(pipe, 1)", True), ("time.sleep(3600)", True), ("lock.acquire()", True),
        ("data = file.read()", True), ("subprocess.run(command)", True), ("answer = input()", True),
        ("loss.backward()", False), ("dist.broadcast(torch.tensor(file.read()), 0)", False), ("step()", False),
        ("work.wait()", False), ("with self.lock:", True), ("with LOCKS[0]: pass", True), ("with context:", False),
        ("with lock: step()", False),
    ],
)  # fmt: skip
def test_a_line_that_blocks_is_outside(line: str, outside: bool, tmp_path: Path) -> None:
    """A stack of Python frames ends in the line that called into C."""
    program = tmp_path / "train.py"
    program.write_text(f"{line}\n")
    found = with_stacks("missing_member", r1=(Site(str(program), 1, "load"),))
    assert (found.code, found.verdict.ranks) == (1, (1,))
    assert ("blocked outside collectives" in found.verdict.say) is outside
    assert "train.py:1" in found.verdict.say


@pytest.mark.parametrize(
    ("line", "waits", "what"),
    [
        ("if KIND == 'sleep': time.sleep(45)", "", "in time.sleep at"),
        ("if KIND == 'sleep': time.sleep(45)", "hrtimer_nanosleep", "in a sleep at"),
        ("x = f(subprocess.run(command))", "", "in subprocess.run at"),
        ("with L: pass", "futex_do_wait", "in a lock, L at"),
        ("with self.a[0]:  # ours", "futex_wait_queue", "in a lock, self.a[0] at"),
        ("with L: dist.all_reduce(x)", "futex_do_wait", ""),
        ("with L:", "do_epoll_wait", ""),
        ("x = f()", "futex_do_wait", ""),
    ],
)
def test_what_keeps_a_rank_is_named_not_quoted(line: str, waits: str, what: str, tmp_path: Path) -> None:
    """The line's source stands below; a report says which function, or lock, or wait of the kernel it is."""
    program = tmp_path / "train.py"
    program.write_text(f"{line}\n")
    kernel = (Site("[kernel]", 0, waits),) if waits else ()
    found = with_stacks("missing_member", r1=(*kernel, Site(str(program), 1, "load")))
    assert ("blocked outside collectives" in found.verdict.say) is bool(what)
    assert what in found.verdict.say
    assert line not in found.verdict.say


def test_an_undecided_report_says_what_would_decide_it() -> None:
    """No advice of a class that is not decided."""
    answer = diagnose_found(gather([H200 / "crossed_same_stream_graph"]))
    assert (answer.verdict.certainty, answer.verdict.fix) == (Certainty.UNDECIDED, words.DECIDE)


def test_what_is_certain_does_not_ask_to_look_again() -> None:
    line = f"record: rank 0: moved 1.0 s ago: {LOOK_AGAIN}"
    found = gather([H200 / "op_mismatch"])
    certain = diagnose_found(replace(found, unknown=(*found.unknown, line)))
    assert certain.verdict.certainty is Certainty.CERTAIN
    assert line not in certain.unknown
    found = gather([H200 / "crossed_same_stream_graph"])
    undecided = diagnose_found(replace(found, unknown=(*found.unknown, line)))
    assert line in undecided.unknown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RuntimeError: [/a/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:58. This is\ntypically",
         "RuntimeError: Connection closed by peer"),
        ("ValueError: bad batch", "ValueError: bad batch"),
        ("E: " + "x" * 100, "E: " + "x" * 65 + ".."),
    ],
)  # fmt: skip
def test_an_exception_in_one_line(text: str, said: str) -> None:
    assert brief(text) == said


@pytest.mark.parametrize(
    ("inner", "what"),
    [
        ([("lock_PyThread_acquire_lock", "libpython3.11.so.1.0")], "a lock"),
        ([("lock_PyThread_acquire_lock", "python3.11"), ("Queue.get", "lib/python3.11/queue.py")], "Queue.get"),
        ([("time_sleep", "libpython3.11.so.1.0")], "time_sleep"),
    ],
)
def test_an_address_is_no_name(inner: list[tuple[str, str]], what: str) -> None:
    """py-spy --native shows what it finds no symbol for by its address."""
    below = [("0x7f749cca3f16", "libc.so.6"), ("0x7f749ccaed90", "libc.so.6"), *inner]
    frames = (*(Site(file, 0, name) for name, file in below), Site("train.py", 12, "main"))
    found = with_stacks("missing_member", r1=frames)
    # What waits for its own threads, or the clock, is blocked by nothing outside.
    assert found.verdict.cls is Class.MISSING
    assert f"in {what} at train.py:12" in found.verdict.say


def test_arguments_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = run(capsys)
    assert (code, line.count("\n")) == (2, 1)
    assert run(capsys, "--jsno", ".")[1].count("--json") == 1
    for bad in (tmp_path, tmp_path / "nowhere", DUMPS / "h200", "/dev/zero"):
        code, line = run(capsys, bad)
        assert (code, line.count("\n")) == (2, 1), line
        assert str(bad) in line
    shutil.copy(H200 / "missing_member" / "dump_rank_0", tmp_path / "dump")
    with pytest.raises(UsageError, match="cannot tell its rank"):
        gather([tmp_path / "dump"])
