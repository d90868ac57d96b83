"""The ladder of policies on the shipped trace as it grows, into bench/results/scale.json and scale.png.

    lengths         every policy at several length scales: makespan, P and D in flight together, what decode waits
    conversations   the makespan over the number of conversations

Whole runs of `turnstile compare` on real ranks that stay up, one after the other; its repeats go round the policies, so
that ratios to `normal` are taken between runs that follow each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measured
from rollout.args import COMPARED
from rollout.replay import Row, read_rows
from rollout.report.plots import COLOURS, STYLE
from rollout.trace import read as trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WORLD = ("--world", "4", "--adp", "2", "--ep", "4", "--prefill-tokens", "128", "--time-scale", "0.01")
FEWER = ("normal", "global_enqueue", "fine")
KEYS = (
    "makespan_s", "output_throughput", "pd_overlap_ratio", "mean_decode_wait_ms", "mean_permit_wait_ms",
    "mean_rendezvous_ms", "p99_ttft_ms", "mean_trajectory_completion_s", "total_input_tokens", "total_output_tokens",
)  # fmt: skip


def makespans(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Seconds of each policy, by repeat: from the first release to the last token."""
    ends: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows:
        ends[row.policy, row.repeat] += [row.released_ns, row.finished_ns]
    found: dict[str, list[float]] = defaultdict(list)
    for (policy, _), moments in sorted(ends.items()):
        found[policy].append((max(moments) - min(moments)) / 1e9)
    return dict(found)


def compare(policies: Sequence[str], conversations: int, scale: float, asked: Any) -> dict[str, Any]:
    """One `turnstile compare`; its metrics, and each policy's makespan over that of `normal`, repeat by repeat."""
    everything = len(trace.read(trace.PAPER_TRACE).trajectories)
    command = [sys.executable, "-m", "turnstile", "compare", *WORLD, "--json", "--repeat", str(asked.repeat)]
    command += ["--turns", str(asked.turns), "--length-scale", str(scale)]
    command += ["--fraction", str(conversations / everything)]
    for policy in policies:
        command += ["--policy", policy]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        ended = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{' '.join(command[3:])} failed: {ended.stderr.strip()[-500:]}")
        table = {row["policy"]: row for row in json.loads(ended.stdout)["policies"]}
        took = makespans(read_rows(out / "requests.jsonl"))
    cells = []
    for policy in policies:
        row = table[policy]
        cell: dict[str, Any] = {"policy": policy, "makespans_s": [round(each, 3) for each in took[policy]]}
        cell |= {key: row.get(key) for key in KEYS}
        cell |= {f"{key}_iqr": row[f"{key}_iqr"] for key in KEYS if f"{key}_iqr" in row}
        if "normal" in took and policy != "normal" and len(took[policy]) > 1:
            cell["over_normal"] = measured.paired(took[policy], took["normal"])
        cells.append(cell)
    line = ", ".join(f"{c['policy']} {c['makespan_s']:.2f} s ({c['pd_overlap_ratio']:.2f})" for c in cells)
    print(f"{conversations} conversations, lengths x {scale}: {line}", flush=True)
    return {"conversations": conversations, "length_scale": scale, "policies": cells}


def draw(report: dict[str, Any], path: Path) -> None:
    """Makespan over conversations, and makespan and overlap over lengths."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, cells, x, y in (
            (panels[0], report["conversations"], "conversations", "makespan_s"),
            (panels[1], report["lengths"], "length_scale", "makespan_s"),
            (panels[2], report["lengths"], "length_scale", "pd_overlap_ratio"),
        ):
            names = list(dict.fromkeys(row["policy"] for cell in cells for row in cell["policies"]))
            for name in names:
                points = [(cell[x], row[y]) for cell in cells for row in cell["policies"] if row["policy"] == name]
                colour = COLOURS[COMPARED.index(name) if name in COMPARED else len(COMPARED)]
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name)
            axes.set_xlabel({"conversations": "conversations", "length_scale": "length scale"}[x])
            axes.set_ylabel({"makespan_s": "makespan (s)", "pd_overlap_ratio": "time with P and D in flight"}[y])
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, color="#DDDDDD", linewidth=0.7)
        panels[1].legend(frameon=False, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, write and draw."""
    parser = measured.arguments(__doc__, "scale.json", 3, "repeats of each policy")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.025, 0.05, 0.1], help="length scales")
    parser.add_argument("--conversations", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--turns", type=int, default=3, help="of each conversation, at most (default: 3)")
    parser.add_argument("--policies", nargs="+", default=list(COMPARED), metavar="POLICY", help="of the length scales")
    parser.add_argument("--ladder", type=int, default=12, metavar="N", help="conversations there (default: 12)")
    parser.add_argument("--scale", type=float, default=0.025, help="length scale of the growth (default: 0.025)")
    asked = parser.parse_args()
    report: dict[str, Any] = {**measured.surroundings(), "world": " ".join(WORLD), "repeat": asked.repeat}
    report["turns"] = asked.turns
    report["lengths"] = [compare(asked.policies, asked.ladder, scale, asked) for scale in asked.scales]
    report["conversations"] = [compare(FEWER, count, asked.scale, asked) for count in asked.conversations]
    measured.write(asked.output, report)
    draw(report, asked.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
