"""Stacks as py-spy and faulthandler print them; the files in data/stacks are real output of py-spy 0.4.3."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from tests.reading import read_or_line
from verify.events import Kind, Site
from verify.readers.found import Stack
from verify.readers.stacks import READER, rank_of_title
from verify.readers.standing import own_frame, stands_in

DATA = Path(__file__).parent / "data" / "stacks"


def recognised(path: Path) -> bool:
    return READER.recognises(path, path.read_bytes()[:4096])


def test_a_gloo_job_one_rank_in_a_collective_and_one_in_a_file() -> None:
    found = [READER.read(DATA / f"rank{rank}.txt") for rank in range(2)]
    assert all(recognised(DATA / f"rank{rank}.txt") for rank in range(2))
    (first,), (second,) = (each.stacks for each in found)
    assert (first.rank, first.thread, first.holds_gil) == (0, "MainThread", False)
    assert first.frames[0] == Site("torch/distributed/distributed_c10d.py", 3252, "all_reduce")
    assert (second.rank, str(second.frames[0])) == (1, "g.py:7 in step")
    inside, outside = stands_in(first), stands_in(second)
    assert inside is not None
    assert outside is not None
    assert (inside.kind, inside.operation, inside.blocking, str(inside.site)) == (
        Kind.COLLECTIVE,
        "all_reduce",
        True,
        "g.py:5 in step",
    )
    assert (outside.kind, str(outside.site)) == (Kind.EXTERNAL, "g.py:7 in step")


def test_json_and_text_of_the_same_process_agree() -> None:
    from_json = READER.read(DATA / "spy.json")
    text = READER.read(DATA / "locals.txt")
    assert recognised(DATA / "spy.json")
    assert {stack.thread: [(f.function, f.line) for f in stack.frames] for stack in from_json.stacks} == {
        stack.thread: [(f.function, f.line) for f in stack.frames] for stack in text.stacks
    }
    assert {stack.thread for stack in text.stacks} == {"MainThread", "watch dog: Ünï"}
    assert {stack.pid for stack in text.stacks} == {stack.pid for stack in from_json.stacks}
    assert from_json.present == frozenset()
    assert "rank<k>" in from_json.unknown[0]


def test_the_holder_of_the_interpreter_lock_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rank2.txt"
    path.write_text(
        "Process 9: python spin.py\nPython v3.12.1 (/usr/bin/python3.12)\n\n"
        'Thread 9 (active+gil): "MainThread"\n    spin (spin.py:3)\nThread 10 (active): "io"\n    read (io.py:1)\n'
        "Thread 11\n    run (x.py:1)\n"
    )
    assert [(stack.rank, stack.thread, stack.holds_gil) for stack in READER.read(path).stacks] == [
        (2, "MainThread", True),
        (2, "io", False),
        (2, "11", None),
    ]


def test_native_frames_have_no_line() -> None:
    (main, helper) = READER.read(DATA / "native.txt").stacks
    assert main.frames[0] == Site("libc.so.6", 0, "open64")
    assert str(own_frame(main)) == "w.py:6 in main"
    assert helper.frames[0].function == "clock_nanosleep"


def test_faulthandler_of_this_interpreter(tmp_path: Path) -> None:
    ready, end = threading.Event(), threading.Event()

    def waits() -> None:
        ready.set()
        end.wait()

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    ready.wait()
    path = tmp_path / "trace_rank_12.txt"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    end.set()
    thread.join()
    found = READER.read(path)
    assert recognised(path)
    assert (found.present, found.expected) == (frozenset(), {12})
    names = [[frame.function for frame in stack.frames] for stack in found.stacks]
    assert any("waits" in functions for functions in names)
    mine = next(stack for stack in found.stacks if stack.frames[0].function.startswith("test_faulthandler"))
    assert Path(mine.frames[0].file) == Path(__file__)


def test_faulthandler_of_a_job_in_one_log(tmp_path: Path) -> None:
    """torchrun puts `[rank3]:` before each line; 3.14 puts the thread's name into its heading."""
    path = tmp_path / "job.log"
    path.write_text(
        "训练开始\n"
        "[rank3]:Thread 0x00007f0a [pt_nccl_watchdg] (most recent call first):\n"
        "[rank3]:  <no Python frame>\n\n"
        "[rank3]:Current thread 0x00007f0b (most recent call first):\n"
        '[rank3]:  File "/site-packages/torch/cuda/streams.py", line 231 in synchronize\n'
        '[rank3]:  File "/home/me/train.py", line 40 in step\n'
        "[rank1]:Thread 0x00007f0c (most recent call first):\n"
        '[rank1]:  File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 9 in recv\n'
        '[rank1]:  File "/home/me/my (own).py", line ??? in f\n'
    )
    found = READER.read(path)
    assert recognised(path)
    assert [(stack.rank, stack.thread, len(stack.frames)) for stack in found.stacks] == [
        (3, "pt_nccl_watchdg", 0),
        (3, "0x00007f0b", 2),
        (1, "0x00007f0c", 2),
    ]
    waits = stands_in(found.stacks[1])
    assert waits is not None
    assert (waits.kind, waits.streams, str(waits.site)) == (Kind.WAIT, ("*",), "/home/me/train.py:40 in step")
    receives = stands_in(found.stacks[2])
    assert receives is not None
    assert receives.kind is Kind.RECV
    assert found.stacks[2].frames[1] == Site("/home/me/my (own).py", 0, "f")


