"""Checkers for asyncio from PyPI beside ours on the turnstile protocol, into bench/results/checkers.json.

Each tool gets a virtual environment of its own in a cache folder outside the repository, at a pinned version, and one
process a question, one at a time. peers/checkers/protocol.py is what they check, peers/checkers/run_*.py says in which
mode. Where the protocol is right, the tool's own bound is raised from 1 until a search no longer ends within the time
limit: the last that ended is what was proved, and the executions of the next are a lower bound. A tool that reduces by
independence is also asked without a bound. Where the protocol is wrong, the executions up to the deadlock are counted.
With --tools, the results of the other tools stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.checkers.cell import Cell
from peers.checkers.protocol import VARIANTS

ROOT = Path(__file__).parent.parent
PEERS = Path(__file__).parent / "peers" / "checkers"
RESULTS = Path(__file__).parent / "results" / "checkers.json"
SIZES = ("2x2x2", "3x2x2", "4x3x3")
# Asked without a bound, so that a tool which ends nowhere else shows what it can end.
SMALL = ("1x1x1", "1x2x2")
GRACE = 30.0  # of seconds, for start, imports and the last execution


@dataclass(frozen=True, slots=True)
class Tool:
    """A peer. `unbounded` says that its search may end without a bound; `refuting` bounds its search for deadlocks."""

    name: str
    version: str
    least: tuple[int, int]
    mode: str
    unbounded: bool = False
    refuting: int | None = 2


TOOLS = (
    Tool("detangle", "0.1.0", (3, 10), "DFS, bounded by the sum of deviations from asyncio's order"),
    Tool("simloom", "0.5.0", (3, 12), "systematic, bounded by the number of deviations from asyncio's order"),
    Tool("frontrun", "0.7.0", (3, 10), "DPOR over awaits, virtual clock", unbounded=True, refuting=None),
)


class Unavailable(Exception):
    """Why a tool cannot be run here."""


def interpreters(given: list[str]) -> dict[str, Path]:
    """Version to path, of those given or else of all that are found."""
    paths = [Path(path) for path in given]
    if not paths:
        names = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
        paths = [Path(name) for name in (*names, sys.executable) if name]
        paths += sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    found = {}
    for path in paths:
        command: list[str | Path] = [path, "-c", "import platform; print(platform.python_version())"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            found[asked.stdout.strip()] = path
    return found


def number(version: str) -> tuple[int, ...]:
    """For comparing versions; a pre-release counts as its release."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])


def environment(tool: Tool, found: dict[str, Path], cache: Path) -> tuple[str, Path]:
    """The newest interpreter that fits, and the python of the tool's environment, which is made if need be."""
    fitting = [version for version in found if number(version) >= tool.least]
    if not fitting:
        raise Unavailable(f"needs Python {'.'.join(map(str, tool.least))} or newer, found {', '.join(found) or 'none'}")
    version = max(fitting, key=number)
    place = cache / f"{tool.name}-{tool.version}-py{version}"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        steps: list[list[str | Path]] = [
            [found[version], "-m", "venv", place],
            [python, "-m", "pip", "install", "--quiet", f"{tool.name}=={tool.version}"],
        ]
        for command in steps:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                lines = made.stderr.strip().splitlines() or ["no reason given"]
                raise Unavailable(f"cannot be installed on Python {version}: {lines[-1]}")
        (place / "ready").touch()
    return version, python


