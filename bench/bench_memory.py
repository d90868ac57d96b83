"""Peak anonymous memory of each rank beside the bytes of its shards, into bench/results/memory.json.

A random checkpoint of some hundred megabytes is written to a temporary folder and served by 1, 2 and 4 ranks: loaded,
then asked for prompts and answers of some length. RssAnon of each rank is read from /proc every few milliseconds
meanwhile: no mapped file, no shared memory, but everything that a rank keeps for itself, the KV pool too. The aim: at
most 1.2 times its shards and 600 MB.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measured
from bench.batches import batch
from kernel.topology import World
from models import kv_bytes_per_token, read_config
from models.tiny import write_checkpoint
from rollout.device import DeviceOptions
from rollout.engine import Engine
from rollout.ranks.memory import weight_bytes
from rollout.ranks.nursery import Nursery

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rollout.ranks.nursery import Child

SHAPE: dict[str, int] = {
    "vocab": 8192, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "experts": 16, "top_k": 2,
    "expert_width": 512, "max_positions": 2048,
}  # fmt: skip
TIMES, PLUS = 1.2, 600_000_000
EVERY_S = 0.004
KV_TOKENS, REQUESTS, PROMPT, OUTPUT = 8192, 8, 400, 24


class Watched(Nursery):
    """A nursery that looks at RssAnon of the ranks it forks, from a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[int, int] = {}
        self.samples = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    async def spawn(self, fds: Sequence[int]) -> Child:
        """Fork a rank and begin to look at it. Ranks come in order."""
        child = await super().spawn(fds)
        self.peaks[child.pid] = 0
        return child

    def close(self) -> None:
        """Stop looking; the processes end as ever."""
        self._end.set()
        self._thread.join()
        super().close()

    def _look(self) -> None:
        while not self._end.wait(EVERY_S):
            for pid in list(self.peaks):
                with suppress(OSError, StopIteration):
                    self.peaks[pid] = max(self.peaks[pid], anonymous(Path(f"/proc/{pid}/status").read_text()))
                    self.samples += 1


def anonymous(status: str) -> int:
    """Bytes of RssAnon. Raises StopIteration for a process that has ended."""
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def verdict(peak: int, shards: int) -> dict[str, Any]:
    """A rank's peak beside its aim, in MB (10**6 bytes)."""
    allowed = TIMES * shards + PLUS
    return {
        "peak_mb": round(peak / 1e6, 1), "allowed_mb": round(allowed / 1e6, 1), "times_shards": round(peak / shards, 3),
        "beyond_shards_mb": round((peak - shards) / 1e6, 1), "met": peak <= allowed,
    }  # fmt: skip


async def measure(model: Path, size: int, adp: int, compiled: bool) -> dict[str, Any]:
    """One world."""
    world, config = World(size, adp, size), read_config(model)
    shards = weight_bytes(config, world, DeviceOptions("cpu").resolved(config))
    nursery = Watched()
    try:
        async with Engine(
            model, world, kv_tokens=KV_TOKENS, prefill_tokens=512, nursery=nursery, compiled=compiled
        ) as engine:
            loaded = dict(nursery.peaks)
            await batch(engine, REQUESTS, PROMPT, OUTPUT)
    finally:
        nursery.close()
    pool = engine.kv_tokens * kv_bytes_per_token(config, world)
    row: dict[str, Any] = {
        "ranks": size, "adp": adp, "compiled": compiled, "shards_mb": round(shards / 1e6, 1),
        "kv_pool_mb": round(pool / 1e6, 1),
        "samples": nursery.samples, "loaded_mb": [round(each / 1e6, 1) for each in loaded.values()],
        "each": [verdict(peak, shards) for peak in nursery.peaks.values()],
    }  # fmt: skip
    worst = max(row["each"], key=lambda one: float(one["peak_mb"]))
    print(
        f"{size} ranks, {adp} replicas{', compiled' if compiled else ''}: shards {row['shards_mb']} MB, KV pool"
        f" {row['kv_pool_mb']} MB, peak at loading {max(row['loaded_mb'])} MB, peak {worst['peak_mb']} MB of"
        f" {worst['allowed_mb']} allowed",
        flush=True,
    )
    return row


async def measured_worlds(asked: argparse.Namespace) -> dict[str, Any]:
    """All worlds, on one checkpoint."""
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        model = write_checkpoint(Path(folder) / "model", **{**SHAPE, "layers": asked.layers})
        checkpoint = sum(file.stat().st_size for file in model.iterdir())
        print(f"a checkpoint of {checkpoint / 1e6:,.0f} MB", flush=True)
        rows = []
        for size in asked.ranks:
            for adp in dict.fromkeys((1, size // 2 or 1)):
                for compiled in (False, True):
                    rows += [await measure(model, size, adp, compiled) for _ in range(asked.repeat)]
    return {"checkpoint_mb": round(checkpoint / 1e6, 1), "model": {**SHAPE, "layers": asked.layers}, "worlds": rows}


def main() -> None:
    """Measure, print and write."""
    parser = measured.arguments(__doc__, "memory.json", 1, "engines of each world")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=SHAPE["layers"], help="about 55 MB each (default: 8)")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written (default: the temporary folder)")
    asked = parser.parse_args()
    report = {**measured.surroundings(), "aim": {"times_shards": TIMES, "plus_mb": PLUS / 1e6}}
    report |= asyncio.run(measured_worlds(asked))
    report["met"] = all(each["met"] for row in report["worlds"] for each in row["each"])
    measured.write(asked.output, report)


if __name__ == "__main__":
    main()
