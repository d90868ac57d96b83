"""Flight Recorder dumps written for tests: plain dictionaries of the shape that PyTorch writes."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Dump = dict[str, Any]


class Recorder:
    """What one rank records. groups: name -> (description, members)."""

    def __init__(self, rank: int, groups: dict[str, tuple[str, Sequence[int]]], backend: str = "nccl") -> None:
        self.rank, self.backend = rank, backend
        self.groups = {name: each for name, each in groups.items() if rank in each[1]}
        self.entries: list[Dump] = []
        self.counts: dict[tuple[str, bool], int] = {}

    def call(
        self, group: str, operation: str = "all_reduce", size: int = 8, out: int | None = None,
        state: str = "completed", dtype: str = "Float", line: int | None = None, same: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        """Record a call. same: with the number of the call before it, as in a coalesced group."""
        transfer = operation.startswith(("send", "recv")) or more.get("is_p2p", False)
        key = (group, transfer)
        self.counts[key] = self.counts.get(key, 0) + (not same)
        frames = [] if line is None else [{"name": "step", "filename": "train.py", "line": line}]
        self.entries.append(
            {
                "record_id": len(self.entries), "pg_id": list(self.groups).index(group),
                "process_group": (group, self.groups[group][0]), "is_p2p": transfer,
                "collective_seq_id": self.counts.get((group, False), 0),
                "p2p_seq_id": self.counts.get((group, True), 0),
                "op_id": len(self.entries), "profiling_name": f"{self.backend}:{operation}",
                "time_created_ns": 1_000 + len(self.entries), "input_sizes": [[size]],
                "output_sizes": [[size if out is None else out]], "input_dtypes": [dtype], "output_dtypes": [dtype],
                "state": state, "time_discovered_started_ns": None,
                "time_discovered_completed_ns": 2_000 if state == "completed" else None,
                "retired": state == "completed", "timeout_ms": 600_000, "frames": frames, **more,
            }
        )  # fmt: skip

    def dump(self, version: str = "2.10") -> Dump:
        """The whole dump."""
        config = {
            name: {"name": name, "desc": desc, "ranks": str(list(members))}
            for name, (desc, members) in self.groups.items()
        }
        return {"version": version, "comm_lib_version": "2.28.9", "pg_config": config, "entries": self.entries}


def recorders(ranks: int, groups: dict[str, tuple[str, Sequence[int]]], backend: str = "nccl") -> list[Recorder]:
    return [Recorder(rank, groups, backend) for rank in range(ranks)]


def write(folder: Path, dumps: dict[int, Dump], name: str = "dump_rank_{}", as_json: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, dump in dumps.items():
        content = json.dumps(dump).encode() if as_json else pickle.dumps(dump, protocol=2)
        (folder / name.format(rank)).write_bytes(content)
    return folder


def save(folder: Path, ranks: Sequence[Recorder], **how: Any) -> Path:
    return write(folder, {each.rank: each.dump() for each in ranks}, **how)
