"""The all-rank rendezvous beside torch.distributed.barrier on gloo, into bench/results/rendezvous.json.

Real processes of one host at 2, 4 and 8 ranks. Blocks of rendezvous by shared memory, by TCP and of gloo's barrier take
turns; what counts is the time that a rank spends in one, from arrival to departure, over all ranks. Ours also carries
bytes from everybody to everybody, a barrier none; --payload says how many. Told as well is the CPU time of a rank in a
rendezvous: with fewer cores than ranks none can be faster than that, times ranks, over cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measured, rank_jobs
from kernel.topology import World
from tests.ranks import Ranks

AIMS = {2: 1 / 3, 4: 0.1, 8: 0.1}
"""Ranks -> the most that our median may be of gloo's."""
WAYS = ("shared", "tcp", "gloo")


def measure(size: int, repeat: int, count: int, payload: int) -> dict[str, Any]:
    """Of one world: microseconds by each way, and ours over gloo's block by block."""
    blocks: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, Ranks(World(size), timeout_s=300) as ranks:
        ranks.run(rank_jobs.begin, str(Path(folder) / "store"))
        for way in WAYS:
            ranks.run(rank_jobs.exchanges, way, count, payload)
        for _, way in measured.turns(WAYS, repeat, size):
            took = ranks.run(rank_jobs.exchanges, way, count, payload)
            blocks[way].append([ns / 1e3 for one, _ in took for ns in one])
            cpu[way] += [ns / 1e3 for _, ns in took]
    row: dict[str, Any] = {"ranks": size, "more_ranks_than_cores": size > len(os.sched_getaffinity(0))}
    medians = {way: [statistics.median(block) for block in blocks[way]] for way in WAYS}
    for way in WAYS:
        row[f"{way}_us"] = measured.spread([us for block in blocks[way] for us in block], 1)
        row[f"{way}_cpu_us"] = measured.spread(cpu[way], 1)
    for way in WAYS[:2]:
        row[f"{way}_over_gloo"] = measured.paired(medians[way], medians["gloo"])
    row["aim"] = round(AIMS[size], 4) if size in AIMS else None
    row["met"] = row["shared_over_gloo"]["median"] <= AIMS[size] if size in AIMS else None
    print(
        f"{size} ranks: "
        + ", ".join(f"{way} {row[f'{way}_us']['median']:,.0f} us (p95 {row[f'{way}_us']['p95']:,.0f})" for way in WAYS)
        + f"; CPU of a rank {', '.join(format(row[f'{way}_cpu_us']['median'], '.0f') for way in WAYS)} us"
        + f"; ours over gloo's {row['shared_over_gloo']['median']:.3f}",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, print and write."""
    parser = measured.arguments(__doc__, "rendezvous.json", 12, "blocks of each way")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--count", type=int, default=100, help="rendezvous in a block (default: 100)")
    parser.add_argument("--payload", type=int, default=100, help="bytes of a rank, as a view has (default: 100)")
    asked = parser.parse_args()
    report = {**measured.surroundings(), "repeat": asked.repeat, "count": asked.count, "payload": asked.payload}
    worlds = [measure(size, asked.repeat, asked.count, asked.payload) for size in asked.ranks]
    measured.write(asked.output, {**report, "worlds": worlds})


if __name__ == "__main__":
    main()
