"""What each source of evidence writes about a job of `tests.stuck_jobs`: dumps, logs, counters, rings and stacks.

Each writer takes (folder, job, ranks) and leaves files of `ranks` only.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from kernel.record import Kind as Kind_
from kernel.record import Recorder as Ring
from kernel.record import ring_path
from tests.fr_dumps import Recorder, write
from tests.stuck_jobs import GROUPS, RANKS, Job, calls
from verify.events import Event, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NCCL = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter",
        "broadcast": "Broadcast", "send": "Send", "recv": "Recv"}  # fmt: skip
COUNTED = ("AllGather", "AllReduce", "Broadcast", "Reduce", "ReduceScatter")
WATCHDOG = {"all_reduce": "ALLREDUCE", "all_gather": "_ALLGATHER_BASE", "reduce_scatter": "_REDUCE_SCATTER_BASE",
            "broadcast": "BROADCAST"}  # fmt: skip
RECORD = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "broadcast": "BC"}
DTYPES = {"Float": 7, "Half": 6}


def group_of(call: Event) -> str:
    assert call.communicator is not None
    return call.communicator.name


def numbers(call: Event) -> tuple[int, int]:
    """Elements in and out."""
    taken = call.sizes[0][0] if call.sizes else 8
    return taken, call.outputs[0][0] if call.outputs else taken


# -- Flight Recorder --------------------------------------------------------------------------------------------------


def dump_of(
    job: Job, rank: int, version: str = "2.10", keep: int | None = None, active: bool = False
) -> dict[str, Any]:
    """A rank's dump. keep: entries that its ring holds. active: unfinished ones only, with the counters of groups."""
    recorder = Recorder(rank, GROUPS)
    status: dict[str, tuple[int, int]] = {}
    for call, done in calls(job, rank):
        taken, given = numbers(call)
        name = call.operation
        if call.kind is not Kind.COLLECTIVE:
            arrow = "->" if call.kind is Kind.SEND else "<-"
            name = f"{call.operation} {rank}{arrow}{call.peer}"
        recorder.call(
            group_of(call), name, size=taken, out=given, dtype=call.dtype or "Float",
            line=call.site.line if call.site else None, state="completed" if done else "scheduled",
        )  # fmt: skip
        entry = recorder.entries[-1]
        seq = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        before = status.get(str(entry["pg_id"]), (-1, -1))
        status[str(entry["pg_id"])] = (seq, seq if done else before[1])
    if keep is not None:
        recorder.entries = recorder.entries[-keep:]
    if active:
        recorder.entries = [entry for entry in recorder.entries if entry["state"] != "completed"]
    dump = recorder.dump(version)
    dump["pg_status"] = {
        key: {"last_enqueued_collective": one, "last_started_collective": -1, "last_completed_collective": two}
        for key, (one, two) in status.items()
    }
    if version != "2.10":
        dump["nccl_version"] = dump.pop("comm_lib_version")
    if version == "2.4":
        del dump["pg_status"]
    return dump


def dumps(folder: Path, job: Job, ranks: Sequence[int], versions: Sequence[str] = ("2.10",), **how: Any) -> None:
    as_json = how.pop("as_json", False)
    for rank in ranks:
        dump = dump_of(job, rank, versions[rank % len(versions)], **how)
        if as_json:
            for entry in dump["entries"]:
                del entry["frames"]
            if not dump["entries"]:
                del dump["entries"]
        write(folder, {rank: dump}, as_json=as_json)


# -- logs -------------------------------------------------------------------------------------------------------------


def watchdog(folder: Path, job: Job, ranks: Sequence[int], chatty: bool = True) -> None:
    """stderr of each rank. chatty: a status line of every group; else only of those in which the rank waits."""
    for rank in ranks:
        lines = [f"step 4 of rank {rank}"]
        last: Counter[str] = Counter()
        finished: Counter[str] = Counter()
        waiting: dict[str, tuple[int, Event]] = {}
        for call, done in calls(job, rank):
            name = group_of(call)
            last[name] += 1
            if done:
                finished[name] = last[name]
            else:
                waiting.setdefault(name, (last[name], call))
        for name, (desc, members) in GROUPS.items():
            seat = f"[PG ID {name} PG GUID {name}({desc}_{name if name != '0' else ''}) Rank".replace("_)", ")")
            if rank not in members:
                continue
            seq = waiting[name][0] if name in waiting else last[name]
            if name in waiting:
                taken, given = numbers(waiting[name][1])
                lines.append(
                    f"[rank{rank}]:[E810 03:04:11.0 ProcessGroupNCCL.cpp:683] [Rank {members.index(rank)}] Watchdog"
                    f" caught collective operation timeout: WorkNCCL(SeqNum={seq},"
                    f" OpType={WATCHDOG[waiting[name][1].operation]}, NumelIn={taken}, NumelOut={given},"
                    " Timeout(ms)=600000) ran for 600096 milliseconds before timing out."
                )
            if name in waiting or chatty:
                lines.append(
                    f"[rank{rank}]:[E810 03:04:11.1 ProcessGroupNCCL.cpp:2241] {seat} {members.index(rank)}]  failure"
                    f" detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {last[name]},"
                    f" last completed work: {finished[name]}"
                )
        (folder / f"rank{rank}.log").write_text("\n".join(lines) + "\n")


def tracebacks(folder: Path, job: Job, ranks: Sequence[int]) -> None:
    """stderr of ranks that raised."""
    for rank in ranks:
        left = job.left.get(rank)
        if left is not None and left.kind is Kind.EXIT and left.operation:
            (folder / f"rank{rank}.err").write_text(
                f'Traceback (most recent call last):\n  File "data.py", line 5, in load\n{left.operation}\n'
            )


