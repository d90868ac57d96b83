"""Logs of a job: watchdog, NCCL's COLL lines, RAS, DeepEP. Lines as these programs print them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reading import read_or_line
from verify.blame import Certainty, Class, Verdict
from verify.hang.diagnosis import diagnose_found
from verify.readers import deepep, nccl_log, ras, stacks, watchdog
from verify.readers.gather import gather
from verify.readers.lines import LONGEST, file_lines, rank_in
from verify.waitgraph import diagnose_events

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from verify.readers.found import Found, Reader

READERS: list[Reader] = [watchdog.READER, nccl_log.READER, ras.READER, deepep.READER, stacks.READER]


def verdict(found: Found) -> Verdict:
    return diagnose_events(found.events, found.expected)


def written(tmp_path: Path, text: str, name: str = "job.log") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def only_reader(path: Path) -> Reader:
    """The one reader that recognises a file."""
    (one,) = [reader for reader in READERS if reader.recognises(path, path.read_bytes()[:4096])]
    return one


# -- watchdog ---------------------------------------------------------------------------------------------------------


def timeout(rank: int, seq: int, op: str = "BROADCAST", numel: int = 80) -> str:
    return (
        f"[rank{rank}]:[E810 03:04:11.061727749 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective"
        f" operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel},"
        " Timeout(ms)=600000) ran for 600096 milliseconds before timing out.\n"
    )


def status(rank: int, seq: int, enqueued: int, completed: int, pg: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E810 03:04:11.1 ProcessGroupNCCL.cpp:2241] [{pg} Rank {rank}]  failure detected by watchdog at"
        f" work sequence id: {seq} PG status: last enqueued work: {enqueued}, last completed work: {completed}\n"
    )


def test_a_rank_that_did_not_enqueue_is_missing(tmp_path: Path) -> None:
    text = "".join(timeout(rank, 78) + status(rank, 78, 79, 77) for rank in (1, 2, 3))
    path = written(tmp_path, status(0, 77, 77, 77) + text)
    assert only_reader(path).name == "watchdog"
    found = watchdog.READER.read(path)
    told = verdict(found)
    assert (told.cls, told.ranks) == (Class.MISSING, (0,))
    assert "broadcast (call 78 on default_pg)" in told.say


def test_older_status_lines_say_the_same(tmp_path: Path) -> None:
    old = (
        "[rank{0}]:[E1003 18:37:01.8 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank {0}] Exception (either an error"
        " or timeout) detected by watchdog at work: {1}, last enqueued NCCL work: {2}, last completed NCCL work: {3}.\n"
    )
    path = written(tmp_path, timeout(1, 9) + old.format(1, 9, 9, 8) + old.format(0, 8, 8, 8))
    told = verdict(watchdog.READER.read(path))
    assert (told.cls, told.ranks) == (Class.MISSING, (0,))


def test_a_log_for_each_rank_is_one_job(tmp_path: Path) -> None:
    for rank in range(3):
        folder = tmp_path / str(rank)
        folder.mkdir()
        text = timeout(rank, 5) + status(rank, 5, 5, 4) if rank != 1 else "step 4\n"
        (folder / "stderr.log").write_text(text.replace(f"[rank{rank}]:", ""))
    found = watchdog.of_logs([tmp_path / str(rank) / "stderr.log" for rank in range(3)])
    told = verdict(found)
    # Its log may be cut: that it has no line is no proof.
    assert (told.cls, told.ranks, told.condition) == (Class.MISSING, (), "no evidence of rank 1")


def test_different_calls_are_a_mismatch(tmp_path: Path) -> None:
    text = "".join(
        timeout(rank, 5, "ALLREDUCE" if rank else "_ALLGATHER_BASE") + status(rank, 5, 5, 4) for rank in range(3)
    )
    told = verdict(watchdog.READER.read(written(tmp_path, text)))
    assert (told.cls, told.ranks) == (Class.MISMATCH, (0,))


def test_all_in_the_same_call_is_below_us(tmp_path: Path) -> None:
    text = "".join(timeout(rank, 5) + status(rank, 5, 5, 4) for rank in range(4))
    assert verdict(watchdog.READER.read(written(tmp_path, text))).cls is Class.BELOW


def test_a_rank_that_finished_what_others_did_not_shows_their_devices(tmp_path: Path) -> None:
    text = timeout(2, 5) + status(2, 5, 5, 4) + status(0, 6, 6, 5) + status(1, 6, 6, 5)
    told = verdict(watchdog.READER.read(written(tmp_path, text)))
    assert (told.cls, told.ranks) == (Class.DEVICE_STALL, (2,))


def test_an_exception_in_the_log_comes_first(tmp_path: Path) -> None:
    trace = (
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "train.py", line 4, in <module>\n'
        "[rank3]:     prepare(None)\n"
        "[rank3]: TypeError: 'NoneType' object is not iterable\n"
    )
    late = (
        "[rank1]: Traceback (most recent call last):\n"
        "[rank1]: torch.distributed.DistBackendError: NCCL communicator was aborted\n"
    )
    text = trace + "".join(timeout(rank, 5) + status(rank, 5, 5, 4) for rank in range(3)) + late
    told = verdict(watchdog.READER.read(written(tmp_path, text)))
    assert (told.cls, told.ranks) == (Class.EXCEPTION, (3,))
    assert "NoneType" in told.say


def test_two_groups_are_kept_apart(tmp_path: Path) -> None:
    """Rank 0 waits in tp and rank 1 in dp, and each has not enqueued the other's: a cycle, if the groups are told."""
    tp, dp = "PG ID 1 PG GUID 4(tp)", "PG ID 2 PG GUID 7(dp)"
    text = timeout(0, 3) + status(0, 3, 3, 2, tp) + status(1, 2, 2, 2, tp)
    text += timeout(1, 8) + status(1, 8, 8, 7, dp) + status(0, 7, 7, 7, dp)
    told = verdict(watchdog.READER.read(written(tmp_path, text)))
    assert (told.cls, told.ranks) == (Class.CYCLE, (0, 1))
    assert "on tp" in told.say
    assert "on dp" in told.say


