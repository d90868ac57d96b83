"""The ordering ladder (paper section 7) on this machine's GPUs: policies, spans and waits on ranks that stay up.

    python -m bench.gpu.ladder --out DIR --minutes 9 --device cuda --world 2 --adp 2 ...

Run it again with the same settings, and the same DIR or `--earlier` ones, until it says that nothing is left: finished
cells are kept and skipped. Every invocation ends with the tables of all cells so far.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.gpu import ladder_report
from bench.gpu.cells import DECODE, Cell, Ladder, Work, best_span, next_cell
from bench.gpu.reading import Readers
from bench.gpu.store import Store
from kernel.errors import TurnstileError, UsageError
from kernel.exchange.choose import CHOICES
from kernel.sched import registry
from kernel.sched.policy import Limits
from kernel.topology import CUTS, GATHERS, World
from models.config import read_config
from rollout.device import ATTENTIONS, DEVICES, QUANTIZATIONS, WEIGHTS, DeviceOptions
from rollout.ranks import gpus
from rollout.replay import replay
from rollout.report import files as report_files
from rollout.report import metrics as report_metrics
from rollout.trace import read as trace
from rollout.trace.shape import Shape
from rollout.trace.trajectory import Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine import Engine
    from rollout.replay import Row

RECORD_EVENTS = 1 << 21
"""144 MiB a rank; a record that wraps would leave the early waits out."""
C = TypeVar("C", bound=Work)
CLOSING_S = 20.0
"""Kept of an invocation's time for ending ranks and writing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an invocation was asked to do. Two invocations whose `fixed` part is equal measure the same campaign."""

    world: World
    device: DeviceOptions
    model: str
    trace: str
    shape: Shape
    kv_tokens: int | None
    prefill_tokens: int
    rows: int
    decode_tokens: int
    ladder: Ladder

    @property
    def fixed(self) -> dict[str, Any]:
        """What makes cells comparable."""
        found = asdict(self)
        del found["ladder"]
        return found

    def trajectories(self, cell: Work) -> tuple[Trajectory, ...]:
        """The workload of a cell."""
        if cell.workload == DECODE:
            count = self.rows * self.world.adp
            return tuple(Trajectory(f"d{at:04d}", (Turn(16, self.decode_tokens),)) for at in range(count))
        return replace(self.shape, time_scale=cell.wait).apply(trace.read(self.trace).trajectories)

    def floor_s(self, cell: Work) -> float:
        """Seconds that the longest trajectory waits between its turns."""
        return max(sum(turn.wait_ms for turn in each.turns) for each in self.trajectories(cell)) / 1e3


def arguments(prog: str, doc: str) -> argparse.ArgumentParser:
    """A parser of what every campaign takes."""
    made = argparse.ArgumentParser(prog=prog, description=doc.partition("\n")[0])
    made.add_argument("--out", type=Path, required=True, help="folder of the campaign")
    made.add_argument("--earlier", type=Path, action="append", default=[], help="folders of earlier invocations")
    made.add_argument("--minutes", type=float, default=9.0, help="of this invocation, start of the ranks included")
    made.add_argument("--report", action="store_true", help="measure nothing: print the tables of what is there")
    made.add_argument("--records", type=Path, help="folder for the runs' records (default: DIR/records)")
    made.add_argument("--keep-records", action="store_true", help="leave each run's record in the folder")
    made.add_argument("--device", choices=DEVICES, default="cuda")
    made.add_argument("--model", required=True, help="checkpoint directory, or a config.json with --load-format dummy")
    made.add_argument("--load-format", choices=WEIGHTS, default="checkpoint")
    made.add_argument("--dtype")
    made.add_argument("--attention", choices=ATTENTIONS)
    made.add_argument("--graphs", choices=("on", "off"), default="on")
    made.add_argument("--launch-order", default="stream")
    made.add_argument("--modules", default="lazy")
    made.add_argument("--connections", type=int)
    made.add_argument("--max-ctas", type=int)
    made.add_argument("--prefill-sms", type=int)
    made.add_argument("--exchange-sms", type=int)
    made.add_argument("--world", type=int, default=1)
    made.add_argument("--adp", type=int, default=1)
    made.add_argument("--ep", type=int, default=1)
    made.add_argument("--gather", choices=GATHERS, default="cross")
    made.add_argument("--cut", choices=CUTS, default="layer")
    made.add_argument("--trace", default="paper")
    made.add_argument("--fraction", type=float, default=1.0)
    made.add_argument("--turns", type=int)
    made.add_argument("--length-scale", type=float, default=1.0)
    made.add_argument("--context-scale", type=float, default=1.0, help="another factor, on new tokens alone")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--kv-tokens", type=int)
    made.add_argument("--prefill-tokens", type=int, default=2048)
    made.add_argument("--rows", type=int, default=64)
    return made


