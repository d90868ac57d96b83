"""`turnstile hang` on evidence that is poor, damaged, of two jobs, or in the way of its own output."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.errors import UsageError
from kernel.journal import Journal
from kernel.record import Recorder, ring_path
from verify import words
from verify.blame import Class
from verify.events import Communicator, Event, Kind, Site
from verify.hang import main
from verify.hang.diagnosis import diagnose_found
from verify.readers.found import Found, Stack
from verify.readers.gather import gather

DATA = Path(__file__).parent / "data"
DUMPS = DATA / "fr" / "h200" / "missing_member"
MEGATRON = DATA / "fr" / "megatron16" / "lock_gil"


def hang(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and what was printed."""
    code = main("hang", [str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def run(folder: Path, *ranks: int) -> Path:
    """A run's directory with rings of these ranks."""
    for rank in ranks:
        path = ring_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        Journal(Recorder(path, rank=rank, groups={"P.TP": (0, 1)}, capacity=64)).close()
    return folder


@pytest.mark.parametrize("name", ["locals.txt", "native.txt", "spy.json", "rank1.txt", "rank0.txt"])
def test_stacks_alone_are_no_all_clear(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = hang(capsys, "--json", DATA / "stacks" / name)
    assert code == 3
    assert json.loads(out)["certainty"] == "undecided"


def test_a_process_that_shows_nothing_is_no_all_clear(capsys: pytest.CaptureFixture[str]) -> None:
    rank = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=rank)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # who still starts may show no stack at all
        code, out = hang(capsys, "--pid", process.pid)
    finally:
        process.kill()
        process.communicate()
    assert code == 3
    told = " ".join(out.split())
    assert "no stack stands in a call" in told or "stacks alone do not show that calls meet" in told


def test_damaged_dumps_beside_others_cost_only_what_they_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 3 and 4 have no part in the fault of ranks 9 and 14."""
    shutil.copytree(MEGATRON, tmp_path / "job")
    os.truncate(tmp_path / "job" / "_dump_3", 500)
    os.truncate(tmp_path / "job" / "_dump_4", 0)
    code, out = hang(capsys, "--json", tmp_path / "job")
    found = json.loads(out)
    assert (code, found["class"], found["ranks"]) == (1, "missing", [9, 14])
    told = [line for line in found["unknown"] if line.startswith("not used: ")]
    assert len(told) == 2
    assert "no dump, log or stack from ranks 3 and 4" in found["unknown"]
    for name in ("_dump_3", "_dump_4"):  # named, it was meant
        with pytest.raises(UsageError, match=f"{name}: (damaged|empty)"):
            hang(capsys, tmp_path / "job" / name)


def test_an_unsafe_dump_is_refused_wherever_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DUMPS, tmp_path / "job")
    (tmp_path / "job" / "dump_rank_2").write_bytes(b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00idtR.")
    with pytest.raises(UsageError, match="dump_rank_2: unsafe pickle, not loaded"):
        hang(capsys, tmp_path / "job")


def test_a_page_is_never_written_over_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DUMPS, tmp_path / "job")
    dump, page = tmp_path / "job" / "dump_rank_0", tmp_path / "page.html"
    before = dump.read_bytes()
    with pytest.raises(UsageError, match="dump_rank_0: it exists and is no page"):
        hang(capsys, tmp_path / "job", "--html", dump)
    assert dump.read_bytes() == before
    for _ in range(2):  # an older page may be replaced
        assert hang(capsys, DUMPS, "--html", page)[0] == 1
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_two_runs_are_not_taken_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run(tmp_path / "all" / "one", 0, 1), run(tmp_path / "all" / "other", 1)
    with pytest.raises(UsageError, match="both hold rank 1: name the record of one run"):
        hang(capsys, one, other)
    with pytest.raises(UsageError, match=r"all: it holds 2 runs: name one of them: one, other$"):
        hang(capsys, tmp_path / "all")


def test_records_of_two_hosts_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = hang(capsys, run(tmp_path / "here", 0), run(tmp_path / "there", 1))
    assert code in (0, 3)
    assert "no dump, log or stack" not in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["--json", str(DUMPS)], [str(DUMPS)]])
def test_output_that_cannot_be_written_is_one_line_and_no_verdict(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "turnstile", "hang", *arguments], stdout=full, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent, timeout=120, check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "the output cannot be written (No space left on device)" in ended.stderr


def test_a_page_on_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = hang(capsys, DUMPS, "--html", "-")
    assert code == 1
    assert out.startswith("<!doctype html>")
    assert out.endswith("</html>\n")
    assert "verdict   " not in out
    assert not Path("-").exists()
    for arguments in (("--html", "-", "--json"), ("--html", "")):
        with pytest.raises(UsageError, match="--html"):
            hang(capsys, DUMPS, *arguments)


@pytest.mark.parametrize(("command", "out"), [("trace", "-"), ("trace", "/dev/stdout"), ("hang", "-")])
def test_a_reader_that_leaves_ends_a_command_without_a_word(tmp_path: Path, command: str, out: str) -> None:
    """As `turnstile trace -o - RUN | head -1`."""
    path = ring_path(tmp_path, 0)
    path.parent.mkdir(parents=True)
    journal = Journal(Recorder(path, rank=0, groups={"P.TP": (0,)}, capacity=20_000))
    for number in range(9_000):
        journal.exchange(f"a tag of some length, number {number % 7}", leaves=number % 2 == 1)
    journal.close()
    arguments = ["-o", out, str(tmp_path)] if command == "trace" else [str(DUMPS), "--html", out]
    process = subprocess.Popen(
        [sys.executable, "-m", "turnstile", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if command == "trace":
            process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(120) == 1
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert error == b""


def test_logs_of_ranks_are_one_job_however_they_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As torchrun lays them out: rank 1 wrote no line of a watchdog; nothing proves that it did not call."""
    line = (
        "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn={1},"
        " NumelOut={1}, Timeout(ms)=600000) ran for 600096 milliseconds before timing out.\n"
        "[PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure detected by watchdog at work sequence id: 5 PG status: last"
        " enqueued work: 5, last completed work: 4\n"
    )
    files = []
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        files.append(tmp_path / str(rank) / "stderr.log")
        files[-1].write_text(line.format(rank, 8) if rank != 1 else "step 4\n")
    code, out = hang(capsys, "--json", *files)
    found = json.loads(out)
    assert (code, found["class"], found["certainty"], found["ranks"]) == (3, "missing", "undecided", [])
    assert "rank 1" in found["say"]
    files[1].write_text(line.format(1, 9))
    code, out = hang(capsys, "--json", *files)
    found = json.loads(out)
    assert (code, found["class"], found["ranks"]) == (1, "mismatch", [1])
    files[1].write_text("step 4\n")
    with pytest.raises(UsageError, match="no format that is known"):
        hang(capsys, files[1])


def test_a_traceback_in_the_log_of_a_rank_explains_why_it_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DUMPS, tmp_path / "job")
    (tmp_path / "job" / "a_rank1.log").write_text(
        "step 4\nTraceback (most recent call last):\n  File \"train.py\", line 4, in step\nKeyError: 'loss'\n"
    )
    code, out = hang(capsys, "--json", tmp_path / "job")
    found = json.loads(out)
    assert (code, found["class"], found["ranks"]) == (1, "exception", [1])
    assert "KeyError" in found["say"]


def test_logs_alone_of_ranks_that_failed_after_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What gloo's ranks write when one of them raises: the others lose their connection to it."""
    library = '  File "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce\n'
    lost = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:58{0}. Check.\n"
    for rank in range(4):
        text = 'Traceback (most recent call last):\n  File "dies.py", line 6, in train\n'
        text += "ValueError: bad batch at step 7\n" if rank == 2 else library + lost.format(rank)
        (tmp_path / f"rank{rank}.log").write_text(text)
    code, out = hang(capsys, "--json", tmp_path)
    found = json.loads(out)
    assert (code, found["class"], found["certainty"], found["ranks"]) == (1, "exception", "conditional", [2])
    assert "Rank 2 left by ValueError: bad batch at step 7 at dies.py:6 in train" in found["say"]
    assert "ranks 0, 1 and 3 failed after that: RuntimeError: Connection closed by peer." in found["say"]
    # Without anybody that failed after it, nobody is known to wait for it.
    for rank in (0, 1, 3):
        (tmp_path / f"rank{rank}.log").write_text("step 7\n")
    code, out = hang(capsys, "--json", tmp_path)
    assert (code, json.loads(out)["certainty"]) == (3, "undecided")


def test_a_log_that_holds_lines_of_several_kinds_is_read_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job's stderr: NCCL's lines of both ranks, and rank 1's traceback."""
    who = "host0:{0}:{0} [0] NCCL INFO"
    call = " AllReduce: opCount 1e sendbuff 0x7f recvbuff 0x7e count 8 datatype 7 op 0 root 0 comm 0xc{0} [nranks=2]"
    init = " ncclCommInitRankConfig comm 0xc{0} rank {0} nranks 2 cudaDev 0 commId 0xfeed"
    both = (init, f"{call} stream 0x5")
    lines = [f"[rank{rank}]: {(who + text).format(rank)}\n" for text in both for rank in (0, 1)]
    lines += [lines[2], "[rank1]: Traceback (most recent call last):\n", "[rank1]: KeyError: 'loss'\n"]
    (tmp_path / "stderr.log").write_text("".join(lines))
    code, out = hang(capsys, "--json", tmp_path / "stderr.log")
    found = json.loads(out)
    assert (code, found["class"], found["ranks"]) == (1, "exception", [1])
    assert "all_reduce (call 2 on 0xfeed)" in found["say"]


def test_calls_of_groups_with_one_known_member_are_no_fault_below() -> None:
    """gloo's dumps do not list members: two ranks that cross at the first use of two groups are each alone in one."""
    events = tuple(
        Event(rank, Kind.COLLECTIVE, "all_reduce", medium="gloo", communicator=Communicator((rank,), str(rank + 1)))
        for rank in (0, 1)
    )
    both = frozenset({0, 1})
    answer = diagnose_found(Found("dumps", events=events, present=both, expected=both))
    assert (answer.code, answer.verdict.cls, answer.verdict.ranks) == (3, Class.NONE, ())
    assert "rank 0 waits in all_reduce (call 1 on 1)" in answer.verdict.say
    assert "they wait in a ring" in answer.verdict.say
    assert answer.verdict.fix == words.DECIDE


@pytest.mark.parametrize(("lines", "odd"), [([9, 9, 11], 2), ([9, 11, 11], 0), ([9, 11], None), ([9, 9, 11, 11], None)])
def test_stacks_alone_point_at_nobody(lines: list[int], odd: int | None) -> None:
    torch = Site("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce")
    stacks = tuple(
        Stack(rank, "MainThread", (torch, Site("train.py", line, "main"))) for rank, line in enumerate(lines)
    )
    answer = diagnose_found(Found("stacks", expected=frozenset(range(len(lines))), stacks=stacks))
    assert (answer.code, answer.verdict.ranks) == (3, ())
    # The one that stands alone may be through with a call that the others cannot end, as a broadcast of another root.
    assert "odd one" not in answer.verdict.say
    assert ("alone may be ahead of the others, or behind" in answer.verdict.say) is (odd is not None)
    assert odd is None or f"rank {odd} alone" in answer.verdict.say


@pytest.mark.parametrize(("what", "both"), [("Event.wait", True), ("Queue.get", True), ("Socket.send", False)])
def test_a_rank_that_may_have_left_its_loop_gets_the_advice_for_that_too(what: str, both: bool) -> None:
    group = Communicator((0, 1), "world")
    call = Event(0, Kind.COLLECTIVE, "all_reduce", communicator=group)
    frames = (Site("/lib/python3.11/site-packages/x.py", 1, what), Site("train.py", 30, "main"))
    ranks = frozenset({0, 1})
    found = Found("both", (call,), ranks, ranks, (Stack(1, "MainThread", frames),), whole=ranks)
    answer = diagnose_found(found)
    # As its record alone would say it: nothing outside blocks it.
    assert (answer.verdict.cls, answer.verdict.ranks) == (Class.MISSING if both else Class.OUTSIDE, (1,))
    assert ("let every member make the call" in answer.verdict.fix) is both
    assert "deadline" in answer.verdict.fix


def test_what_an_absent_rank_has_not_left_is_of_the_kind_that_others_left() -> None:
    stacks = tuple(Stack(rank, "MainThread", (Site("train.py", 9, "main"),)) for rank in (0, 1))
    ranks = frozenset({0, 1, 2})
    assert "no stack from rank 2" in diagnose_found(Found("pids", expected=ranks, stacks=stacks)).verdict.say
    call = Event(0, Kind.COLLECTIVE, "all_reduce", communicator=Communicator((0, 2), "world"))
    here = frozenset({0, 1})
    assert "no record from rank 2" in diagnose_found(Found("record", (call,), here, ranks, whole=here)).verdict.say
    assert "no dump from rank 2" in diagnose_found(Found("dumps", (call,), here, ranks)).verdict.say


TRACE = 'Traceback (most recent call last):\n  File "train.py", line 20, in main\n    load()\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rank1.log", TRACE),
        ("ras.json", '{"nccl_version":"2","communicators_count":1,"communicators":[{'),
        ("rank0.ring", "x" * 10),
        ("spy.json", '[{"pid": 71, "thread_name": "MainThread", "frames": [{"name'),
    ],
)
@pytest.mark.parametrize("second", [False, True])
def test_one_odd_file_beside_good_dumps_is_left_out(
    name: str, content: str, second: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "evidence"
    shutil.copytree(DUMPS, folder)
    (folder / name).write_text(content)
    if second:
        shutil.copy(DATA / "stacks" / "rank0.txt", folder / "rank0.txt")
    code, out = hang(capsys, "--json", folder)
    found = json.loads(out)
    assert (code, found["class"], found["ranks"]) == (1, "missing", [1])
    assert any(line.startswith("not used: ") and name in line for line in found["unknown"])
    with pytest.raises(UsageError, match=name):
        gather([folder / name])


def test_an_unsafe_dump_beside_good_ones_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DUMPS, tmp_path / "evidence")
    (tmp_path / "evidence" / "dump_rank_7").write_bytes(pickle.dumps(Path))
    with pytest.raises(UsageError, match="unsafe pickle"):
        gather([tmp_path / "evidence"])
