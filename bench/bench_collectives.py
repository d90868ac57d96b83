"""Our shared-memory collectives beside gloo's, by size, into bench/results/collectives.json and collectives.png.

Real processes of one host, one torch thread each, float32. Blocks of ours and of torch.distributed's take turns; what
counts is the time that a rank spends in a call, over all ranks. gloo is called at its best: in place, into tensors that
are there; ours makes its result. A size is that of the whole tensor: what an all-reduce sums, an all-gather makes and a
reduce-scatter is given on each rank. Results are compared before anything is measured.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measured, rank_jobs
from kernel.topology import World
from rollout.report.plots import COLOURS, STYLE
from tests.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = tuple(1024 * 4**n for n in range(8))
WAYS = ("shared", "gloo")
DIFFERENCE = 1e-4
"""Between sums of a few normal numbers in another order."""


def calls(size: int, budget: int) -> int:
    """How many calls of a block: fewer of large ones, 3 at the least."""
    return max(3, min(budget, budget * (1 << 18) // size))


def measure(members: int, sizes: Sequence[int], repeat: int, budget: int) -> list[dict[str, Any]]:
    """All cells of one world."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, Ranks(World(members), timeout_s=300) as ranks:
        ranks.run(rank_jobs.begin, str(Path(folder) / "store"))
        for operation in rank_jobs.OPERATIONS:
            for size in sizes:
                worst = max(ranks.run(rank_jobs.agree, operation, size))
                if worst > DIFFERENCE:
                    raise SystemExit(f"{operation} of {size} bytes on {members} ranks differs from gloo's by {worst}")
                blocks: dict[str, list[list[float]]] = {way: [] for way in WAYS}
                for _, way in measured.turns(WAYS, repeat):
                    took = ranks.run(rank_jobs.collective, way, operation, size, calls(size, budget))
                    blocks[way].append([ns / 1e3 for one in took for ns in one])
                medians = {way: [statistics.median(block) for block in blocks[way]] for way in WAYS}
                row: dict[str, Any] = {
                    "ranks": members, "operation": operation, "bytes": size,
                    **{f"{way}_us": measured.spread([us for block in blocks[way] for us in block], 1) for way in WAYS},
                    "shared_over_gloo": measured.paired(medians["shared"], medians["gloo"]),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{members} ranks, {operation:14} {size >> 10:6} KiB: ours {row['shared_us']['median']:>9,.0f} us,"
                    f" gloo {row['gloo_us']['median']:>9,.0f} us, ratio {row['shared_over_gloo']['median']:.3f}",
                    flush=True,
                )
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Medians over the size, a panel an operation."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.2), layout="constrained")
        panels = figure.subplots(1, len(rank_jobs.OPERATIONS), sharey=True)
        for axes, operation in zip(panels, rank_jobs.OPERATIONS, strict=True):
            for at, members in enumerate(sorted({row["ranks"] for row in rows})):
                for way, dash, name in (("shared", "-", "ours"), ("gloo", "--", "gloo")):
                    mine = [row for row in rows if row["operation"] == operation and row["ranks"] == members]
                    axes.plot(
                        [row["bytes"] for row in mine], [row[f"{way}_us"]["median"] for row in mine], dash,
                        marker="o", markersize=3.5, color=COLOURS[at], label=f"{name}, {members} ranks",
                    )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(operation.replace("_", "-"), fontsize=11)
            ticks = sorted({row["bytes"] for row in rows})[::2]
            axes.set_xticks(ticks, [f"{each >> 10} KiB" if each < 1 << 20 else f"{each >> 20} MiB" for each in ticks])
            axes.set_xlabel("whole tensor, float32")
            axes.grid(visible=True, which="major", color="#DDDDDD", linewidth=0.7)
        panels[0].set_ylabel("median of a call, microseconds")
        panels[0].legend(frameon=False, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, write and draw."""
    parser = measured.arguments(__doc__, "collectives.json", 6, "blocks of each side")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--calls", type=int, default=40, help="of a block of small ones (default: 40)")
    asked = parser.parse_args()
    for size in asked.sizes:
        if size < 4 * max(asked.ranks) or size % (4 * max(asked.ranks)):
            parser.error(f"--sizes {size}: must be a multiple of {4 * max(asked.ranks)} bytes, a float32 for each rank")
    report = {**measured.surroundings(), "repeat": asked.repeat, "calls": asked.calls}
    cells = [row for members in asked.ranks for row in measure(members, asked.sizes, asked.repeat, asked.calls)]
    measured.write(asked.output, {**report, "cells": cells})
    draw(cells, asked.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
