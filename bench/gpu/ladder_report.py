"""From finished cells to medians and spreads, to the aims, and to tables. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from bench.gpu.cells import BEST, DECODE, TRACE, best_span
from rollout.report.metrics import combine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.gpu.cells import Cell, Ladder

COLUMNS: Final = (
    ("makespan_s", "makespan s", 2),
    ("p99_e2el_ms", "p99 request ms", 0),
    ("p99_ttft_ms", "p99 TTFT ms", 0),
    ("mean_trajectory_completion_s", "trajectory s", 2),
    ("mean_decode_wait_ms", "D wait ms", 2),
    ("total_decode_wait_ms", "D wait total", 0),
    ("total_permit_wait_ms", "permit total", 0),
    ("total_enqueue_ms", "P enqueue total", 0),
    ("mean_rendezvous_ms", "rendezvous ms", 3),
    ("p_device_share", "P/makespan", 3),
    ("pd_overlap_ratio", "P and D", 3),
)
WAIT_AIM_MS: Final = 17.5
PRESSURE: Final = 0.4
"""h from which the aims about the makespan hold."""


def summary(results: Mapping[Cell, Mapping[str, Any]], ladder: Ladder) -> dict[str, Any]:
    """{"groups": [...], "best", "aims": [...]}: the cells by workload, wait and policy, combined over repetitions.

    A group's metrics are those of one run, or medians with `<metric>_iqr` and `repeats`.
    """
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in sorted(results):
        groups[cell.workload, cell.wait, cell.policy].append(dict(results[cell]["metrics"]))
    combined = {key: {"repeats": 1, **combine(runs)} for key, runs in groups.items()}
    best = best_span(ladder, {cell: result["metrics"]["makespan_s"] for cell, result in results.items()})
    return {
        "groups": [
            {"workload": workload, "wait": wait, "policy": policy, **metrics}
            for (workload, wait, policy), metrics in combined.items()
        ],
        "best": best,
        "aims": list(aims(combined, best)),
        "about": [dict(result["about"]) for result in list(results.values())[:1]],
    }


def aims(groups: Mapping[tuple[str, float, str], Mapping[str, Any]], best: str | None) -> Iterator[dict[str, Any]]:
    """What the campaign set out to reach, with the value found; met is None where the runs for it are missing."""

    def of(policy: str | None, key: str, workload: str = TRACE, wait: float = 0.0) -> float | None:
        value = groups.get((workload, wait, policy or ""), {}).get(key)
        return None if value is None else float(value)

    def drop(slow: str, fast: str | None, key: str = "makespan_s", workload: str = TRACE) -> float | None:
        a, b = of(slow, key, workload), of(fast, key, workload)
        return None if a is None or b is None or not a else 1 - b / a

    h = of("normal", "p_device_share")
    against_normal, against_enqueue = drop("normal", best), drop("global_enqueue", best)
    pressed = h is not None and h >= PRESSURE
    yield _aim("h: P device time over makespan under normal", h, None, None)
    yield _aim("share of h that the best span recovers", _ratio(against_normal, h), 0.6, True)
    yield _aim("makespan below normal (aim where h is 0.4 or more)", against_normal, 0.225 if pressed else None, True)
    yield _aim("makespan below global_enqueue (aim as above)", against_enqueue, 0.20 if pressed else None, True)
    yield _aim("mean D wait under the best span, ms", of(best, "mean_decode_wait_ms"), WAIT_AIM_MS, False)
    waits = _ratio(of(best, "mean_decode_wait_ms"), of("global_enqueue", "mean_decode_wait_ms"))
    yield _aim("mean D wait, over global_enqueue's", waits, 1 / 7, False)
    yield _aim("p99 TTFT, over normal's", _ratio(of(best, "p99_ttft_ms"), of("normal", "p99_ttft_ms")), 1.0, False)
    selector = _ratio(of("adaptive", "makespan_s"), of(best, "makespan_s"))
    yield _aim("adaptive's makespan, over the best span's", selector, 1.01, False)
    # Not throughput: a run of seconds begins with a prefill of all rows, which policies order differently.
    between = _ratio(of(best, "median_itl_ms", DECODE), of("normal", "median_itl_ms", DECODE))
    cost = None if between is None else between - 1
    yield _aim("decode-only cost: median time between tokens, over normal's, less 1", cost, 0.01, False)
    yield _aim("mean rendezvous, ms", of(best, "mean_rendezvous_ms"), 0.1, False)
    yield _aim("P and D on the device at once, ms", of(best, "overlap_ms"), 0.0, True)


def _aim(name: str, value: float | None, target: float | None, least: bool | None) -> dict[str, Any]:
    met = None
    if value is not None and target is not None:
        met = value > target if least and target == 0 else value >= target if least else value <= target
    words = "at most" if not least else "above" if target == 0 else "at least"
    bound = None if target is None else f"{words} {target:.4g}"
    return {"aim": name, "target": bound, "value": value, "met": met}


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def text(found: Mapping[str, Any]) -> str:
    """The tables, for a terminal."""
    parts: list[str] = []
    for workload, wait in dict.fromkeys((group["workload"], group["wait"]) for group in found["groups"]):
        what = "decode only" if workload == DECODE else f"waits x {wait:g}"
        parts += [f"{what} (median [IQR])", *table(rows(found["groups"], workload, wait)), ""]
    if found["best"]:
        parts.append(f"{BEST}: {found['best']}")
    parts += table(aim_rows(found["aims"]))
    return "\n".join(parts)


def rows(groups: Sequence[Mapping[str, Any]], workload: str, wait: float) -> list[list[str]]:
    """A header, then a row a policy, fastest first."""
    mine = [group for group in groups if (group["workload"], group["wait"]) == (workload, wait)]
    mine.sort(key=lambda group: group["makespan_s"] or 0)
    return [
        ["policy", "n", *(title for _, title, _ in COLUMNS)],
        *([group["policy"], f"{group['repeats']:.0f}", *(cell_text(group, key, digits) for key, _, digits in COLUMNS)]
          for group in mine),
    ]  # fmt: skip


def aim_rows(aims: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A header, then a row an aim."""
    return [["aim", "target", "value", "met"], *([*_words(aim)] for aim in aims)]


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first to the left, others to the right."""
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return [
        "  ".join(word.ljust(width) if at == 0 else word.rjust(width) for at, (word, width) in enumerate(
            zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]  # fmt: skip


def cell_text(group: Mapping[str, Any], key: str, digits: int) -> str:
    """One metric of a group, with its spread where there is one."""
    value, spread = group.get(key), group.get(f"{key}_iqr")
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" + (f" [{spread:,.{digits}f}]" if spread is not None else "")


def _words(aim: Mapping[str, Any]) -> Iterator[str]:
    value = "not measured" if aim["value"] is None else f"{aim['value']:.4g}"
    met = "-" if aim["met"] is None else "yes" if aim["met"] else "no"
    yield from (aim["aim"], aim["target"] or "-", value, met)
