"""Host time of one decode iteration outside the model, part by part, into bench/results/host.json.

A real rank decodes 1 and 16 rows; a policy (bench/host_probe.py) measures it from inside. `loop` is the CPU time of the
event loop's thread in a round, `stream` that of D's stream thread less the model's forward; both make `outside`. `gap`
is how long a round lasts beyond the forward itself: what the host time costs where there are cores enough.
Parts are measured after that, with clocks around them whose own cost is taken off; `rest` is asyncio and what has no
part of its own.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measured
from bench.batches import SHAPE, batch
from kernel.record import Kind, read_run
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

SETTLE = 20
FORWARD = "forward"


def told(marks: Iterable[tuple[str, int]], rounds: int) -> dict[str, Any]:
    """From the probe's marks to microseconds a round. Raises SystemExit when it has not finished."""
    plain: dict[str, float] = {}
    parts: dict[tuple[str, str], dict[str, float]] = {}
    missing = []
    for text, number in marks:
        words = text.split()
        if words[:2] == ["host", "plain"]:
            plain[" ".join(words[2:-1])] = number / 1e3 / rounds
        elif words[:2] == ["host", "parts"]:
            scale = 1e3 if words[-1] == "ns" else 1
            parts.setdefault((words[2], " ".join(words[3:-1])), {})[words[-1]] = number / scale / rounds
        elif words[:2] == ["host", "missing"]:
            missing.append(" ".join(words[2:]))
    if not plain or not parts:
        raise SystemExit("the probe told nothing: are there rounds enough in which all rows decode?")
    loop, stream = plain["loop cpu"], plain["stream cpu"] - plain["forward cpu"]
    rows: list[dict[str, Any]] = [
        {"thread": thread, "part": part, "us": round(each["ns"], 2), "calls": round(each.get("calls", 0), 2)}
        for (thread, part), each in parts.items()
        if part != FORWARD
    ]
    for thread, whole in (("loop", loop), ("stream", stream)):
        known = sum(float(row["us"]) for row in rows if row["thread"] == thread)
        rows.append({"thread": thread, "part": "rest", "us": round(whole - known, 2), "calls": 0})
    return {
        "outside_us": loop + stream, "loop_us": loop, "stream_us": stream, "forward_cpu_us": plain["forward cpu"],
        "forward_us": plain["forward wall"], "round_us": plain["round wall"],
        "gap_us": plain["round wall"] - plain["forward wall"],
        "parts": sorted(rows, key=lambda row: (row["thread"], -row["us"])), "missing": missing,
    }  # fmt: skip


def middle(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Spreads over runs; of parts the median over the runs that have it."""
    found: dict[str, Any] = {
        name: measured.spread([run[name] for run in runs], 1) for name in runs[0] if name.endswith("_us")
    }
    names = list(dict.fromkeys((row["thread"], row["part"]) for run in runs for row in run["parts"]))
    rows = []
    for thread, part in names:
        mine = [row for run in runs for row in run["parts"] if (row["thread"], row["part"]) == (thread, part)]
        rows.append(
            {"thread": thread, "part": part,
             **{key: round(statistics.median(row[key] for row in mine), 2) for key in ("us", "calls")}}
        )  # fmt: skip
    found["parts"] = sorted(rows, key=lambda row: (row["thread"], -row["us"]))
    found["missing"] = sorted({name for run in runs for name in run["missing"]})
    return found


async def measure(size: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """All row counts on a world of `size` ranks; a fresh engine each time, for the probe leaves clocks behind."""
    world, tokens = World(size, size, size), 2 * (SETTLE + asked.rounds) + 30
    file, cells = Path(__file__).parent / "host_probe.py", []
    runs: dict[int, list[dict[str, Any]]] = {rows: [] for rows in asked.rows}
    with tempfile.TemporaryDirectory() as name:
        model = write_checkpoint(Path(name) / "model", **SHAPE, max_positions=tokens + 64)  # type: ignore[arg-type]
        for round_ in range(asked.repeat):
            for rows in asked.rows:
                out = Path(name) / f"{round_}-{rows}"
                spec = f"{file}:Probe:rows={rows},settle={SETTLE},rounds={asked.rounds}"
                pool = 16 * rows * (tokens // 16 + 4)
                async with Engine(model, world, policy=spec, rows=rows, kv_tokens=pool, out=out) as engine:
                    await batch(engine, rows * size, 16, tokens, round_)
                events = read_run(out)[0].events
                runs[rows].append(told(((e.text, e.a) for e in events if e.kind is Kind.MARK), asked.rounds))
    for rows in asked.rows:
        cells.append({"ranks": size, "rows": rows, **middle(runs[rows])})
        show(cells[-1])
    return cells


def show(cell: Mapping[str, Any]) -> None:
    """Print one cell."""
    print(f"\n{cell['ranks']} ranks, {cell['rows']} rows a replica, microseconds of a round (medians of runs)")
    for name in ("outside", "loop", "stream", "forward_cpu", "forward", "gap", "round"):
        each = cell[f"{name}_us"]
        print(f"  {name:12s} {each['median']:10,.1f}   ({each['min']:,.1f} to {each['max']:,.1f})")
    for row in cell["parts"]:
        print(f"    {row['thread']:7s} {row['part']:22s} {row['us']:9,.1f}   {row['calls']:5.1f} calls")
    if cell["missing"]:
        print(f"  not there any more: {', '.join(cell['missing'])}", flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = measured.arguments(__doc__, "host.json", 5, "engines for each number of rows")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="worlds (default: 1)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="of each replica (default: 1 16)")
    parser.add_argument("--rounds", type=int, default=300, help="of each measurement (default: 300)")
    asked = parser.parse_args()
    report = {**measured.surroundings(), "model": SHAPE, "rounds": asked.rounds}
    cells = [cell for size in asked.ranks for cell in asyncio.run(measure(size, asked))]
    measured.write(asked.output, {**report, "cells": cells})


if __name__ == "__main__":
    main()
