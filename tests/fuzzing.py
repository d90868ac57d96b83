"""Evidence to damage: one true sample of each format, ways to damage it, and what must come out of that."""

from __future__ import annotations

import io
import json
import pickle
import struct
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

from kernel.record import Kind, Recorder, ring_path
from rollout.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

DATA: Final = Path(__file__).parent / "data"
CORPUS: Final = DATA / "fuzz"
"""Folder of a format -> inputs that once did harm."""

WATCHDOG: Final = "".join(
    f"[rank{rank}]:[E810 03:04:11.0 x.cpp:683] [Rank {rank}] Watchdog caught collective operation timeout:"
    f" WorkNCCL(SeqNum=78, OpType=BROADCAST, NumelIn=80, NumelOut=80, Timeout(ms)=600000) ran for 600096 milliseconds\n"
    f"[rank{rank}]:[E810 03:04:11.1 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure"
    " detected by watchdog at work sequence id: 78 PG status: last enqueued work: 79, last completed work: 77\n"
    f"[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]: RuntimeError: out of patience\n"
    for rank in range(3)
)
NCCL: Final = "".join(
    f"host:{70 + rank}:71 [0] NCCL INFO ncclCommInitRank comm 0x55 rank {rank} nranks 2 cudaDev 0 busId 1 commId 0x8af"
    f" - Init COMPLETE\nhost:{70 + rank}:71 [0] NCCL INFO AllReduce: opCount {n} sendbuff 0x1 recvbuff 0x2 count 18816"
    " datatype 7 op 0 root 0 comm 0x55 [nranks=2] stream 0x56\n"
    for rank in range(2)
    for n in range(2 - rank)
)
RAS_TEXT: Final = """NCCL version 2.28.9
  Group     Comms     Nodes     Ranks     Ranks     Ranks     Status  Errors
      #  in group  per comm  per node  per comm  in group
      0         1         1         4         4         4    RUNNING  MISMATCH
#0-0 (9f3a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 7
  Rank 2 has launched up to operation 6
"""
RAS_JSON: Final = json.dumps(
    {
        "nccl_version": "2.28.9", "communicators_count": 1,
        "communicators": [
            {
                "hash": "0x9f", "size": 3, "ranks_count": 2, "missing_ranks_count": 1,
                "ranks": [
                    {"rank": n, "host": "a", "pid": 70 + n, "collective_counts": {"AllReduce": 7 - n}} for n in range(2)
                ],
                "missing_ranks": [{"rank": 2, "host": "a", "pid": 9, "status": {"considered_dead": True}}],
            }
        ],
    }
)  # fmt: skip
DEEP_EP: Final = (
    "DeepEP dispatch NVL receiver timeout, channel: 3, RDMA: 0, nvl: 1, src RDMA: 1, src nvl: 5, start: 0, end: 0\n"
    "DeepEP timeout check failed: rank = 3, thread = 0, value = 1024)\n"
    "DeepEP combine (scale-up wait) timeout, scale-out: 0/2, scale-up: 3/8, channel: 1, lane: 5, recv: 0, tail: 0\n"
)
FAULT: Final = (
    "[rank1]: Current thread 0x00007f8e [MainThread] (most recent call first):\n"
    '[rank1]:   File "train.py", line 5 in step\n[rank1]:   File "train.py", line 50 in <module>\n'
)


def ring(folder: Path) -> bytes:
    """A small record of one rank."""
    recorder = Recorder(ring_path(folder, 0), rank=0, groups={"tp": (0, 1)}, meta={"size": 2}, capacity=64)
    for n in range(20):
        recorder.event(Kind.ENQUEUE, "D", "D", group=recorder.group("tp"), seq=n)
    recorder.close()
    return ring_path(folder, 0).read_bytes()


def samples() -> dict[str, list[bytes]]:
    """Format -> true samples of it, but for the record, which is made in a folder (`ring`)."""
    folders = ("h200/missing_member", "h200/op_mismatch", "megatron16/lock_gil")
    dumps = [file.read_bytes() for each in folders for file in sorted((DATA / "fr" / each).glob("*dump_*"))[:2]]
    texts = [file.read_bytes() for file in sorted((DATA / "stacks").iterdir())]
    return {
        "flight_recorder": dumps,
        "flight_recorder_json": [json.dumps(pickle.loads(each)).encode() for each in dumps],
        "watchdog": [WATCHDOG.encode()],
        "nccl_log": [NCCL.encode()],
        "ras": [RAS_TEXT.encode(), RAS_JSON.encode()],
        "deepep": [DEEP_EP.encode()],
        "stacks": [*texts, FAULT.encode()],
    }


NUMBERS: Final = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1)
WORDS: Final = (
    b"99999999999999999999", b"-1", b"1048576", b"\xff\xfe", "привет".encode(), b"\x00", b"\n", b"[" * 3000, b"{}",
    b"[]", b'"', b"null", b"1e999", b"NaN", b"\\ud800", b"]" * 50, b"\x85" * 50, b"cposix\nsystem\n", b"h\x00",
    b"r\xff\xff\xff\x7f",
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, sources: list[bytes]) -> bytes:
    """A sample with a few of its bytes changed, cut, doubled, taken from another one, or replaced by what does harm."""
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 64)))
        changes: list[Callable[[], bytes]] = [
            lambda: bytes([draw(st.integers(0, 255))]),
            lambda: draw(st.binary(max_size=16)),
            lambda: b"",
            lambda: struct.pack(draw(st.sampled_from(["<Q", ">Q"])), draw(st.sampled_from(NUMBERS))),
            lambda: struct.pack("<I", draw(st.sampled_from(NUMBERS)) & 0xFFFFFFFF),
            lambda: draw(st.sampled_from(WORDS)),
            lambda: str(draw(st.integers(-(1 << 70), 1 << 70))).encode(),
            lambda at=at, end=end: bytes(data[at:end]) * draw(st.integers(2, 40)),  # type: ignore[misc]
        ]
        kind = draw(st.integers(0, len(changes) + 1))
        if kind < len(changes):
            data[at:end] = changes[kind]()
        elif kind == len(changes):
            del data[at:]
        else:
            other = draw(st.sampled_from(sources))
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def outcome(*paths: Path) -> int:
    """The exit code of `turnstile hang` on files. Raises AssertionError for anything but a report or one line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["hang", *map(str, paths)])
    text, line = out.getvalue(), err.getvalue()
    if code == 2:
        assert text == ""
        assert line.count("\n") == 1
        assert len(line) < 1500
    else:
        assert code in (0, 1, 3)
        assert line == ""
        assert 1 <= len(text.splitlines()) <= 25
    return code
