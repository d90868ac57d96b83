"""What an order certificate costs, into bench/results/certificate.json and docs/images/certificate.png.

CPU seconds of one process, in pure Python, each size in a fresh one: from the collective program to all queues (build),
Kahn's algorithm (sort), and everything that `certify` does without the searches for residency (certify, which sorts
too). Then the same with two calls of one rank swapped, to the shortest ring (swap). Memory is the peak of the process,
less that before building. About 1,000 collectives a rank: D iterations and P segments of a turnstile, with P's
full-TP all-reduces routed, so that they stand in two queues.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.topology import World
from verify.order import certify, from_program, turnstile_steps
from verify.order.queues import sort

if TYPE_CHECKING:
    from verify.order.queues import Orders

SIZES = (64, 256, 1024, 2048, 4096)
REPEATS = 5
LAYERS, SPAN, ITERATIONS = 20, 2, 8
HOUSE = Path(__file__).resolve().parent.parent
RESULTS = HOUSE / "bench" / "results" / "certificate.json"
PLOT = HOUSE / "docs" / "images" / "certificate.png"


def swapped(orders: Orders) -> Orders:
    """The same, where the last rank has two neighbours of its D stream the other way round."""
    number = max(n for n, queue in enumerate(orders.queues) if queue.name == "D")
    queue = replace(orders.queues[number], calls=orders.queues[number].calls[:])
    middle = len(queue.calls) // 2
    at = next(n for n in range(middle, len(queue.calls)) if _shared(orders, queue.calls, n))
    queue.calls[at], queue.calls[at + 1] = queue.calls[at + 1], queue.calls[at]
    return replace(orders, queues=[*orders.queues[:number], queue, *orders.queues[number + 1 :]])


def _shared(orders: Orders, calls: Any, at: int) -> bool:
    return len(set(orders.ranks_of(calls[at])) & set(orders.ranks_of(calls[at + 1]))) > 1


def measure(size: int) -> dict[str, Any]:
    """One size, in this process."""
    world = World(size, size // 8, size, "cross", "paper")
    steps = turnstile_steps(LAYERS, SPAN, ITERATIONS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken: dict[str, list[float]] = {"build": [], "sort": [], "certify": []}
    for _ in range(REPEATS):
        at = [time.process_time()]
        orders = from_program(world, LAYERS, steps=steps)
        at.append(time.process_time())
        order, _left = sort(orders)
        at.append(time.process_time())
        result = certify(orders, budget=0)
        at.append(time.process_time())
        assert result.proved
        assert len(order) == len(orders.comm)
        for name, start, end in zip(taken, at, at[1:], strict=False):
            taken[name].append(round(end - start, 4))
        del order, result
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrong = swapped(orders)
    start = time.process_time()
    found = certify(wrong, budget=0)
    return {
        "ranks": size,
        "kernels": orders.kernels,
        "instances": len(orders.comm),
        "seconds": {name: {"median": statistics.median(all_), "all": all_} for name, all_ in taken.items()},
        "swap": {"seconds": round(time.process_time() - start, 4), "hops": len(found.verdict.chain)},
        "memory_mb": round((peak - before) / 1024, 1),
    }


def plot(rows: list[dict[str, Any]]) -> None:
    """Growth of time and memory, each with the straight line through the largest size."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    kernels = [row["kernels"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, mark in (("build", "s"), ("sort", "o"), ("certify", "^")):
        seconds = [row["seconds"][name] for row in rows]
        low, high = [min(each["all"]) for each in seconds], [max(each["all"]) for each in seconds]
        (line,) = left.plot(kernels, [each["median"] for each in seconds], marker=mark, label=name)
        left.fill_between(kernels, low, high, alpha=0.2, color=line.get_color())
    whole = [row["seconds"]["build"]["median"] + row["seconds"]["certify"]["median"] for row in rows]
    left.plot(kernels, whole, color="black", marker=".", label="build and certify")
    left.plot(kernels, [k / 1e6 for k in kernels], color="gray", linestyle=":", label="a million kernels a second")
    left.set(xscale="log", yscale="log", xlabel="kernels", ylabel="CPU seconds", title="Time (median and range)")
    left.legend(fontsize=8)
    memory = [row["memory_mb"] for row in rows]
    right.plot(kernels, memory, marker="o", color="black", label="peak of the process")
    right.plot(kernels, [memory[-1] * k / kernels[-1] for k in kernels], color="gray", linestyle=":", label="linear")
    right.set(xscale="log", yscale="log", xlabel="kernels", ylabel="MB", title="Memory")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"Order certificate, up to {rows[-1]['ranks']:,} ranks, pure Python")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)


def main() -> None:
    """Measure each size in a process of its own, print a line each, write the JSON and the plot."""
    if len(sys.argv) == 2:
        print(json.dumps(measure(int(sys.argv[1]))))
        return
    rows = []
    for size in SIZES:
        command = [sys.executable, __file__, str(size)]
        path = {**os.environ, "PYTHONPATH": str(HOUSE)}
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=path)
        row = json.loads(ended.stdout)
        rows.append(row)
        whole = row["seconds"]["build"]["median"] + row["seconds"]["certify"]["median"]
        row["kernels_per_second"] = {
            "sort": round(row["kernels"] / row["seconds"]["sort"]["median"]),
            "build and certify": round(row["kernels"] / whole),
        }
        print(f"{size:5} ranks {row['kernels']:8} kernels: {whole:.2f} s, {row['memory_mb']} MB")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "command": "python bench/bench_certificate.py",
        "commit": commit,
        "python": platform.python_version(),
        "host": f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "load_before": os.getloadavg()[0],
        "unit": "CPU seconds of the process; MB of peak resident memory",
        "layers": LAYERS,
        "repeats": REPEATS,
        "results": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    plot(rows)


if __name__ == "__main__":
    main()
