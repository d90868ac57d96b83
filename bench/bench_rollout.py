"""How long `turnstile compare --demo` (what `make rollout` runs once installed) takes, and the figures it prints.

Whole processes, one after the other; writes bench/results/rollout.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 3
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print a line, write the JSON."""
    seconds, tables = [], []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "turnstile", "compare", "--demo", "--json", "--out", f"{out}/run"]
            start = time.perf_counter()
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds.append(time.perf_counter() - start)
            tables.append(json.loads(ended.stdout)["policies"])
    keys = ("makespan_s", "request_throughput", "mean_decode_wait_ms", "mean_rendezvous_ms", "pd_overlap_ratio")
    policies = {
        rows[0]["policy"]: {
            key: {"median": statistics.median(row[key] for row in rows), "all": [row[key] for row in rows]}
            for key in keys
        }
        for rows in zip(*tables, strict=True)
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "what": "turnstile compare --demo, whole process: four ranks, five policies, the committed slice",
        "command": "python bench/bench_rollout.py",
        "commit": commit,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": os.getloadavg()[0],
        "seconds": {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds), "all": seconds},
        "policies": policies,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rollout.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"compare --demo: median {found['seconds']['median']:.1f} s of {RUNS} runs")  # type: ignore[index]


if __name__ == "__main__":
    main()
