"""What an event of the record costs, and what a run pays for it, into bench/results/record.json.

The CPU time of this thread per event, over a ring that wraps several times: least, median and largest of many batches.
On a core whose sibling thread is busy, everything here takes up to twice as long; the least is the quiet core's.
Then runs of real ranks with and without a record in turn, in pairs: their length, and the CPU time of all ranks; what
share of that time the events of a run take at their measured price (what the rank does to write one comes on top); and
what the record adds to the CPU time of decode rounds, in stretches of one run (`bench/stretches.py`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measured, stretches
from bench.batches import SHAPE, batch, cpu_s
from bench.stretch_policy import RECORD, StretchConfig
from kernel.record import Kind, NullRecorder, Recorder, read, read_run, ring_path
from kernel.request import Phase
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

BATCH, BATCHES = 10_000, 60
WITH, WITHOUT = "with", "without"
AIM_PERCENT = 1.0


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


async def runs(asked: argparse.Namespace) -> dict[str, Any]:
    """The same batch with a record and without one, in turn; what the record adds, in per cent."""
    seconds: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    cpu: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    events = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = StretchConfig(RECORD, rows=max(1, asked.requests // asked.ranks), pairs=asked.pairs)
        most = sizes.rounds + asked.prompt + asked.tokens
        model = write_checkpoint(folder / "model", **SHAPE, max_positions=most)  # type: ignore[arg-type]
        pool = 16 * sizes.rows * (most // 16 + 2)
        async with Engine(model, World(asked.ranks, asked.ranks, asked.ranks), kv_tokens=pool) as engine:
            rounds = await stretches.measure(engine, folder / "stretches", sizes, asked.prompt)
            for round_, way in measured.turns((WITH, WITHOUT), asked.repeat + 1):
                run = folder / str(round_)
                await engine.flush()
                await engine.use_policy("fine", record=run if way == WITH else None)
                before = cpu_s(engine)
                _, took = await batch(engine, asked.requests, asked.prompt, asked.tokens, round_)
                used = cpu_s(engine) - before
                if round_ == 0:  # it warms up
                    continue
                seconds[way].append(took)
                cpu[way].append(used)
                if way == WITH:
                    await engine.use_policy("fine")
                    events = sum(len(each.events) + each.dropped for each in read_run(run).values())
    found: dict[str, Any] = {"requests": asked.requests, "tokens": asked.tokens, "events_a_run": events}
    found["stretches"] = rounds
    for what, each in (("length", seconds), ("cpu", cpu)):
        ratio = measured.paired(each[WITH], each[WITHOUT])
        found[what] = {
            "with_s": measured.spread(each[WITH]), "without_s": measured.spread(each[WITHOUT]),
            **ratio, "percent": measured.percent_more(ratio),
        }  # fmt: skip
    return {**found, "aim_percent": AIM_PERCENT, "met": measured.below(rounds["percent"], AIM_PERCENT)}


def main() -> None:
    """Measure, print and write."""
    parser = measured.arguments(__doc__, "record.json", 15, "pairs of runs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=100, help="of stretches of rounds (default: 100)")
    parser.add_argument("--requests", type=int, default=16, help="of a run (default: 16)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens (default: 200)")
    parser.add_argument("--tokens", type=int, default=64, help="that each generates (default: 64)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as run:
        results = measure(Path(run))
    found = {
        **measured.surroundings(),
        "unit": "ns of CPU time a call, a lambda's call included",
        "batches": BATCHES,
        "calls": BATCH,
        "results": results,
        "run": asyncio.run(runs(asked)),
    }
    run = found["run"]
    share = run["events_a_run"] * results["event"]["median"] / 1e9 / run["cpu"]["with_s"]["median"]
    run["events_percent_of_cpu"] = round(100 * share, 2)
    json.dump({name: found[name] for name in ("results", "run")}, sys.stdout, indent=2)
    print()
    measured.write(asked.output, found)


if __name__ == "__main__":
    main()
