"""How soon a ring is reported, and what watching costs a run that is well, into bench/results/live.json.

report: from the event of the record that closes the ring (the last one of the ranks in it before the report) to the
watcher's report, on this host's monotonic clock; end: to the end of the command, which `--abort-on-cycle` ends.
watcher: its CPU time over its life beside a healthy run of four ranks, in per cent of one core; makespan: of that run
with and without it, in pairs that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernel.record import Kind, read_run

RESULTS = Path(__file__).parent / "results" / "live.json"
WORLD = ("--world", "4", "--adp", "2", "--ep", "4", "--prefill-tokens", "128")
SHORT = ("--fraction", "0.125", "--turns", "4", "--length-scale", "0.05", "--time-scale", "0.01")
LONG = ("--fraction", "0.25", "--turns", "6", "--length-scale", "0.1", "--time-scale", "0.01")
POLICY = """
    from kernel.sched.fine import Fine
    from kernel.sched.policy import Guarantees


    class Fences(Fine):
        \"\"\"From round 60 on rank 1 waits for D before the rendezvous that the others launch D after.\"\"\"

        guarantees = Guarantees(deadlock_free=False)

        async def turn(self, gate):
            if not gate.p_active:
                gate.launch_decode()
                return
            await gate.reached()
            hangs = gate._rank.rank == 1 and gate.plan.round > 60 and gate.d_ready
            if hangs:
                gate.launch_decode()
                await gate.drained()
            await gate.rendezvous("pre-d")
            if not hangs:
                gate.launch_decode()
            await gate.rendezvous("post-d")
            gate.release(gate.plan.span)
"""


def command(out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A rollout, its output thrown away."""
    return subprocess.Popen(
        [sys.executable, "-m", "turnstile", "rollout", *WORLD, "--out", str(out), *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def detection(folder: Path, number: int) -> dict[str, float]:
    """One run that hangs: seconds from the closing of the ring to the report, and to the end of the command."""
    policy, out = folder / "fences.py", folder / f"hangs{number}"
    policy.write_text(textwrap.dedent(POLICY))
    code = command(out, *SHORT, "--policy", f"{policy}:Fences", "--abort-on-cycle").wait(300)
    ended = time.monotonic_ns()
    report = json.loads((out / "hang.json").read_text())
    if code != 1 or report["class"] != "cycle":
        raise SystemExit(f"no ring was reported: exit code {code}, {report}")
    told = report["monotonic_ns"]
    rings = read_run(out)
    closed = max(
        event.time_ns
        for rank in report["ranks"]
        for event in rings[rank].events
        if event.kind is not Kind.MARK and event.time_ns < told
    )
    return {"report_s": round((told - closed) / 1e9, 3), "end_s": round((ended - closed) / 1e9, 3)}


def cpu_s(pid: int) -> float | None:
    """CPU time of a process so far, None where it is gone."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def watcher_of(pid: int) -> int | None:
    """The watcher among the children of a launcher."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                if b"verify.live.watch" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


def healthy(out: Path, *, live: bool) -> dict[str, float]:
    """One run that is well: its makespan, and what the watcher took."""
    process = command(out, *LONG, "--policy", "fine", *(("--live-check",) if live else ()))
    watcher, samples = None, list[tuple[float, float]]()
    while process.poll() is None:
        watcher = watcher or (watcher_of(process.pid) if live else None)
        if watcher is not None and (out / "record").is_dir() and (used := cpu_s(watcher)) is not None:
            samples.append((time.monotonic(), used))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"a healthy run failed with exit code {process.returncode}: see {out}")
    found = {"makespan_s": json.loads((out / "report.json").read_text())["policies"][0]["makespan_s"]}
    if live:
        (began, before), (ended, after) = samples[0], samples[-1]
        found |= {"watcher_percent": round(100 * (after - before) / (ended - began), 2), "watched_s": ended - began}
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def main() -> None:
    """Measure, print and write."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--hangs", type=int, default=15)
    given.add_argument("--pairs", type=int, default=6)
    options = given.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hangs = [detection(folder, number) for number in range(options.hangs)]
        pairs: list[dict[bool, dict[str, float]]] = []
        for number in range(options.pairs):
            order = (True, False) if number % 2 else (False, True)
            pairs.append({live: healthy(folder / f"well{number}{live}", live=live) for live in order})
    results: dict[str, Any] = {
        "report_s": spread([each["report_s"] for each in hangs]),
        "end_s": spread([each["end_s"] for each in hangs]),
        "watcher_percent_of_a_core": spread([pair[True]["watcher_percent"] for pair in pairs]),
        "watched_s": spread([pair[True]["watched_s"] for pair in pairs]),
        "makespan_s": {
            "without": spread([pair[False]["makespan_s"] for pair in pairs]),
            "with": spread([pair[True]["makespan_s"] for pair in pairs]),
            "ratio of a pair": spread([pair[True]["makespan_s"] / pair[False]["makespan_s"] for pair in pairs]),
        },
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "command": f"python bench/bench_live.py --hangs {options.hangs} --pairs {options.pairs}",
        "commit": commit,
        "python": platform.python_version(),
        "host": f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "ranks": 4,
        "results": results,
        "hangs": hangs,
        "pairs": [{"with" if live else "without": one for live, one in pair.items()} for pair in pairs],
    }
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
