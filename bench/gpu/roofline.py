"""How close decode and prefill come to what this GPU was just measured to do. One GPU, one JSON, one table.

    python -m bench.gpu.roofline --out DIR --model bench/gpu/models/paper --load-format dummy

The peaks are measured first, in a process of their own, so that nothing of it is left on the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.ladder_report import table
from bench.gpu.limits import decode_bytes, prefill_flops
from kernel.errors import TurnstileError
from kernel.record import Kind, read, ring_path
from kernel.request import Phase, SamplingParams
from kernel.topology import World
from rollout.device import QUANTIZATIONS, WEIGHTS, DeviceOptions
from rollout.ranks import gpus
from rollout.report import files as report_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.record import Event
    from rollout.engine import Engine


def peaks() -> dict[str, float]:
    """Bytes a second of a large copy (read and written), and bfloat16 operations a second of a large product."""
    import torch

    def best(work: Any, times: int = 12) -> float:
        found = []
        for _ in range(times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()  # type: ignore[no-untyped-call]
            work()
            end.record()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return min(found)

    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / best(lambda: target.copy_(source))
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
    return {"bytes_s": copied, "flops_s": 2.0 * size**3 / best(lambda: torch.mm(a, b, out=out))}


def durations(events: Iterable[Event], phase: Phase) -> list[tuple[Event, float]]:
    """Each submission's start event and its seconds on the device."""
    running: dict[str, Event] = {}
    found = []
    for event in events:
        if event.phase is phase and event.kind is Kind.WORK_START:
            running[event.site] = event
        elif event.phase is phase and event.kind is Kind.WORK_FINISH and (start := running.pop(event.site, None)):
            found.append((start, (event.time_ns - start.time_ns) / 1e9))
    return found


def decode_seconds(events: Sequence[Event], rows: int) -> dict[str, float]:
    """Median seconds of full decode iterations: on the device, and from one start to the next."""
    full = [(start, seconds) for start, seconds in durations(events, Phase.D) if start.b == rows]
    if len(full) < 3:
        raise TurnstileError(f"{len(full)} decode iterations had all {rows} rows: generate more tokens")
    steps = [(b.time_ns - a.time_ns) / 1e9 for (a, _), (b, _) in pairwise(full)]
    return {"device_s": statistics.median(s for _, s in full), "step_s": statistics.median(steps), "count": len(full)}


def prefill_seconds(events: Sequence[Event]) -> list[float]:
    """Seconds of each epoch on the device: its segments added up."""
    epochs: dict[int, float] = {}
    for start, seconds in durations(events, Phase.P):
        epochs[start.epoch] = epochs.get(start.epoch, 0.0) + seconds
    return list(epochs.values())


async def measure(given: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Both phases on an engine of one rank."""
    from rollout.engine import Engine

    options = DeviceOptions(
        given.device, dtype=given.dtype, weights=given.load_format, quantization=given.quantization
    )
    engine = Engine(
        given.model,
        World(),
        policy="normal",
        device=options,
        prefill_tokens=given.prefill_tokens,
        rows=given.rows,
        record_events=1 << 18,
    )
    config: Any = engine.config
    async with engine:
        await _together(engine, given.rows, 8, 8)
        await engine.use_policy("normal", record=out / "decode")
        began = time.monotonic()
        done = await _together(engine, given.rows, given.context, given.tokens)
        wall = time.monotonic() - began
        await engine.flush()
        await engine.use_policy("normal", record=out / "prefill")
        for at in range(given.repetitions):
            await engine.generate(_prompt(at, given.prefill_tokens, config.vocab_size), SamplingParams(max_tokens=1))
    decode = decode_seconds(read(ring_path(out / "decode", 0)).events, given.rows)
    prefill = statistics.median(prefill_seconds(read(ring_path(out / "prefill", 0)).events))
    context = given.context + given.tokens / 2
    return {
        "decode": decode | {"rows": given.rows, "bytes": decode_bytes(config, engine.options, given.rows, context)},
        "prefill": {
            "device_s": prefill,
            "tokens": given.prefill_tokens,
            "flops": prefill_flops(config, given.prefill_tokens),
        },
        "output_tokens_s": sum(len(each.tokens) for each in done) / wall,
        "options": asdict(engine.options),
    }


async def _together(engine: Engine, rows: int, context: int, tokens: int) -> list[Any]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = (_prompt(1000 + at, context, engine.config.vocab_size) for at in range(rows))
    return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts)))


def _prompt(number: int, count: int, vocabulary: int) -> list[int]:
    return [(number * 7919 + at * 104729) % (vocabulary - 3) + 3 for at in range(count)]


def ratios(found: dict[str, Any], peak: dict[str, float]) -> dict[str, float]:
    """Shares of the measured peaks, the aims beside them in `main`'s table."""
    decode, prefill = found["decode"], found["prefill"]
    return {
        "decode_of_bandwidth": decode["bytes"] / decode["device_s"] / peak["bytes_s"],
        "decode_step_of_bandwidth": decode["bytes"] / decode["step_s"] / peak["bytes_s"],
        "prefill_of_matmul": prefill["flops"] / prefill["device_s"] / peak["flops_s"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write DIR/roofline.json; 1 when the engine fails."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu.roofline", description=__doc__.partition("\n")[0])
    made.add_argument("--out", type=Path)
    made.add_argument("--peaks", action="store_true", help="print the GPU's peaks as JSON and nothing else")
    made.add_argument("--assume-peaks", type=json.loads, help='instead of measuring: {"bytes_s": ..., "flops_s": ...}')
    made.add_argument("--device", default="cuda")
    made.add_argument("--model")
    made.add_argument("--load-format", choices=WEIGHTS, default="checkpoint")
    made.add_argument("--dtype")
    made.add_argument("--quantization", choices=QUANTIZATIONS)
    made.add_argument("--rows", type=int, default=32)
    made.add_argument("--context", type=int, default=1024, help="prompt of each decoding row, in tokens")
    made.add_argument("--tokens", type=int, default=96, help="output of each decoding row")
    made.add_argument("--prefill-tokens", type=int, default=4096)
    made.add_argument("--repetitions", type=int, default=5, help="prefills; the median counts")
    given = made.parse_args(argv)
    if given.peaks:
        print(json.dumps(peaks()))
        return 0
    if given.out is None or given.model is None:
        made.error("--out and --model are needed")
    command = [sys.executable, "-m", "bench.gpu.roofline", "--peaks"]
    try:
        peak = given.assume_peaks
        if peak is None:
            peak = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
        given.out.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(measure(given, given.out))
    except (TurnstileError, subprocess.SubprocessError) as error:
        print("roofline:", getattr(error, "stderr", None) or error, file=sys.stderr)
        return 1
    shares = ratios(found, peak)
    about = report_files.surroundings() | {"gpus": list(gpus.names()) if given.device == "cuda" else []}
    del about["command"]
    report_files.write_json(
        given.out / "roofline.json", {"peaks": peak, "ratios": shares, **found, "about": about}
    )
    aims = {"decode_of_bandwidth": "0.6 at 32 rows", "prefill_of_matmul": "0.5"}
    lines = [[name, aims.get(name, "-"), f"{value:.3f}"] for name, value in shares.items()]
    print(*table([["share of", "aim", "found"], *lines]), sep="\n")
    print(f"decode {found['decode']['device_s'] * 1e3:.2f} ms, prefill {found['prefill']['device_s'] * 1e3:.1f} ms,"
          f" {found['output_tokens_s']:,.0f} output tokens/s with their prefills")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