def spied(folder: Path, job: Job, ranks: Sequence[int]) -> None:
    """`py-spy dump --native` of the ranks that are blocked outside collectives."""
    for rank in ranks:
        left = job.left.get(rank)
        if left is not None and left.kind is Kind.EXTERNAL:
            (folder / f"rank{rank}.txt").write_text(
                f'Process {1000 + rank}: python train.py\nPython v3.12.1 (/usr/bin/python3.12)\n\n'
                f'Thread {1000 + rank} (idle): "MainThread"\n    {left.operation} (libc.so.6)\n    load (data.py:5)\n'
                "    <module> (train.py:40)\n"
            )


def all_of_torch(folder: Path, job: Job, ranks: Sequence[int], **how: Any) -> None:
    """Dumps, stacks and logs together."""
    for write_one in (dumps, tracebacks, spied):
        write_one(folder, job, ranks, **(how if write_one is dumps else {}))


def nccl_lines(folder: Path, job: Job, ranks: Sequence[int]) -> None:
    """NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,COLL, a file of each process."""
    for rank in ranks:
        who = f"host{rank // 2}:{1000 + rank}:{1000 + rank} [{rank}] NCCL INFO"
        lines = []
        for name, (_, members) in GROUPS.items():
            if rank in members:
                lines.append(
                    f"{who} ncclCommInitRankConfig comm 0xc{name}{rank} rank {members.index(rank)} nranks"
                    f" {len(members)} cudaDev 0 nvmlDev 0 busId 1b000 commId 0xfeed{name} - Init COMPLETE"
                )
        for call, _ in calls(job, rank):
            name = group_of(call)
            pair = call.kind is not Kind.COLLECTIVE
            low, high = sorted((rank, call.peer)) if pair and call.peer is not None else (0, 0)
            stream = f"0xa{low}{high}" if pair else f"0x5{name}"
            root = call.peer if pair else int(call.root or 0)
            count = min(numbers(call)) if call.operation == "reduce_scatter" else numbers(call)[0]
            lines.append(
                f"{who} {NCCL[call.operation]}: opCount 1e sendbuff 0x7f recvbuff 0x7e count {count} datatype"
                f" {DTYPES[call.dtype or 'Float']} op 0 root {root} comm 0xc{name}{rank}"
                f" [nranks={len(GROUPS[name][1])}] stream {stream}"
            )
        (folder / f"nccl.{rank}.txt").write_text("\n".join(lines) + "\n")


def ras(folder: Path, job: Job, ranks: Sequence[int]) -> None:
    """One answer of the service; ranks that are not there do not answer."""
    counts: dict[str, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for rank in ranks:
        for call, _ in calls(job, rank):
            counts[group_of(call)][rank][NCCL[call.operation]] += 1
    comms = []
    for name, (_, members) in GROUPS.items():
        listed = [
            {
                "rank": seat, "host": "10.0.0.1", "pid": 100 + rank, "status": {},
                "collective_counts": {op: counts[name][rank][op] for op in COUNTED},
            }
            for seat, rank in enumerate(members) if rank in ranks
        ]  # fmt: skip
        lost = [
            {"rank": seat, "host": "10.0.0.1", "pid": 100 + rank, "status": {"unresponsive": True}}
            for seat, rank in enumerate(members)
            if rank not in ranks
        ]
        comms.append({"hash": f"27a{name}", "size": len(members), "ranks": listed, "missing_ranks": lost})
    answer = {"nccl_version": "2.28.9", "communicators_count": len(comms), "communicators": comms}
    (folder / "ras.json").write_text(json.dumps(answer))


# -- our record -------------------------------------------------------------------------------------------------------


def rings(folder: Path, job: Job, ranks: Sequence[int], capacity: int = 256) -> list[Ring]:
    """The rings of ranks that have been silent for a minute; their processes live as long as the rings are kept."""
    kept = []
    for rank in ranks:
        mine = {name: members for name, (_, members) in GROUPS.items() if rank in members}
        path = ring_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        ring = Ring(path, rank=rank, groups=mine, meta={"size": RANKS}, capacity=capacity, clock=_a_minute_ago)
        kept.append(ring)
        count: Counter[str] = Counter()
        waits = ""
        for call, done in calls(job, rank):
            name = group_of(call)
            count[name] += 1
            label = f"D {sum(count.values())}"
            operation = ring.site(RECORD[call.operation])
            what = {"group": ring.group(name), "seq": count[name], "a": numbers(call)[0], "b": operation}
            site = ring.site(f"{call.site.file}:{call.site.line} {call.site.function}") if call.site else 0
            ring.event(Kind_.SUBMIT, "D", "D", a=1, b=1, site=ring.site(label))
            ring.event(Kind_.ENQUEUE, "D", "D", site=site, **what)
            ring.event(Kind_.START, "D", "D", site=site, **what)
            if done:
                ring.event(Kind_.FINISH, "D", "D", site=site, **what)
                ring.event(Kind_.WORK_FINISH, "D", "D", a=1, b=1, site=ring.site(label))
            elif not waits:
                waits = label
        if waits:
            ring.event(Kind_.HOST_WAIT_ENTER, b=ring.site(waits))
        left = job.left.get(rank)
        if left is not None and left.kind is Kind.EXTERNAL:
            ring.event(Kind_.HOST_WAIT_ENTER, b=ring.site(f"{left.operation} of a file"))
        elif left is not None and left.operation:
            ring.event(Kind_.EXCEPTION, b=ring.site(left.operation))
        elif left is not None:
            ring.close()
    return kept


def _a_minute_ago() -> int:
    return time.monotonic_ns() - 60_000_000_000