def ask(command: list[str | Path], cell: Cell) -> dict[str, Any]:
    """One process; a verdict in any case."""
    try:
        done = subprocess.run(
            [*command, *cell.argv()], capture_output=True, text=True, check=False, cwd=ROOT, timeout=cell.limit + GRACE
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "unfinished", "says": "ended after the time limit, without figures"}
    if done.returncode:
        return {"verdict": "error", "says": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(name: str, command: list[str | Path], cell: Cell, repeats: int) -> dict[str, Any]:
    """A row. A search that took over a quarter of the limit is not repeated."""
    answers = [ask(command, cell)]
    short = answers[0]["verdict"] in ("proved", "deadlock") and answers[0]["seconds"] < cell.limit / 4
    answers += [ask(command, cell) for _ in range(repeats - 1 if short else 0)]
    first = answers[0]
    row = {
        "tool": name,
        "size": f"{cell.ranks}x{cell.segments}x{cell.iterations}",
        "variant": cell.variant,
        "bound": cell.bound,
        "verdict": first["verdict"] if len({answer["verdict"] for answer in answers}) == 1 else "verdicts differ",
        "scope": first.get("scope"),
        "executions": first.get("executions"),
        "executions_all_equal": len({answer.get("executions") for answer in answers}) == 1,
        "repeats": len(answers),
        "says": first.get("says", ""),
    }
    seconds = [answer["seconds"] for answer in answers if "seconds" in answer]
    if seconds:
        middle = statistics.median(seconds)
        row["seconds"] = {"median": round(middle, 4), "min": round(min(seconds), 4), "max": round(max(seconds), 4)}
        if first["executions"] >= 10:
            row["executions_per_s"] = round(first["executions"] / middle, 1)
    print(
        f"{name:9} {row['size']}  {cell.variant:9}  bound {'none' if cell.bound is None else cell.bound!s:>4}  "
        f"{row['verdict']:10}  {row['executions'] or '-':>7} executions  {row.get('seconds', {}).get('median', '-')} s",
        flush=True,
    )
    return row


def of_size(size: str, variant: str, bound: int | None, limit: float) -> Cell:
    """The question about RANKSxSEGMENTSxITERATIONS."""
    ranks, segments, iterations = map(int, size.split("x"))
    return Cell(ranks, segments, iterations, variant, bound, limit)


def compare(tool: Tool, command: list[str | Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All of a peer's rows."""
    rows = []
    for size in SMALL if "turnstile" in options.variants else ():
        rows.append(measure(tool.name, command, of_size(size, "turnstile", None, options.limit), options.repeat))
    for size in options.sizes:
        for variant in options.variants:
            cell = of_size(size, variant, tool.refuting, options.limit)
            if variant == "free" or tool.unbounded:
                rows.append(measure(tool.name, command, cell, options.repeat))
            if variant == "free" or (tool.unbounded and rows[-1]["verdict"] == "proved"):
                continue
            for bound in range(1, options.deepest + 1):
                rows.append(measure(tool.name, command, replace(cell, bound=bound), options.repeat))
                if rows[-1]["verdict"] != "proved":
                    break
    return rows


def keep(report: dict[str, Any], options: argparse.Namespace) -> None:
    """What an earlier run on this host and limit found about tools that are not asked now; each has its own commit."""
    if not options.output.exists():
        return
    earlier = json.loads(options.output.read_text())
    if all(earlier[key] == report[key] for key in ("host", "limit_s")):
        report["tools"] = {name: about for name, about in earlier["tools"].items() if name not in options.tools}
        report["results"] = [row for row in earlier["results"] if row["tool"] in report["tools"]]


def arguments() -> argparse.Namespace:
    """Of the command line."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="+", default=[tool.name for tool in TOOLS] + ["ours"], metavar="NAME")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="RANKSxSEGMENTSxITERATIONS")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a search may take (default 60)")
    parser.add_argument("--deepest", type=int, default=8, help="where raising the bound stops (default 8)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of a short search (default 3)")
    parser.add_argument("--python", nargs="+", default=[], help="interpreters to choose from, instead of all found")
    parser.add_argument("--cache", type=Path, default=home / "turnstile-bench" / "checkers", help="for environments")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Install, measure, print and write."""
    options = arguments()
    found = interpreters(options.python)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    report: dict[str, Any] = {
        "command": f"python bench/bench_checkers.py --limit {options.limit:g} --repeat {options.repeat}",
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "host": f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "size": "ranks x segments of P x iterations of D",
        "verdicts": "proved, for the scope and bound of the row; deadlock; unfinished, executions being a lower bound",
        "limit_s": options.limit,
        "tools": {},
        "results": [],
    }
    keep(report, options)
    for tool in TOOLS:
        if tool.name not in options.tools:
            continue
        about: dict[str, Any] = {"version": tool.version, "mode": tool.mode, "commit": report["commit"]}
        report["tools"][tool.name] = about
        try:
            about["python"], python = environment(tool, found, options.cache)
        except Unavailable as reason:
            about["skipped"] = str(reason)
            print(f"{tool.name:9} skipped: {reason}")
            continue
        report["results"] += compare(tool, [python, PEERS / f"run_{tool.name}.py"], options)
        about["load_1m"] = round(os.getloadavg()[0], 1)
    if "ours" in options.tools:
        mode = "DPOR over posts, awaits and resumes"
        report["tools"]["ours"] = {"mode": mode, "commit": report["commit"], "python": report["python"]}
        command: list[str | Path] = [sys.executable, "-m", "bench.peers.checkers.ours"]
        cells = [of_size(size, variant, None, options.limit) for size in options.sizes for variant in options.variants]
        report["results"] += [measure("ours", command, cell, options.repeat) for cell in cells]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
