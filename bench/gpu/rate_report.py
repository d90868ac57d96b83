"""From finished runs of the grid to request rates, to the ratios that the paper gives, and to tables. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from bench.gpu.grid import PLAIN
from bench.gpu.ladder_report import cell_text, table
from rollout.report.metrics import combine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.gpu.grid import RateCell

REQUESTS: Final = "request_throughput"
TOKENS: Final = "output_throughput"
COLUMNS: Final = (
    (REQUESTS, "requests/s", 3),
    (TOKENS, "output tokens/s", 1),
    ("makespan_s", "makespan s", 2),
    ("p99_ttft_ms", "p99 TTFT ms", 0),
    ("median_itl_ms", "ITL ms", 2),
    ("mean_decode_wait_ms", "D wait ms", 2),
    ("total_permit_wait_ms", "permit total", 0),
    ("p_device_share", "P/makespan", 3),
    ("pd_overlap_ratio", "P and D", 3),
)
NORMAL: Final = "normal"
DEEPEP: Final = "deepep"
WITH: Final = 1.218
"""Least rate of a multiplexing policy over DeepEP, over normal's over DeepEP (the paper: 21.8 % more)."""
WITHOUT: Final = 1.125
"""The same over normal's without DeepEP (12.5 % more)."""


def summary(results: Mapping[RateCell, Mapping[str, Any]]) -> dict[str, Any]:
    """{"groups": [...], "ratios": [...], "about": [...]}: runs by weights, exchange and policy, over repetitions.

    A group's metrics are those of one run, or medians with `<metric>_iqr` and `repeats`.
    """
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in sorted(results):
        runs[cell.weights, cell.exchange, cell.policy].append(dict(results[cell]["metrics"]))
    groups = [
        {"weights": weights, "exchange": exchange, "policy": policy, "repeats": 1, **combine(found)}
        for (weights, exchange, policy), found in runs.items()
    ]
    return {
        "groups": groups,
        "ratios": list(ratios(results)),
        "about": [dict(result["about"]) for result in list(results.values())[:1]],
    }


def ratios(results: Mapping[RateCell, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each policy over DeepEP, over `normal` on the same weights and over each exchange; and over each exchange, what
    the policy wins there.

    requests, tokens: ratios of medians; requests_low and requests_high: of the repetitions that both have.
    target: of requests, None where the paper gives none; met: None where it cannot be told.
    """
    rates: dict[tuple[str, str, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for cell in sorted(results):
        metrics = results[cell]["metrics"]
        rates[cell.weights, cell.exchange, cell.policy][cell.repetition] = metrics[REQUESTS], metrics[TOKENS]
    exchanges = list(dict.fromkeys(exchange for _, exchange, _ in rates))
    for weights, exchange, policy in rates:
        if policy == NORMAL:
            continue
        mine = rates[weights, exchange, policy]
        others = exchanges if exchange == DEEPEP else [exchange]
        for other in sorted(others, key=lambda name: (name != exchange, name)):
            base = rates.get((weights, other, NORMAL))
            if not base:
                continue
            pairs = [mine[number][0] / base[number][0] for number in mine.keys() & base.keys() if base[number][0]]
            target = None if exchange != DEEPEP else WITH if other == DEEPEP else WITHOUT
            requests, tokens = (_median(mine, at) / _median(base, at) for at in (0, 1))
            yield {
                "weights": weights,
                "ratio": f"{policy} over {exchange}, over {NORMAL} over {other}",
                "requests": requests,
                "tokens": tokens,
                "requests_low": min(pairs, default=None),
                "requests_high": max(pairs, default=None),
                "target": target,
                "met": None if target is None else requests >= target,
            }


def _median(rates: Mapping[int, tuple[float, float]], at: int) -> float:
    found = sorted(each[at] for each in rates.values())
    middle = len(found) // 2
    return found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2


def text(found: Mapping[str, Any]) -> str:
    """The tables, for a terminal."""
    parts: list[str] = []
    for weights in dict.fromkeys(group["weights"] for group in found["groups"]):
        parts += [f"{name_of(weights)} (median [IQR])", *table(rows(found["groups"], weights)), ""]
    return "\n".join([*parts, *table(ratio_rows(found["ratios"]))])


def name_of(weights: str) -> str:
    """Weights, for people."""
    return "weights of the device's own type" if weights == PLAIN else f"{weights} weights"


def rows(groups: Sequence[Mapping[str, Any]], weights: str) -> list[list[str]]:
    """A header, then a row for each exchange and policy, the highest rate first."""
    mine = sorted((group for group in groups if group["weights"] == weights), key=lambda group: -group[REQUESTS])
    return [
        ["exchange", "policy", "n", *(title for _, title, _ in COLUMNS)],
        *([group["exchange"], group["policy"], f"{group['repeats']:.0f}",
           *(cell_text(group, key, digits) for key, _, digits in COLUMNS)] for group in mine),
    ]  # fmt: skip


def ratio_rows(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A header, then a row a ratio."""
    lines = [["weights", "rate of", "requests", "of single rounds", "output tokens", "aim", "met"]]
    for each in found:
        low, high, target = each["requests_low"], each["requests_high"], each["target"]
        lines.append(
            [
                each["weights"],
                each["ratio"],
                f"{each['requests']:.3f}",
                "-" if low is None else f"{low:.3f} to {high:.3f}",
                f"{each['tokens']:.3f}",
                "-" if target is None else f"at least {target:.3f}",
                "-" if each["met"] is None else "yes" if each["met"] else "no",
            ]
        )
    return lines
