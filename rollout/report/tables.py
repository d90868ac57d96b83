"""The tables that people read: one policy in the manner of `vllm bench serve`, several side by side."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from rollout.report.metrics import STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollout.report.metrics import Metrics

WIDTH: Final = 66
CAPTION: Final = (
    "What this shows is the order of prefill and decode and how long each waits for the other; it is not GPU speed.\n"
    "mean D wait: how long ready rows waited for their next decode iteration. P and D ratio: share of time with both\n"
    "in flight. Ranks that share CPU cores gain nothing from overlap, so its worth does not show in the makespan."
)
GPU_CAPTION: Final = (
    "mean D wait: how long ready rows waited for their next decode iteration. P and D ratio: share of time with both\n"
    "in flight on the device. All policies ran on the same ranks, after one warm-up."
)

HEAD: Final = (
    ("completed", "Completed requests", "{:,.0f}"),
    ("failed", "Failed requests", "{:,.0f}"),
    ("completed_trajectories", "Completed trajectories", "{:,.0f}"),
    ("makespan_s", "Makespan (s)", "{:,.3f}"),
    ("total_input_tokens", "Total input tokens", "{:,.0f}"),
    ("total_output_tokens", "Total output tokens", "{:,.0f}"),
    ("kv_cache_hit_percent", "Prompt tokens from the KV cache (%)", "{:,.1f}"),
    ("request_throughput", "Request throughput (requests/s)", "{:,.2f}"),
    ("output_throughput", "Output token throughput (tokens/s)", "{:,.1f}"),
    ("total_token_throughput", "Total token throughput (tokens/s)", "{:,.1f}"),
    ("pd_overlap_ratio", "Time with P and D in flight (ratio)", "{:,.3f}"),
)
GROUPS: Final = (
    ("ttft_ms", "Time to first token (ms)"),
    ("tpot_ms", "Time per output token after the first (ms)"),
    ("itl_ms", "Inter-token latency (ms)"),
    ("e2el_ms", "Request completion (ms)"),
    ("trajectory_completion_s", "Trajectory completion, waits included (s)"),
    ("decode_wait_ms", "Decode waits, a ready iteration (ms)"),
    ("permit_wait_ms", "Prefill waits for its permit (ms)"),
    ("rendezvous_ms", "Rendezvous (ms)"),
)
COLUMNS: Final = (
    ("makespan_s", "makespan", "s", "{:,.2f}"),
    ("request_throughput", "requests", "1/s", "{:,.2f}"),
    ("p99_ttft_ms", "p99 TTFT", "ms", "{:,.1f}"),
    ("p99_e2el_ms", "p99 request", "ms", "{:,.1f}"),
    ("mean_trajectory_completion_s", "mean trajectory", "s", "{:,.2f}"),
    ("mean_decode_wait_ms", "mean D wait", "ms", "{:,.2f}"),
    ("mean_rendezvous_ms", "mean rendezvous", "ms", "{:,.2f}"),
    ("pd_overlap_ratio", "P and D", "ratio", "{:,.3f}"),
)


def table(policy: str, metrics: Metrics, title: str) -> str:
    """One policy's metrics, one a line; with repeats the median and, in brackets, the interquartile range."""
    return "\n".join(_lines(policy, metrics, title))


def _lines(policy: str, metrics: Metrics, title: str) -> Iterator[str]:
    yield f" {policy} ".center(WIDTH, "=")
    yield from textwrap.wrap(title, WIDTH, break_on_hyphens=False)
    if repeats := metrics.get("repeats"):
        yield f"median of {repeats:.0f} repeats [interquartile range]"
    yield from (_line(name, _value(metrics, key, form)) for key, name, form in HEAD if key in metrics)
    for key, name in GROUPS:
        if metrics.get(f"mean_{key}") is None:
            continue
        yield f" {name} ".center(WIDTH, "-")
        for statistic in STATISTICS:
            yield _line(statistic.capitalize(), _value(metrics, f"{statistic}_{key}", "{:,.3f}"))
    yield "=" * WIDTH


def comparison(policies: Mapping[str, Metrics], title: str, caption: str = CAPTION) -> str:
    """One row a policy, with a title that names the slice and a caption that says what the numbers are."""
    names = ["policy", *policies]
    columns = [[name, *(_value(metrics, key, form) for metrics in policies.values())] for key, name, _, form in COLUMNS]
    widths = [max(map(len, column)) for column in columns]
    first = max(map(len, names))
    units = "  ".join(unit.rjust(width) for (_, _, unit, _), width in zip(COLUMNS, widths, strict=True))
    rows = [
        "  ".join([name.ljust(first), *(column[at].rjust(widths[c]) for c, column in enumerate(columns))])
        for at, name in enumerate(names)
    ]
    rule = "-" * len(rows[0])
    repeats = next((metrics["repeats"] for metrics in policies.values() if "repeats" in metrics), None)
    note = [f"Medians of {repeats:.0f} repeats [interquartile range]."] if repeats else []
    return "\n".join([title, "", rows[0], " " * first + "  " + units, rule, *rows[1:], rule, *note, caption])


def failures(policy: str, failed: Sequence[str]) -> str:
    """One line about turns that ended early, naming the first."""
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"{policy}: {failed[0]}{more} ended before the recorded length: see requests.jsonl"


def _line(name: str, value: str) -> str:
    return f"{name + ':':<{WIDTH - 24}}{value:>24}"


def _value(metrics: Metrics, key: str, form: str) -> str:
    value, spread = metrics.get(key), metrics.get(f"{key}_iqr")
    if value is None:
        return "-"
    return form.format(value) + (f" [{form.format(spread)}]" if spread is not None else "")
