"""What the benches of this folder share: arithmetic of repetitions and pairs, what surrounds a measurement, drawing.

A ratio is taken inside one run, between repetitions that take turns (`turns`), so that a machine that slows down slows
both sides. The interval of paired ratios is Student's on their logarithms: the ratios of pairs are what repeats, not
the times.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollout.report import files as report_files
from rollout.report.metrics import percentile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

RESULTS: Final = Path(__file__).resolve().parent / "results"
_T95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t that leaves 2.5 % above it, for 1 to 30 degrees of freedom."""


def t95(freedom: int) -> float:
    """Student's t of a two-sided interval of 95 %. Raises ValueError below one degree of freedom."""
    if freedom < 1:
        raise ValueError("an interval needs two values or more")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, 95th percentile, extremes and how many there are."""
    ordered = sorted(values)
    found = {"median": percentile(ordered, 50), "p95": percentile(ordered, 95), "min": ordered[0], "max": ordered[-1]}
    return {**{name: round(value, digits) for name, value in found.items()}, "n": len(ordered)}


def paired(of: Sequence[float], to: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """The ratio of/to, pair by pair: its geometric mean with the interval of 95 %, and median and extremes.

    of, to: positive, one value a pair, in the same order. Raises ValueError for less than two pairs.
    """
    logs = [math.log(a / b) for a, b in zip(of, to, strict=True)]
    mean = statistics.fmean(logs)
    half = t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    ratios = {
        "ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half),
        "median": math.exp(statistics.median(logs)), "min": math.exp(min(logs)), "max": math.exp(max(logs)),
    }  # fmt: skip
    return {**{name: round(value, digits) for name, value in ratios.items()}, "pairs": len(logs)}


def percent_more(ratio: Mapping[str, float]) -> dict[str, float]:
    """A paired ratio as per cent above one: `percent`, and `low` and `high` of the interval."""
    return {
        "percent": round(100 * (ratio["ratio"] - 1), 2),
        "low": round(100 * (ratio["low"] - 1), 2),
        "high": round(100 * (ratio["high"] - 1), 2),
    }


def below(percent: Mapping[str, float], aim: float) -> bool | None:
    """Whether per cent are below an aim: only where the whole interval says so, and None where it says neither."""
    return True if percent["high"] < aim else False if percent["low"] >= aim else None


def turns(names: Sequence[str], rounds: int, seed: int = 0) -> Iterator[tuple[int, str]]:
    """(round, name), every name once in each round. Over as many rounds as names, each is in each place once."""
    order = list(names)
    random.Random(seed).shuffle(order)
    for round_ in range(rounds):
        at = round_ % len(order)
        for name in order[at:] + order[:at]:
            yield round_, name


def arguments(doc: str | None, results: str, repeat: int, what: str) -> argparse.ArgumentParser:
    """A parser with what all of them take. repeat: the default of --repeat, what: what is repeated."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=repeat, metavar="N", help=f"{what} (default: {repeat})")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / results, metavar="FILE", help=f"default: bench/results/{results}"
    )
    return parser


def surroundings() -> dict[str, Any]:
    """Command, versions, machine, commit and load, before anything is measured."""
    return {
        **report_files.surroundings(),
        "command": " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report, with the load at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report_files.write_json(path, {**report, "load_after": round(os.getloadavg()[0], 2)})
    print(path)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
