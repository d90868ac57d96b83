"""From the dumps of a stuck job on disk to its report, into bench/results/hang.json and hang.png.

`turnstile hang` as a whole process on Flight Recorder dumps of 16 to 4,096 ranks with 1,000 entries each (`fr_job.py`:
tensor, data and pipeline groups, stacks, rings that wrapped; one rank never makes a late call): seconds from start to
end, CPU seconds and peak memory of it and its workers together. Then PyTorch's own analyzer, `torchfrtrace`, and ours
on the same folders of up to 256 ranks, without pipelines, on which it goes through all entries instead of giving up.
Each time both must name the rank, or it is said that they did not.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import fr_job

CALLS: Final = 1000
SIZES: Final = (16, 64, 256, 1024, 4096)
COMPARED: Final = ((16, 1000), (64, 1000), (256, 1000), (256, 2000))
"""Ranks and entries of the comparison; 2,000 is what PyTorch keeps unless told otherwise."""
PATIENCE_S: Final = 900.0
REPEATS: Final = 3
HOUSE: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = HOUSE / "bench" / "results"
ANALYZER: Final = "torch.distributed.flight_recorder.fr_trace"


def measured(command: list[str]) -> dict[str, Any]:
    """One process and those that it starts: seconds, CPU seconds, peak memory of all together, output, exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
        peak = [0]
        watcher = threading.Thread(target=watch, args=(process, peak))
        watcher.start()
        try:
            process.wait(PATIENCE_S)
            late = False
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late = True
        seconds = time.perf_counter() - start
        watcher.join()
        out.seek(0)
        text = out.read().decode(errors="replace")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3), "peak_mb": round(peak[0] / 1024, 1),
        "ended": not late, "code": process.returncode, "output": text,
    }  # fmt: skip


def watch(process: subprocess.Popen[bytes], peak: list[int]) -> None:
    """The largest sum of the resident memory, in KiB, of a process and its children, looked at ten times a second."""
    while process.poll() is None:
        try:
            tasks = Path(f"/proc/{process.pid}/task").iterdir()
            children = [pid for task in tasks for pid in (task / "children").read_text().split()]
            peak[0] = max(peak[0], sum(resident(pid) for pid in (str(process.pid), *children)))
        except OSError:
            pass
        time.sleep(0.1)


def resident(pid: str) -> int:
    """KiB."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def environment() -> dict[str, str]:
    """Our packages first."""
    return {**os.environ, "PYTHONPATH": str(HOUSE)}


def ours(folder: Path, victim: int) -> dict[str, Any]:
    """The median of several runs, by seconds."""
    runs = sorted((hang(folder, victim) for _ in range(REPEATS)), key=lambda run: float(run["seconds"]))
    return {**runs[len(runs) // 2], "all_seconds": [run["seconds"] for run in runs]}


def hang(folder: Path, victim: int) -> dict[str, Any]:
    """`turnstile hang` on a folder."""
    run = measured([sys.executable, "-m", "turnstile", "hang", str(folder)])
    text = run.pop("output")
    return run | {
        "lines": len(text.splitlines()),
        "right": text.startswith(f"verdict   missing (certain): rank {victim}:"),
    }


def theirs(folder: Path, victim: int) -> dict[str, Any]:
    """PyTorch's analyzer on a folder. right: each of its reports that names missing ranks names that rank alone."""
    run = measured([sys.executable, "-m", ANALYZER, str(folder), "-p", "nccl_trace_rank_"])
    text = run.pop("output")
    named = [sorted(map(int, re.findall(r"\d+", each))) for each in re.findall(r"missing ranks: \{([^}]*)\}", text)]
    said = {"reports": len(named), "named": [len(each) for each in named][:10], "lines": len(text.splitlines())}
    error = re.findall(r"^(\w+Error.*)$", text, re.MULTILINE)
    return run | said | {"right": bool(named) and all(each == [victim] for each in named), "error": error[-1:] or None}


def exponent(rows: list[dict[str, Any]], key: str) -> float:
    """Slope of the line through the larger sizes, both axes logarithmic: 1 is linear growth."""
    rows = [row for row in rows if row["ranks"] >= 256]
    x = [math.log(row["ranks"]) for row in rows]
    y = [math.log(row[key]) for row in rows]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return round(
        sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x), 2
    )


