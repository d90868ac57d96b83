"""Flight Recorder dumps of a large training job that one rank has stopped, for benchmarks.

Pipeline, tensor and data parallel groups over all ranks as Megatron lays them out (tensor fastest, then data, then
pipeline), each step with tensor-parallel all-reduces, batched sends and receives between neighbours in the pipeline,
reduce-scatters and all-gathers of the data-parallel groups and one all-reduce of everybody. The dumps have the shape
of version 2.10 with stacks; shared strings and frames are written once, as PyTorch's own pickler does.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from sys import intern
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

TENSOR: Final = 8
PIPELINE: Final = 4
START: Final = 1_795_976_811_000_000_000
DEEP: Final = 12
"""Frames of a call, of which the innermost are torch's."""

KEYS: Final = (
    "frames", "record_id", "pg_id", "process_group", "thread_name", "thread_id", "collective_seq_id", "p2p_seq_id",
    "op_id", "profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes",
    "state", "time_discovered_started_ns", "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How many ranks, and where each stands. calls: entries of each rank. pipeline: ranks of a pipeline at most."""

    ranks: int
    calls: int
    pipeline: int = PIPELINE

    @property
    def tensor(self) -> int:
        """Ranks of a tensor-parallel group."""
        return min(TENSOR, self.ranks)

    @property
    def stages(self) -> int:
        """Ranks of a pipeline."""
        return min(self.pipeline, max(1, self.ranks // (2 * self.tensor)))

    @property
    def replicas(self) -> int:
        """Ranks of a data-parallel group."""
        return self.ranks // (self.tensor * self.stages)

    def groups(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> description and members, in the order of creation."""
        t, d = self.tensor, self.replicas
        found = [("default_pg", tuple(range(self.ranks)))]
        found += [("TENSOR_PARALLEL_GROUP", tuple(range(at, at + t))) for at in range(0, self.ranks, t)]
        for stage in range(self.stages):
            first = stage * t * d
            found += [("DATA_PARALLEL_GROUP", tuple(range(first + at, first + t * d, t))) for at in range(t)]
        if self.stages > 1:
            found += [("PIPELINE_PARALLEL_GROUP", tuple(range(at, self.ranks, t * d))) for at in range(t * d)]
        return {str(n): each for n, each in enumerate(found)}


@dataclass
class Rank:
    """What one rank records. groups: only its own."""

    rank: int
    groups: dict[str, tuple[str, tuple[int, ...]]]
    names: dict[str, str]
    lines: dict[int, list[dict[str, Any]]]
    entries: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[tuple[str, bool], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = {name: at for at, name in enumerate(self.groups)}

    def wait(self) -> None:
        """The last call has not ended."""
        self.entries[-1].update(state="scheduled", retired=False, time_discovered_completed_ns=None)

    def call(self, desc: str, operation: str, sizes: tuple[int, ...], out: tuple[int, ...], line: int) -> None:
        """Record a call on the group of that description."""
        name = self.names[desc]
        self.record(name, operation, sizes, out, line, transfer=False, same=False)

    def record(
        self, name: str, operation: str, sizes: tuple[int, ...], out: tuple[int, ...], line: int, transfer: bool,
        same: bool,
    ) -> None:  # fmt: skip
        """Record a call. same: in one batch with the call before it."""
        key = (name, transfer)
        self.counts[key] = self.counts.get(key, 0) + (not same)
        number = len(self.entries)
        created = START + 1_000_000 * number + self.rank
        group = self.groups[name][0]
        self.entries.append(
            dict(
                zip(
                    KEYS,
                    (
                        [*self.lines[line]], number, self.ids[name], (name, group),
                        "pt_main_thread", "140179863200064", self.counts.get((name, False), 0),
                        self.counts.get((name, True), 0), number, intern(f"nccl:{operation}"), created, [[*sizes]],
                        ["BFloat16"], [[*out]], ["BFloat16"], "completed", None, created + 900_000, True, 600_000,
                        transfer,
                    ),
                    strict=True,
                )
            )
        )  # fmt: skip


def frames(lines: dict[int, list[dict[str, Any]]], line: int) -> None:
    """The stack of a call in line `line` of the program; stacks share their frames."""
    torch = {"name": "wrapper", "filename": "torch/distributed/c10d_logger.py", "line": 83}
    inner = {"name": "all_reduce", "filename": "torch/distributed/distributed_c10d.py", "line": 3068}
    outer = [
        {"name": f"layer_{n}", "filename": f"/srv/job/model/part_{n}.py", "line": 100 + n} for n in range(DEEP - 3)
    ]
    first = next(iter(lines.values()), None)
    shared = first[3:] if first else outer
    two = first[:2] if first else [inner, torch]
    lines[line] = [*two, {"name": "step", "filename": "/srv/job/train.py", "line": line}, *shared]


def record(shape: Shape, rank: int, groups: dict[str, tuple[str, tuple[int, ...]]], victim: int) -> Rank:
    """The ring of one rank when nothing moves any more: with pipelines the last `calls` entries of a few more."""
    mine = {name: each for name, each in groups.items() if rank in each[1]}
    lines: dict[int, list[dict[str, Any]]] = {}
    for line in range(10, 20):
        frames(lines, line)
    me = Rank(rank, mine, {desc: name for name, (desc, _) in mine.items()}, lines)
    stage = rank // (shape.tensor * shape.replicas)
    steps = -(-shape.calls * (5 if shape.stages > 1 else 4) // 4 // 12)
    for n in range(steps):
        step(me, shape, stage, hung=n == steps - 1, victim=victim)
    del me.entries[: -shape.calls]
    return me


def step(me: Rank, shape: Shape, stage: int, hung: bool, victim: int) -> None:
    """One training step: two micro-batches, gradients, the norm, parameters. hung: the victim stops in this one."""
    hidden = (2048, 1, 5120)
    pipe = me.names.get("PIPELINE_PARALLEL_GROUP")
    for _ in range(2):
        if pipe is not None:
            me.counts[pipe, True] = me.counts.get((pipe, True), 0) + 1
            peers = [(f"recv {stage}<-{stage - 1}", 14)] * (stage > 0)
            peers += [(f"send {stage}->{stage + 1}", 15)] * (stage < shape.stages - 1)
            for operation, line in peers:
                me.record(pipe, operation, hidden, hidden, line, transfer=True, same=True)
        for layer in range(4):
            me.call("TENSOR_PARALLEL_GROUP", "all_reduce", hidden, hidden, 10 + layer % 2)
    size = 1_048_576
    data = me.names["DATA_PARALLEL_GROUP"]
    if hung and me.rank == victim:
        return
    for _ in range(2):
        me.call("DATA_PARALLEL_GROUP", "_reduce_scatter_base", (size * shape.replicas,), (size,), 16)
        if hung and victim in me.groups[data][1]:
            return me.wait()
    me.call("default_pg", "all_reduce", (1,), (1,), 17)
    if hung:
        return me.wait()
    me.call("DATA_PARALLEL_GROUP", "_all_gather_base", (size,), (size * shape.replicas,), 18)
    return None


def write(folder: Path, shape: Shape) -> int:
    """Write the dumps of all ranks, of which one never makes a late call of its data-parallel group; its number."""
    groups = shape.groups()
    victim = shape.ranks // 2 + 1 if shape.ranks > 2 else 1
    folder.mkdir(parents=True, exist_ok=True)
    listed = {name: str(list(members)) for name, (_, members) in groups.items()}
    for rank in range(shape.ranks):
        me = record(shape, rank, groups, victim)
        dump = {
            "version": "2.10", "comm_lib_version": "2.28.9",
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": listed[name]} for name, (desc, _) in me.groups.items()
            },
            "pg_status": {str(at): status(me, name) for at, name in enumerate(me.groups)},
            "entries": me.entries,
        }  # fmt: skip
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return victim


def status(me: Rank, name: str) -> dict[str, int]:
    """The counters of a group."""
    mine = [each for each in me.entries if each["process_group"][0] == name]
    key = "p2p_seq_id" if any(each["is_p2p"] for each in mine) else "collective_seq_id"
    done = [each[key] for each in mine if each["state"] == "completed"]
    return {
        "last_enqueued_collective": max((each[key] for each in mine), default=-1), "last_started_collective": -1,
        "last_completed_collective": max(done, default=-1),
    }  # fmt: skip