# -- NCCL's COLL lines ------------------------------------------------------------------------------------------------


def call(rank: int, op: str, comm: str, size: int, stream: str = "0x9", count: int = 64, root: int = 0) -> str:
    return (
        f"host{rank // 8}:{1000 + rank}:{1000 + rank} [{rank}] NCCL INFO {op}: opCount 1e sendbuff 0x7f recvbuff 0x7e"
        f" count {count} datatype 7 op 0 root {root} comm {comm}{rank:02x} [nranks={size}] stream {stream}\n"
    )


def init(rank: int, comm: str, seat: int, size: int, ident: str) -> str:
    return (
        f"host{rank // 8}:{1000 + rank}:{1001 + rank} [{rank}] NCCL INFO ncclCommInitRankConfig comm {comm}{rank:02x}"
        f" rank {seat} nranks {size} cudaDev {rank} nvmlDev {rank} busId 1b000 commId {ident} - Init COMPLETE\n"
    )


def world(size: int) -> str:
    return "".join(init(rank, "0xa", rank, size, "0xfeed") for rank in range(size))


def test_a_member_that_did_not_launch(tmp_path: Path) -> None:
    text = world(4) + "".join(call(rank, "AllReduce", "0xa", 4) for rank in range(4)) * 3
    text += "".join(call(rank, "AllGather", "0xa", 4) for rank in (0, 1, 3))
    path = written(tmp_path, text)
    assert only_reader(path).name == "nccl_log"
    found = nccl_log.READER.read(path)
    told = verdict(found)
    assert (told.cls, told.ranks) == (Class.MISSING, (2,))
    assert any("launches only" in line for line in found.unknown)


def test_what_all_launched_is_no_alarm(tmp_path: Path) -> None:
    text = world(4) + "".join(call(rank, "AllReduce", "0xa", 4) for rank in range(4)) * 5
    assert verdict(nccl_log.READER.read(written(tmp_path, text))).cls is Class.NONE


@pytest.mark.parametrize(("streams", "cls"), [(("0x1", "0x2"), Class.NONE), (("0x1", "0x1"), Class.CYCLE)])
def test_opposite_orders_matter_on_one_stream_only(streams: tuple[str, str], cls: Class, tmp_path: Path) -> None:
    text = world(2) + "".join(init(rank, "0xb", rank, 2, "0xbeef") for rank in range(2))
    for rank in range(2):
        pair = [call(rank, "AllReduce", "0xa", 2, streams[0]), call(rank, "AllGather", "0xb", 2, streams[1])]
        text += "".join(pair if rank else reversed(pair))
    told = verdict(nccl_log.READER.read(written(tmp_path, text)))
    assert told.cls is cls