@pytest.mark.parametrize(
    ("frames", "kind", "operation"),
    [
        ([("TCPStore.get", "store.py")], Kind.EXTERNAL, "store wait (TCPStore.get)"),
        ([("destroy_process_group", "torch/distributed/distributed_c10d.py")], Kind.COLLECTIVE, "FIN"),
        ([("_store_based_barrier", "torch/distributed/distributed_c10d.py"),
          ("new_group", "torch/distributed/distributed_c10d.py")], Kind.COLLECTIVE, "INIT"),
        ([("cudaStreamSynchronize", "libcudart.so"), ("loss", "train.py")], Kind.WAIT, ""),
        ([("Socket.send", "zmq/sugar/socket.py"), ("reply", "serve.py")], Kind.EXTERNAL, "Socket.send"),
        ([("wait", "/usr/lib/python3.11/threading.py"), ("work", "serve.py")], Kind.EXTERNAL, "wait"),
        ([("forward", "model.py")], Kind.EXTERNAL, "forward"),
    ],
)  # fmt: skip
def test_what_a_thread_stands_in(frames: list[tuple[str, str]], kind: Kind, operation: str) -> None:
    stack = Stack(4, "MainThread", tuple(Site(file, 1, function) for function, file in frames))
    event = stands_in(stack)
    assert event is not None
    assert (event.rank, event.thread, event.kind, event.operation) == (4, "", kind, operation)


def test_nothing_is_made_of_a_stack_without_rank_or_frames() -> None:
    assert stands_in(Stack(None, "MainThread", (Site("a.py", 1, "f"),))) is None
    assert stands_in(Stack(1, "MainThread", ())) is None


def test_a_rank_in_a_title() -> None:
    assert rank_of_title("python train.py --rank 3") == 3
    assert rank_of_title("python train.py --global-rank=12") == 12
    assert rank_of_title("python train.py --local_rank=3") is None
    assert rank_of_title("python -c frank 3 pancrank") is None


@pytest.mark.parametrize(
    "text", ["", "hello\n", "Thread safety is hard (active)\n", "[1, 2]", "{", '[{"frames": 3}]', "[]"]
)
def test_what_holds_no_stack_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(text)
    assert read_or_line(READER, path) is None


def test_a_deep_json_and_a_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    assert read_or_line(READER, path) is None
    with pytest.raises(UsageError, match="not a file"):
        READER.read(tmp_path)


def test_a_long_line_takes_little_memory(tmp_path: Path) -> None:
    """192 MiB without a newline, then a stack: read in a process that may not have that much memory."""
    path = tmp_path / "rank5.log"
    with path.open("wb") as file:
        for _ in range(192):
            file.write(b"x" * (1 << 20))
        file.write(b'\nThread 7 (idle): "MainThread"\n    f (a.py:1)\n')
    code = (
        "import re, sys; from pathlib import Path; from verify.readers.stacks import READER;"
        "stack, = READER.read(Path(sys.argv[1])).stacks;"
        # Not ru_maxrss, which begins at what the process that forked this one had.
        "print(stack.rank, re.search(r'VmHWM:\\s+([0-9]+)', Path('/proc/self/status').read_text())[1])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    rank, kib = map(int, out.stdout.split())
    assert rank == 5
    assert kib < 150 << 10


WHOLE = [path.read_bytes() for path in sorted(DATA.iterdir())]


@given(data=st.data())
def test_damaged_stacks_give_a_line_or_a_finding(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = bytearray(data.draw(st.sampled_from(WHOLE)))
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 30))] = data.draw(
            st.binary(max_size=20) | st.sampled_from([b"\n", b'"'])
        )
    path = tmp_path_factory.getbasetemp() / "rank1.fuzz"
    path.write_bytes(text[: data.draw(st.integers(1, len(text)) | st.just(len(text)))] or b"x")
    READER.recognises(path, path.read_bytes()[:4096])
    if (found := read_or_line(READER, path)) is not None:
        for stack in found.stacks:
            stands_in(stack)
        json.dumps([str(frame) for stack in found.stacks for frame in stack.frames])
