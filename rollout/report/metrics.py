"""From rows of finished turns to the metrics of one run, and from several runs to medians and spreads.

Keys follow `vllm bench serve`, and the paper's section 7 where that tool has none. Definitions:

    ttft   submission to the first token
    e2el   submission to the last token (the paper's request completion)
    tpot   (e2el - ttft) / (tokens - 1), turns of one token left out
    itl    each gap between two tokens of a turn
    trajectory completion   release of the first turn to the last turn's last token, waits included
    makespan                first release to the last token of all

Percentiles interpolate linearly between order statistics. A metric that nothing was measured for is None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rollout.replay import Row

Metrics = dict[str, float | None]

STATISTICS: Final = ("mean", "median", "p99")


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile (0 to 100) of values that are sorted and not empty."""
    at = (len(values) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def spread(name: str, values: Iterable[float]) -> Metrics:
    """`mean_<name>`, `median_<name>` and `p99_<name>`."""
    ordered = sorted(values)
    if not ordered:
        return {f"{statistic}_{name}": None for statistic in STATISTICS}
    return {
        f"mean_{name}": math.fsum(ordered) / len(ordered),
        f"median_{name}": percentile(ordered, 50),
        f"p99_{name}": percentile(ordered, 99),
    }


def measure(rows: Sequence[Row], trajectories: Mapping[str, int]) -> Metrics:
    """The request metrics of one run of one policy.

    rows: its finished turns. trajectories: turns of each trajectory that was replayed; one that did not reach its last
    turn has no completion time.
    """
    good = [row for row in rows if not row.failed]
    gaps = [(b - a) / 1e6 for row in good for a, b in zip(row.token_ns, row.token_ns[1:], strict=False)]
    span = (max(row.finished_ns for row in rows) - min(row.released_ns for row in rows)) / 1e9 if rows else 0.0
    inputs, outputs = sum(row.prompt_tokens for row in rows), sum(row.output_tokens for row in rows)
    finished = completions(good, trajectories)
    return {
        "completed": len(good),
        "failed": len(rows) - len(good),
        "completed_trajectories": len(finished),
        "makespan_s": span if rows else None,
        "request_throughput": _rate(len(good), span),
        "output_throughput": _rate(outputs, span),
        "total_token_throughput": _rate(inputs + outputs, span),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "kv_cache_hit_percent": 100 * sum(row.cached_tokens for row in rows) / inputs if inputs else None,
        **spread("ttft_ms", ((row.token_ns[0] - row.submitted_ns) / 1e6 for row in good)),
        **spread("tpot_ms", (_per_token_ms(row) for row in good if row.output_tokens > 1)),
        **spread("itl_ms", gaps),
        **spread("e2el_ms", (request_s(row) * 1e3 for row in good)),
        **spread("trajectory_completion_s", finished),
    }


def request_s(row: Row) -> float:
    """Seconds from submission to the last token."""
    return (row.finished_ns - row.submitted_ns) / 1e9


def completions(rows: Iterable[Row], trajectories: Mapping[str, int]) -> list[float]:
    """Seconds from the first release to the last token of each trajectory that finished all its turns."""
    turns: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        turns[row.trajectory].append(row)
    return [
        (max(row.finished_ns for row in done) - min(row.released_ns for row in done)) / 1e9
        for trajectory, done in turns.items()
        if len(done) == trajectories[trajectory]
    ]


def combine(runs: Sequence[Metrics]) -> Metrics:
    """One run as it is; of several each metric's median, and `<metric>_iqr`, the distance between its quartiles."""
    if len(runs) == 1:
        return dict(runs[0])
    combined: Metrics = {"repeats": len(runs)}
    for key in runs[0]:
        values = sorted(value for run in runs if (value := run[key]) is not None)
        combined[key] = percentile(values, 50) if values else None
        combined[f"{key}_iqr"] = percentile(values, 75) - percentile(values, 25) if values else None
    return combined


def _per_token_ms(row: Row) -> float:
    return (row.finished_ns - row.token_ns[0]) / 1e6 / (row.output_tokens - 1)


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