def test_sub_communicators_by_their_init_lines(tmp_path: Path) -> None:
    """dp = {0, 2} and {1, 3}: the same pointers in another process are another communicator."""
    text = world(4) + "".join(init(rank, "0xb", rank // 2, 2, f"0xd{rank % 2}") for rank in range(4))
    text += call(0, "Broadcast", "0xb", 2, root=0) + call(2, "Broadcast", "0xb", 2, root=1)
    text += call(1, "AllReduce", "0xb", 2)
    found = nccl_log.READER.read(written(tmp_path, text))
    members = {event.rank: event.communicator.members for event in found.events if event.communicator}
    assert members == {0: (0, 2), 2: (0, 2), 1: (1, 3)}
    told = verdict(found)
    assert told.cls is Class.MISMATCH
    assert "root 1 on rank 2" in told.say


def test_communicators_that_cannot_be_joined_are_said(tmp_path: Path) -> None:
    text = world(4) + "".join(call(rank, "AllReduce", "0xc", 2) for rank in range(4))
    found = nccl_log.READER.read(written(tmp_path, text))
    assert not any(event.calls for event in found.events)
    told = verdict(found)
    assert (told.cls, told.ranks) == (Class.NONE, ())
    assert any("communicators of 2 ranks" in line for line in found.unknown)


def test_calls_keep_their_numbers_where_older_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's lines come in one piece at the end, so that more of rank 0's are left out."""
    monkeypatch.setattr(nccl_log, "MOST", 20)
    text = world(2) + call(0, "AllReduce", "0xa", 2) * 14 + call(1, "AllReduce", "0xa", 2) * 13
    found = nccl_log.READER.read(written(tmp_path, text))
    assert any("first 7 of its calls" in line for line in found.unknown)
    told = verdict(found)
    assert (told.cls, told.ranks) == (Class.MISSING, (1,))
    assert "call 14" in told.say


def test_sends_before_receives_in_one_group_complete(tmp_path: Path) -> None:
    text = world(2)
    for rank in range(2):
        text += call(rank, "Send", "0xa", 2, root=1 - rank) + call(rank, "Recv", "0xa", 2, root=1 - rank)
    assert verdict(nccl_log.READER.read(written(tmp_path, text))).cls is Class.NONE


def test_a_copy_of_a_log_is_not_counted_twice(tmp_path: Path) -> None:
    """Rank 1 lacks its second call; a copy of its log beside it does not make up for that."""
    for rank in range(2):
        text = init(rank, "0xa", rank, 2, "0xfeed") + call(rank, "AllReduce", "0xa", 2) * (2 - rank)
        written(tmp_path, text, f"nccl.{rank}")
    written(tmp_path, text, "nccl.1.orig")
    told = verdict(gather([tmp_path]))
    assert (told.cls, told.ranks) == (Class.MISSING, (1,))


# -- RAS --------------------------------------------------------------------------------------------------------------


def answer(counts: list[dict[str, int]], dead: Iterable[int] = (), **more: Any) -> str:
    ranks = [
        {"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "collective_counts": each, "status": {}}
        for rank, each in enumerate(counts)
    ]
    missing = [
        {"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "status": {"considered_dead": True}} for rank in dead
    ]
    ranks = [each for each in ranks if each["rank"] not in set(dead)]
    world = {"hash": "27a0", "size": len(counts), "ranks": ranks, "missing_ranks": missing}
    return json.dumps({"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [world], **more})


def test_ras_json_with_a_rank_behind(tmp_path: Path) -> None:
    counts = [{"AllReduce": 101, "Broadcast": 2} for _ in range(4)]
    counts[1] = {"AllReduce": 100, "Broadcast": 2}
    path = written(tmp_path, answer(counts), "ras.json")
    assert only_reader(path).name == "ras"
    told = verdict(ras.READER.read(path))
    assert (told.cls, told.ranks) == (Class.MISSING, (1,))
    assert "all_reduce" in told.say


def test_ras_json_with_two_kinds_is_a_mismatch(tmp_path: Path) -> None:
    counts = [{"AllReduce": 11, "AllGather": 5}, {"AllReduce": 11, "AllGather": 5}, {"AllReduce": 10, "AllGather": 6}]
    told = verdict(ras.READER.read(written(tmp_path, answer(counts))))
    assert (told.cls, told.ranks) == (Class.MISMATCH, (2,))


def test_equal_counts_say_nothing(tmp_path: Path) -> None:
    found = ras.READER.read(written(tmp_path, answer([{"AllReduce": 7}] * 3)))
    assert verdict(found).cls is Class.NONE
    assert any("counts are equal" in line for line in found.unknown)


def test_a_dead_process_has_left(tmp_path: Path) -> None:
    counts = [{"AllReduce": 8}, {"AllReduce": 8}, {"AllReduce": 7}, {}]
    found = ras.READER.read(written(tmp_path, answer(counts, dead=[3])))
    told = verdict(found)
    assert (told.cls, told.ranks) == (Class.MISSING, (3,))
    assert any("rank 3 is dead" in line for line in found.unknown)


TABLE = """\
NCCL version 2.28.9 compiled with CUDA 13.0

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  {errors}

Warnings
========

{block}
"""


@pytest.mark.parametrize(
    ("block", "ranks"),
    [
        (
            "#0-0 (78db921d1c117b4a) MISMATCH\n"
            "  Communicator ranks have different AllReduce operation counts\n"
            "  7 ranks have launched up to operation 64\n"
            "  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1\n",
            (7,),
        ),
        (
            "#0-0 (27a079b828ff1a75) MISMATCH\n"
            "  Communicator ranks have different collective operation counts\n"
            "  6 ranks have launched up to operation 6650\n"
            "  2 ranks have not launched any operations\n"
            "  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210\n"
            "  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210\n",
            (0, 2),
        ),
    ],
)
def test_ras_text(block: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    path = written(tmp_path, TABLE.format(errors="MISMATCH", block=block))
    assert only_reader(path).name == "ras"
    told = verdict(ras.READER.read(path))
    assert (told.cls, told.ranks) == (Class.MISSING, ranks)


def test_ras_text_that_names_nobody_blames_nobody(tmp_path: Path) -> None:
    block = (
        "#0-0 (27a0) MISMATCH\n  Communicator ranks have different collective operation counts\n"
        "  4 ranks have launched up to operation 9\n  4 ranks have launched up to operation 8\n"
    )
    found = ras.READER.read(written(tmp_path, TABLE.format(errors="MISMATCH", block=block)))
    assert found.events == ()
    assert any("ncclras -v" in line for line in found.unknown)


# -- DeepEP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "edge"),
    [
        ("dispatch NVL receiver timeout, channel: 3, RDMA: 1, nvl: 2, src RDMA: 2, src nvl: 5, start: 0", (10, 21)),
        ("dispatch forwarder timeout (RDMA meta), channel: 0, RDMA: 0, nvl: 4, src RDMA lane: 1, dst NVL: 3", (4, 12)),
        ("dispatch RDMA sender timeout, channel: 0, RDMA: 0, nvl: 1, dst RDMA lane: 1, head: 0, tail: 9", (1, 9)),
        ("timeout check failed: rank = 3, thread = 0, value = 1024)", (3, 0)),
        ("combine (scale-up wait) timeout, scale-out: 1/2, scale-up: 3/8, channel: 1, lane: 5, recv: 0", (11, 13)),
        ("timeout for dispatch receivers, rank 6, responsible_channel = 2, tokens remained: 9", (6, None)),
        ("dispatch timeout of something new", (None, None)),
    ],
)  # fmt: skip
def test_each_line_is_an_edge(line: str, edge: tuple[int | None, int | None]) -> None:
    assert deepep.edge_of(f"DeepEP {line}") == edge


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("phases", "expected"),
    [(("dispatch",) * 4, (3, "below", ())), (("dispatch", "combine"), (1, "cycle", (0, 1)))],
    ids=["in one kernel", "in two"],
)
def test_who_waits_for_one_another_in_one_kernel_has_come(
    phases: tuple[str, ...], expected: tuple[int, str, tuple[int, ...]], apart: bool, tmp_path: Path
) -> None:
    """Each in one log, or all in one. A ring over two kernels is one of order."""
    line = "DeepEP {} NVL receiver timeout, channel: 0, RDMA: 0, nvl: {}, src RDMA: 0, src nvl: {}, start: 0, end: 0\n"
    logs = [
        "".join(line.format(phase, rank, peer) for peer in range(len(phases)) if peer != rank)
        for rank, phase in enumerate(phases)
    ]
    for number, text in enumerate(logs if apart else ["".join(logs)]):
        written(tmp_path, text, f"log{number}")
    found = diagnose_found(gather([tmp_path]))
    assert (found.code, str(found.verdict.cls), found.verdict.ranks) == expected


def test_a_ring_of_barriers_and_a_silent_peer(tmp_path: Path) -> None:
    waits = "DeepEP timeout check failed: rank = {}, thread = {}, value = 1024)\n"
    path = written(tmp_path, waits.format(0, 1) + waits.format(1, 0))
    assert only_reader(path).name == "deepep"
    told = verdict(deepep.READER.read(path))
    assert (told.cls, told.ranks) == (Class.BELOW, ())
    silent = verdict(deepep.READER.read(written(tmp_path, waits.format(0, 2) + waits.format(1, 2))))
    # Nothing is known of rank 2 but that others wait for it.
    assert (silent.cls, silent.certainty, silent.ranks) == (Class.MISSING, Certainty.UNDECIDED, ())
    assert "rank 2" in silent.say


# -- all of them ------------------------------------------------------------------------------------------------------


def test_lines_are_cut_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a\r\n" + b"y" * (3 << 20) + b"\nneedle here\n" + b"needle" + b"z" * (2 << 20))
    assert [(number, len(text)) for number, text in file_lines("log", path)] == [
        (1, 1), (2, LONGEST), (3, 11), (4, LONGEST)
    ]  # fmt: skip
    assert [(number, text[:8]) for number, text in file_lines("log", path, [b"needle"])] == [
        (3, "needle h"),
        (4, "needlezz"),
    ]


def test_the_rank_is_in_the_line_else_in_the_name(tmp_path: Path) -> None:
    assert rank_in("[rank3]:[E] x", tmp_path / "rank5.log") == 3
    assert rank_in("x", tmp_path / "worker_rank_5.log") == 5
    assert rank_in("x", tmp_path / "7" / "stderr.log") == 7
    assert rank_in("x", tmp_path / "frank5.log") is None


SAMPLES = [
    timeout(1, 78) + status(1, 78, 79, 77) + "[rank2]: Traceback (most recent call last):\n[rank2]: ValueError: 超时\n",
    world(2) + call(0, "AllReduce", "0xa", 2) + call(1, "Send", "0xa", 2, root=0),
    answer([{"AllReduce": 3}, {"AllReduce": 2}, {}], dead=[2]),
    TABLE.format(errors="MISMATCH", block="#0-0 (27a0) MISMATCH\n  7 ranks have launched up to operation 6\n"),
    "DeepEP timeout check failed: rank = 3, thread = 0, value = 1024)\n[default1]:DeepEP notify timeout, rank: 1/8\n",
]


@given(data=st.data())
def test_damaged_logs_give_a_line_or_a_finding(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = bytearray("".join(data.draw(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=2))).encode())
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(text) - 1))
        junk = st.binary(max_size=12) | st.sampled_from([b"99999999", b"-1", b"\n", b"\0", b"[", b"(", "ü".encode()])
        text[at : at + data.draw(st.integers(0, 9))] = data.draw(junk)
    path = tmp_path_factory.getbasetemp() / "rank1.log"
    path.write_bytes(text[: data.draw(st.integers(1, len(text)) | st.just(len(text)))] or b"x")
    for reader in READERS:
        reader.recognises(path, path.read_bytes()[:4096])
        if (found := read_or_line(reader, path)) is not None and len(found.expected) < 4096:
            diagnose_events(found.events, found.expected)


@given(seed=st.integers(0, 1 << 32), size=st.integers(2, 5), late=st.integers(0, 4), length=st.integers(1, 12))
def test_one_skipped_call_is_found_in_any_interleaving(
    seed: int, size: int, late: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each rank's lines in order, the ranks' mixed; one rank leaves out its last call."""
    rng = random.Random(seed)
    late %= size
    script = [rng.choice(["AllReduce", "AllGather", "Broadcast"]) for _ in range(length)]
    left = {rank: script[: length - (rank == late)] for rank in range(size)}
    text = world(size)
    while any(left.values()):
        rank = rng.choice([rank for rank, ops in left.items() if ops])
        text += call(rank, left[rank].pop(0), "0xa", size)
    path = tmp_path_factory.getbasetemp() / "mixed.log"
    path.write_text(text)
    told = verdict(nccl_log.READER.read(path))
    assert (told.cls, told.ranks) == (Class.MISSING, (late,))


def test_two_processes_that_say_they_are_one_silent_rank(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    again = world(2).replace("host0:1001:", "host0:1005:")
    path.write_text(world(2) + again + call(0, "AllReduce", "0xa", 2))
    (reader,) = (each for each in READERS if each.recognises(path, path.read_bytes()[:4096]))
    found = reader.read(path)
    assert 1 in {event.rank for event in found.events}
    assert diagnose_events(found.events, found.expected).cls is Class.MISSING
