"""Request rates of policies over expert exchanges (paper section 7, RQ4): the grid that shows what DeepEP is worth.

    python -m bench.gpu.rate --out DIR --minutes 9 --world 2 --adp 2 --ep 2 --model bench/gpu/models/paper \\
        --load-format dummy --fraction 0.5 --turns 3 --length-scale 0.25 --context-scale 10 --rows 32 \\
        --prefill-tokens 16384

Run it again with the same settings, and the same DIR or `--earlier` ones, until it says that nothing is left: finished
runs are kept and skipped. Every invocation ends with the tables of all runs so far.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.gpu import ladder, rate_report
from bench.gpu.cells import Ladder
from bench.gpu.grid import PLAIN, START_S, Grid, Ranks, RateCell, next_cell
from bench.gpu.reading import Readers
from bench.gpu.store import Store
from kernel.errors import TurnstileError, UsageError
from kernel.exchange.choose import CHOICES
from kernel.sched import registry
from kernel.sched.policy import Limits
from models.config import read_config
from rollout.device import QUANTIZATIONS
from rollout.report import files as report_files

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rollout.device import DeviceOptions


def parse(argv: Sequence[str] | None = None) -> tuple[ladder.Settings, Grid, argparse.Namespace]:
    """The command line. Raises UsageError for values that do not fit together."""
    made, usual = ladder.arguments("python -m bench.gpu.rate", __doc__), Grid()
    made.add_argument("--policies", nargs="+", default=usual.policies, help="`normal`, and what is compared with it")
    made.add_argument("--exchanges", nargs="+", default=usual.exchanges, choices=[*CHOICES[1:]])
    made.add_argument("--weights", nargs="+", default=usual.weights, choices=(PLAIN, *QUANTIZATIONS))
    made.add_argument("--repetitions", type=int, default=usual.repetitions)
    given = made.parse_args(argv)
    grid = Grid(tuple(given.policies), tuple(given.exchanges), tuple(given.weights), given.repetitions)
    settings = ladder.settings_of(given, Ladder())
    for kind in {cell.ranks for cell in grid.cells()}:
        options(settings, kind)
    return settings, grid, given


def options(settings: ladder.Settings, ranks: Ranks) -> DeviceOptions:
    """Those of some ranks. Raises UsageError for what the device cannot have."""
    quantization = None if ranks.weights == PLAIN else ranks.weights
    return replace(settings.device, quantization=quantization, exchange=ranks.exchange)


async def campaign(
    settings: ladder.Settings, grid: Grid, store: Store[RateCell], deadline: float, given: argparse.Namespace
) -> list[str]:
    """Measure until nothing is left or fits; what went wrong, a line each. deadline: of `time.monotonic`."""
    cells, broken, wrong = tuple(grid.cells()), set[Ranks](), list[str]()
    starts = [result["about"]["start_s"] for result in store.results.values()]
    with Readers(store, given.keep_records) as readers:

        def following(up: Ranks | None) -> RateCell | None:
            left, start_s = deadline - time.monotonic(), max(starts, default=START_S)
            return next_cell(cells, readers.seconds, store.failures, left, up=up, start_s=start_s, broken=broken)

        while (cell := following(None)) is not None:
            up = cell.ranks
            try:
                begun = time.monotonic()
                engine = ladder.engine_of(settings, options(settings, up), given.out)
                async with engine:
                    await ladder.warm_up(engine, settings)
                    starts.append(time.monotonic() - begun)
                    about = {**ladder.about_of(engine), "start_s": starts[-1]}
                    print(f"{up}: ranks are up and warm after {starts[-1]:.1f} s", flush=True)
                    while (now := following(up)) is not None and now.ranks == up:
                        records = given.records or given.out / "records"
                        await ladder.measured(engine, settings, now, store, readers, records, about)
            except (TurnstileError, ExceptionGroup) as error:
                # The others may do well; and whoever gives the command again tries these again.
                broken.add(up)
                wrong.append(f"{up}: {ladder.said(error)}")
                print(f"rate: {wrong[-1]}", file=sys.stderr, flush=True)
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print the tables; 0 when everything is done or the time is up, 1 when a run failed, 2 unusable."""
    start = time.monotonic()
    try:
        settings, grid, given = parse(argv)
        for policy in grid.policies:
            registry.create(policy, Limits(settings.world.size, settings.world.adp, 4))
        if not given.model.endswith(".json"):
            read_config(given.model)
        store = Store(given.out, settings.fixed, RateCell, given.earlier)
        wrong: list[str] = []
        if not given.report:
            deadline = start + 60 * given.minutes - ladder.CLOSING_S
            wrong = asyncio.run(campaign(settings, grid, store, deadline, given))
    except UsageError as error:
        print("rate:", error, file=sys.stderr)
        return 2
    summary = rate_report.summary(store.results)
    report_files.write_json(given.out / "rate.json", {"settings": settings.fixed, **summary})
    print(rate_report.text(summary))
    if not given.report:
        left = sum(cell not in store.results for cell in grid.cells())
        print(f"{left} runs are left: give the same command again." if left else "Nothing is left.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