def plot(rows: list[dict[str, Any]], compared: list[dict[str, Any]]) -> None:
    """Growth of time and memory, each with the straight line through the largest size."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    ranks = [row["ranks"] for row in rows]
    left.plot(ranks, [row["seconds"] for row in rows], marker="o", color="black", label="turnstile hang: seconds")
    left.plot(ranks, [row["cpu_seconds"] for row in rows], marker="s", label="turnstile hang: CPU seconds")
    other = [row for row in compared if row["calls"] == CALLS and row["torchfrtrace"]["ended"]]
    left.plot(
        [row["ranks"] for row in other], [row["torchfrtrace"]["seconds"] for row in other], marker="^", color="tab:red",
        label="torchfrtrace: seconds",
    )  # fmt: skip
    for axes, key in ((left, "cpu_seconds"), (right, "peak_mb")):
        top = rows[-1][key] / ranks[-1]
        axes.plot(ranks, [top * n for n in ranks], color="gray", linestyle=":", label="linear")
        axes.set(xscale="log", yscale="log", xlabel=f"ranks, {CALLS:,} entries each")
        axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.set(ylabel="seconds", title="From dumps on disk to the report")
    right.plot(ranks, [row["peak_mb"] for row in rows], marker="o", color="black", label="with its workers")
    right.set(ylabel="MB", title="Peak memory")
    for axes in (left, right):
        axes.legend(fontsize=8)
    figure.savefig(RESULTS / "hang.png", dpi=120)


def folder_of(root: Path, shape: fr_job.Shape) -> tuple[Path, int, float]:
    """Fresh dumps: where, the rank that is to blame, and their size in MB."""
    folder = root / f"{shape.ranks}x{shape.calls}"
    victim = fr_job.write(folder, shape)
    return folder, victim, round(sum(each.stat().st_size for each in folder.iterdir()) / 1e6, 1)


def main() -> None:
    """Measure each size, print a line each, write the JSON and the plot."""
    from importlib.metadata import version

    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for size in SIZES:
            folder, victim, mb = folder_of(root, fr_job.Shape(size, CALLS))
            row = {"ranks": size, "calls": CALLS, "dumps_mb": mb, **ours(folder, victim)}
            row["cpu_us_per_entry"] = round(1e6 * row["cpu_seconds"] / (size * CALLS), 2)
            rows.append(row)
            shutil.rmtree(folder)
            told = f"{row['seconds']} s, {row['cpu_seconds']} CPU s, {row['peak_mb']} MB, right: {row['right']}"
            print(f"{size:5} ranks: {told}")
        for size, calls in COMPARED:
            folder, victim, mb = folder_of(root, fr_job.Shape(size, calls, pipeline=1))
            mine, other = ours(folder, victim), theirs(folder, victim)
            times = {key: round(other[key] / mine[key], 1) for key in ("seconds", "cpu_seconds")}
            compared.append(
                {
                    "ranks": size,
                    "calls": calls,
                    "dumps_mb": mb,
                    "turnstile": mine,
                    "torchfrtrace": other,
                    "times": times,
                }
            )
            shutil.rmtree(folder)
            more = "" if other["ended"] else "more than "
            print(f"{size:5} ranks x {calls}: {mine['seconds']:.2f} s, torchfrtrace {more}{other['seconds']:.2f} s")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "command": "python bench/bench_hang.py",
        "commit": commit,
        "python": platform.python_version(),
        "torch": version("torch"),
        "networkx": version("networkx"),
        "host": f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "note": "A load above 0 is other work on the same cores: seconds then are too many, CPU seconds somewhat.",
        "unit": "seconds of the whole process; CPU seconds and MB of it and its workers together",
        "repeats": REPEATS,
        "growth": {"cpu_seconds": exponent(rows, "cpu_seconds"), "seconds": exponent(rows, "seconds")},
        "results": rows,
        "compared": compared,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "hang.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(rows, compared)


if __name__ == "__main__":
    main()
