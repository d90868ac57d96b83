"""What an event of the record costs, into bench/results/record.json.

The CPU time of this thread per event, over a ring that wraps several times: least, median and largest of many batches.
On a core whose sibling thread is busy, everything here takes up to twice as long; the least is the quiet core's.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.record import Kind, NullRecorder, Recorder, read, ring_path
from kernel.request import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, BATCHES = 10_000, 60
RESULTS = Path(__file__).parent / "results" / "record.json"


def nanoseconds(call: Callable[[int], object]) -> dict[str, float]:
    """Of one call, the loop around it taken off."""
    taken = []
    for _ in range(BATCHES):
        start = time.thread_time_ns()
        for _number in range(BATCH):
            pass
        middle = time.thread_time_ns()
        for number in range(BATCH):
            call(number)
        taken.append((time.thread_time_ns() - middle - (middle - start)) / BATCH)
    return {"min": round(min(taken)), "median": round(statistics.median(taken)), "max": round(max(taken))}


def measure(run: Path) -> dict[str, dict[str, float]]:
    """Each of the recorder's calls, as the kernel makes it."""
    recorder = Recorder(ring_path(run, 0), rank=0, groups={"P.TP": (0, 1)})
    event, nothing, kind, phase = recorder.event, NullRecorder().event, Kind.ENQUEUE, Phase.P
    group, op, site = recorder.group("P.TP"), recorder.site("AR"), recorder.site("model.py:3 forward")
    results = {
        "event": nanoseconds(lambda n: event(kind, phase, "P", group, n, 7, 3, 4096, op, site)),
        "null event": nanoseconds(lambda n: nothing(kind, phase, "P", group, n, 7, 3, 4096, op, site)),
        "sizes of 4": nanoseconds(lambda n: recorder.sizes(group, n, (5, 3, 0, 2))),
        "known site": nanoseconds(lambda n: recorder.site("model.py:3 forward")),
        "here": nanoseconds(lambda n: recorder.here()),
    }
    start = time.perf_counter_ns()
    events = len(read(recorder.path).events)
    results["reading an event"] = {"once": round((time.perf_counter_ns() - start) / events)}
    return results


def main() -> None:
    """Measure, print and write."""
    with tempfile.TemporaryDirectory() as run:
        results = measure(Path(run))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "command": "python bench/bench_record.py",
        "commit": commit,
        "python": platform.python_version(),
        "host": f"{platform.machine()} {platform.system()} {platform.release()}",
        "unit": "ns of CPU time a call, a lambda's call included",
        "batches": BATCHES,
        "calls": BATCH,
        "results": results,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    json.dump(found["results"], sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