def settings_of(given: argparse.Namespace, ladder: Ladder, **device: Any) -> Settings:
    """What was asked for. device: further fields of `DeviceOptions`. Raises UsageError where values do not fit."""
    return Settings(
        world=World(given.world, given.adp, given.ep, given.gather, cut=given.cut),
        device=DeviceOptions(
            given.device,
            dtype=given.dtype,
            attention=given.attention,
            graphs=given.graphs == "on",
            weights=given.load_format,
            prefill_sms=given.prefill_sms,
            exchange_sms=given.exchange_sms,
            max_ctas=given.max_ctas,
            launch_order=given.launch_order,
            connections=given.connections,
            modules=given.modules,
            **device,
        ),
        model=given.model,
        trace=given.trace,
        shape=Shape(given.fraction, given.turns, given.length_scale, 0.0, given.seed, given.context_scale),
        kv_tokens=given.kv_tokens,
        prefill_tokens=given.prefill_tokens,
        rows=given.rows,
        decode_tokens=getattr(given, "decode_tokens", 1),
        ladder=ladder,
    )


def parse(argv: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    """The command line. Raises UsageError for values that do not fit together."""
    made = arguments("python -m bench.gpu.ladder", __doc__)
    made.add_argument("--quantization", choices=QUANTIZATIONS)
    made.add_argument("--exchange", choices=CHOICES, default="auto")
    made.add_argument("--decode-tokens", type=int, default=256, help="output of each row of the decode-only workload")
    ladder = Ladder()
    made.add_argument("--headline", nargs="*", default=ladder.headline, help="repeated policies; `best`: a span")
    made.add_argument("--others", nargs="*", default=ladder.others, help="policies that run once at no wait")
    made.add_argument("--waits", nargs="*", type=float, default=ladder.waits, help="factors on the recorded waits")
    made.add_argument("--repetitions", type=int, default=ladder.repetitions)
    made.add_argument("--recorded", type=int, default=ladder.recorded, help="runs at the recorded waits (0: none)")
    made.add_argument("--decode-only", type=int, default=ladder.decode_only, help="runs without prefill (0: none)")
    given = made.parse_args(argv)
    ladder = Ladder(
        tuple(given.headline), tuple(given.others), given.repetitions, tuple(given.waits), given.recorded,
        given.decode_only,
    )  # fmt: skip
    return settings_of(given, ladder, quantization=given.quantization, exchange=given.exchange), given


def model_directory(model: str, out: Path) -> Path:
    """`model`, or a directory made in `out` around it when it is a config.json of its own."""
    path = Path(model)
    if path.suffix != ".json":
        return path
    folder = out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(path, folder / "config.json")
    except OSError as error:
        raise UsageError(f"--model {model}: {error.strerror}: give a checkpoint directory or a config.json") from None
    return folder


def engine_of(settings: Settings, device: DeviceOptions, out: Path) -> Engine:
    """The engine for `settings` with these options. Raises UsageError where it cannot be had."""
    from rollout.engine import Engine

    return Engine(
        model_directory(settings.model, out),
        settings.world,
        policy="normal",
        device=device,
        kv_tokens=settings.kv_tokens,
        prefill_tokens=settings.prefill_tokens,
        rows=settings.rows,
        record_events=RECORD_EVENTS,
    )


def about_of(engine: Engine) -> dict[str, Any]:
    """What a result says of where it was measured."""
    about = {**report_files.surroundings(), "kv_tokens": engine.kv_tokens, "options": asdict(engine.options)}
    del about["command"]  # the settings say it all, and folders are nobody's business
    about["exchange"] = asdict(engine.exchange)
    about["gpus"] = list(gpus.names()) if engine.options.device == "cuda" else []
    return about


async def measured(
    engine: Engine,
    settings: Settings,
    cell: C,
    store: Store[C],
    readers: Readers[C],
    records: Path,
    about: dict[str, Any],
) -> None:
    """Run one cell and hand it on. Raises what the run raises, once that is noted."""
    start, folder = time.monotonic(), records / cell.key
    try:
        metrics = await run(engine, settings, cell, folder)
    except (TurnstileError, BaseExceptionGroup) as error:
        store.failed(cell, said(error))
        raise
    print(f"{cell.key}: makespan {metrics['makespan_s']:.2f} s", flush=True)
    readers.add(cell, time.monotonic() - start, metrics, folder, about)


async def run(engine: Engine, settings: Settings, cell: Work, folder: Path) -> dict[str, Any]:
    """Run one cell on an engine that is up, its record in `folder`; the metrics of its requests."""
    trajectories = settings.trajectories(cell)
    rows: list[Row] = []
    await engine.flush()
    await engine.use_policy(cell.policy, record=folder)
    await replay(
        engine,
        trajectories,
        policy=cell.policy,
        vocabulary=engine.config.vocab_size,
        seed=settings.shape.seed,
        repeat=cell.repetition,
        done=rows.append,
    )
    metrics: dict[str, Any] = report_metrics.measure(rows, {each.id: len(each.turns) for each in trajectories})
    if metrics["failed"]:
        raise TurnstileError(f"{metrics['failed']} turns ended before their recorded length")
    return metrics


async def warm_up(engine: Engine, settings: Settings) -> None:
    """A few short turns under the first policy, unrecorded: what the ranks' own warm-up does not reach."""
    first = Cell(DECODE, 0.0, "", 0)
    some = [Trajectory(each.id, (Turn(16, 16), Turn(16, 16))) for each in settings.trajectories(first)]
    await replay(engine, some, policy="warm-up", vocabulary=engine.config.vocab_size, done=lambda _: None)


async def campaign(
    settings: Settings,
    store: Store[Cell],
    out: Path,
    deadline: float,
    *,
    records: Path | None = None,
    keep: bool = False,
) -> bool:
    """Measure until nothing is left or fits; whether everything is done. deadline: of `time.monotonic`."""
    floors: dict[float, float] = {}

    def following(readers: Readers[Cell]) -> Cell | None:
        cells = settings.ladder.cells(best_span(settings.ladder, readers.makespans))
        for cell in cells:
            floors.setdefault(cell.wait, settings.floor_s(cell))
        return next_cell(cells, readers.seconds, store.failures, deadline - time.monotonic(), floor_s=floors)

    with Readers(store, keep) as readers:
        if following(readers) is not None:
            engine = engine_of(settings, settings.device, out)
            about = about_of(engine)
            start = time.monotonic()
            async with engine:
                await warm_up(engine, settings)
                print(f"ranks are up and warm after {time.monotonic() - start:.1f} s", flush=True)
                while (cell := following(readers)) is not None:
                    await measured(engine, settings, cell, store, readers, records or out / "records", about)
    cells = settings.ladder.cells(best_span(settings.ladder, store.makespans))
    return all(cell in store.results for cell in cells)


def said(error: BaseException) -> str:
    """The words of an error, the first one of several."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print the tables; 0 when everything is done or the time is up, 1 when a run failed, 2 unusable."""
    start = time.monotonic()
    try:
        settings, given = parse(argv)
        config = None if given.model.endswith(".json") else read_config(given.model)
        limits = Limits(settings.world.size, settings.world.adp, config.layers if config else 4)
        for policy in {*settings.ladder.headline, *settings.ladder.others} - {"best"}:
            registry.create(policy, limits)
        store = Store(given.out, settings.fixed, Cell, given.earlier)
        code, done = 0, False
        if not given.report:
            deadline = start + 60 * given.minutes - CLOSING_S
            try:
                work = campaign(
                    settings, store, given.out, deadline, records=given.records, keep=given.keep_records
                )
                done = asyncio.run(work)
            except TurnstileError as error:
                print("ladder:", error, file=sys.stderr)
                code = 2 if isinstance(error, UsageError) else 1
            except BaseExceptionGroup as group:
                print("ladder:", said(group), file=sys.stderr)
                code = 1
    except UsageError as error:
        print("ladder:", error, file=sys.stderr)
        return 2
    summary = ladder_report.summary(store.results, settings.ladder)
    report_files.write_json(given.out / "ladder.json", {"settings": settings.fixed, **summary})
    print(ladder_report.text(summary))
    if not given.report:
        cells = settings.ladder.cells(best_span(settings.ladder, store.makespans))
        left = sum(cell not in store.results for cell in cells)
        print("Nothing is left." if done else f"{left} cells of those known are left: run the same command again.")
    return code


def load(path: Path) -> dict[str, Any]:
    """A campaign's ladder.json."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
