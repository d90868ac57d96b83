"""What a finished campaign leaves: metrics from its rows and records, figures, and what is printed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from kernel.errors import UsageError
from kernel.record import read_run
from rollout.args import COMPARE
from rollout.report import files as report_files
from rollout.report import lanes, plots
from rollout.report import metrics as report_metrics
from rollout.report import tables as report
from verify.intervals import intervals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rollout.report.metrics import Metrics
    from rollout.runs import Campaign, Run


def measure(campaign: Campaign, *, records: bool) -> dict[str, Any]:
    """{"policies": [...]}: each policy's metrics; with repeats also {"runs": [...]}, each run's."""
    turns = {each.id: len(each.turns) for each in campaign.trajectories}
    each_run: list[dict[str, Any]] = []
    policies: dict[str, list[Metrics]] = {}
    for run in campaign.runs:
        if not run.rows and not records:
            continue  # never reached
        if records:
            read_record(run)
        metrics = report_metrics.measure(run.rows, turns) | lanes.measure(run.intervals)
        policies.setdefault(run.policy, []).append(metrics)
        each_run.append({"policy": run.policy, "repeat": run.repeat, **metrics})
    measured: dict[str, Any] = {
        "policies": [{"policy": name, **report_metrics.combine(runs)} for name, runs in policies.items()]
    }
    if campaign.options.repeat > 1:
        measured["runs"] = each_run
    return measured


def read_record(run: Run) -> None:
    """Fill in a run's intervals; a line on stderr where its record has none, or not all."""
    try:
        recordings = read_run(run.folder)
    except UsageError:
        print(f"turnstile: {run.policy}: no waits are reported: no usable record in {run.folder}", file=sys.stderr)
        return
    run.intervals = [one for rank in recordings.values() for one in intervals(rank)]
    if dropped := max(rank.dropped for rank in recordings.values()):
        print(
            f"turnstile: {run.policy}: the record kept only its newest events ({dropped} older ones are gone), so the"
            " waits are those of the end of the run: replay less with --fraction or --turns",
            file=sys.stderr,
        )


def draw(runs: Sequence[Run], turns: Mapping[str, int], title: str, out: Path) -> list[str]:
    """Write completion.png and, for each policy with a record, lanes-<policy>.png of its first repeat; their names.

    turns: how many each trajectory has. Every figure is written whole or not at all.
    """
    written = []
    done: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        good = [row for row in run.rows if not row.failed]
        requests, trajectories = done.setdefault(run.policy, ([], []))
        requests += map(report_metrics.request_s, good)
        trajectories += report_metrics.completions(good, turns)
        if run.repeat == 0 and (picture := plots.lanes(run.intervals, run.policy, title)):
            name = run.folder.name if run.folder != out else report_files.slug(run.policy)
            written.append(f"lanes-{name.removesuffix('-0')}.png")
            report_files.write(out / written[-1], picture)
    report_files.write(out / "completion.png", plots.completion(done, title))
    return [*written, "completion.png"]


def show(campaign: Campaign, measured: dict[str, Any]) -> int:
    """Print the table or the JSON object; 1 when a turn ended early, which one line on stderr says, else 0."""
    options = campaign.options
    failed: dict[str, list[str]] = {}
    for run in campaign.runs:
        failed.setdefault(run.policy, []).extend(f"{r.trajectory} turn {r.turn}" for r in run.rows if r.failed)
    if options.json:
        print(json.dumps({"policies": measured["policies"]}))
    else:
        by_name = {each["policy"]: {k: v for k, v in each.items() if k != "policy"} for each in measured["policies"]}
        if options.command == COMPARE:
            caption = report.CAPTION if options.device.device == "cpu" else report.GPU_CAPTION
            print(report.comparison(by_name, campaign.title, caption))
        else:
            print("\n\n".join(report.table(name, metrics, campaign.title) for name, metrics in by_name.items()))
        print(f"\nEverything is in {campaign.out}")
    for policy, turns in failed.items():
        if turns:
            print("turnstile:", report.failures(policy, turns), file=sys.stderr)
    return int(any(failed.values()))
