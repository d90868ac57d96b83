"""Benches that look into real ranks, as short as can be: what they stand on is still there, and what they say is whole.

No figure is judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import bench_decode, bench_host, page

BENCH = Path(bench_decode.__file__).parent

pytestmark = pytest.mark.slow


async def test_decode_without_prefill_is_the_same_under_both_policies() -> None:
    asked = argparse.Namespace(repeat=2, ranks=2, rows=2, prompt=8, tokens=60, pairs=3, stretch=12, changes=3)
    found = await bench_decode.measure(asked)
    pair = found["policies"]
    assert pair["same_tokens"] is True
    assert pair["same_calls_bytes_and_exchanges"] is True
    assert pair["calls_a_round"] == {"fine": 8, "normal": 8}  # a gather and a scatter in each of four layers
    assert pair["bytes_a_round"]["fine"] == pair["bytes_a_round"]["normal"] == 8 * 4 * 256 * 4
    assert pair["exchanges_a_round"] == {"fine": {"end": 1}, "normal": {"end": 1}}
    assert found["exchange"]["with_over_without"]["pairs"] == found["stretches"]["pairs"] == 3


async def test_the_probe_finds_every_part_of_a_rank() -> None:
    asked = argparse.Namespace(repeat=1, rows=[2], rounds=30)
    (cell,) = await bench_host.measure(1, asked)
    assert cell["missing"] == [], "PARTS of bench/host_probe.py names what is not there any more"
    calls = {(row["thread"], row["part"]): row["calls"] for row in cell["parts"]}
    assert calls["loop", "plan"] == calls["loop", "launch"] == calls["loop", "rendezvous"] == 1
    assert calls["stream", "record"] == pytest.approx(2, abs=0.2)  # start and finish, but for the first and the last
    both = cell["loop_us"]["median"] + cell["stream_us"]["median"]
    assert cell["outside_us"]["median"] == pytest.approx(both, abs=0.2)
    assert cell["forward_cpu_us"]["median"] > 0


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("rendezvous", ["--repeat", "2", "--count", "5", "--ranks", "2"]),
        ("collectives", ["--repeat", "2", "--calls", "3", "--ranks", "2", "--sizes", "1024", "4194304"]),
        ("memory", ["--ranks", "2", "--layers", "1"]),
        ("record", ["--repeat", "2", "--requests", "2", "--prompt", "8", "--tokens", "8", "--pairs", "3"]),
        ("scale", ["--repeat", "2", "--scales", "0.02", "--ladder", "2", "--conversations", "2", "4", "--turns", "1"]),
    ],
)
def test_scripts_write_what_the_page_reads(script: str, given: list[str], tmp_path: Path) -> None:
    out = tmp_path / f"{script}.json"
    command = [sys.executable, str(BENCH / f"bench_{script}.py"), *given, "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=BENCH.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert {"command", "versions", "processor", "cores", "load_before", "load_after"} <= found.keys()
    blocks = [name for name, (file, _) in page.TABLES.items() if file == script]
    text = page.filled("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in blocks), {script: found})
    assert blocks
    assert "Not measured" not in text
    assert out.with_suffix(".png").exists() == (script in ("collectives", "scale"))
