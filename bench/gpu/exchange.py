"""Two expert exchanges at once on two GPUs: values under many interleavings, speed together and alone, and controls.

    python -m bench.gpu.exchange --out exchange.json                 about a minute on two GPUs
    python -m bench.gpu.exchange --only interleavings --count 200

Each experiment has two ranks of its own, which this process starts, bounds in time and kills. One JSON object; exit
code 0 when every experiment came out as expected, 1 otherwise.

interleavings   P's split operations and replays of D's graph in an order that each rank draws for itself, with skews
together        bare buffers: each phase alone, and both; the controls, which serialise: both phases launched on one
                stream, and launched on their own with one communication stream behind both, as one buffer would have
split           the same through the port: notification, counts, submission; how long the counts take
in_flight       two low-latency operations on one buffer at once (the control: wrong values or no end)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
EXPERIMENTS: Final = ("interleavings", "together", "split", "in_flight")
RANKS: Final = 2


def main() -> int:
    """Run what was asked for; the exit code."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu.exchange", description=__doc__.partition("\n")[0])
    made.add_argument("--out", type=Path, help="where the JSON goes")
    made.add_argument("--only", action="append", choices=EXPERIMENTS, help="an experiment (repeatable)")
    made.add_argument("--count", type=int, default=10_000, help="interleavings")
    made.add_argument("--iterations", type=int, default=300, help="of a timing")
    made.add_argument("--hidden", type=int, default=2048)
    made.add_argument("--experts", type=int, default=64)
    made.add_argument("--topk", type=int, default=8)
    made.add_argument("--prefill-rows", type=int, default=2048)
    made.add_argument("--decode-rows", type=int, default=64)
    made.add_argument("--num-sms", type=int, default=20)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--seconds", type=float, default=150.0, help="bound of an experiment")
    given = made.parse_args()
    report: dict[str, Any] = {"arguments": {k: v for k, v in vars(given).items() if k not in ("out", "only")}}
    found = report["experiments"] = {}
    for name in given.only or EXPERIMENTS:
        begun = time.monotonic()
        found[name] = judged(name, run(name, given, 25.0 if name == "in_flight" else given.seconds))
        found[name]["took_s"] = round(time.monotonic() - begun, 2)
        print(f"{name:14} {'as expected' if found[name]['expected'] else 'NOT AS EXPECTED'}  {found[name]['say']}")
        if given.out:  # after each, so that a bound on the whole loses nothing
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(each["expected"] for each in found.values()) else 1


def run(name: str, given: argparse.Namespace, bound_s: float) -> list[dict[str, Any] | None]:
    """What each rank reported; None for one that did not end in time."""
    folder = tempfile.mkdtemp(prefix="exchange-")
    config = {**vars(given), "experiment": name, "store": f"{folder}/store", "parent": os.getpid(), "out": None}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "exchange_rank.py"), json.dumps({**config, "rank": rank})],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(RANKS)
    ]
    until, found = time.monotonic() + bound_s, []
    try:
        for each in ranks:
            try:
                text, _ = each.communicate(timeout=max(0.1, until - time.monotonic()))
                found.append(json.loads(text.strip().splitlines()[-1]))
            except (subprocess.TimeoutExpired, IndexError, ValueError):
                found.append(None)
    finally:
        for each in ranks:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    return found


def judged(name: str, ranks: list[dict[str, Any] | None]) -> dict[str, Any]:
    """What they saw, whether that was expected, and a sentence."""
    if name == "in_flight":
        wrong = [None if rank is None else rank["wrong"] for rank in ranks]
        say = ["no end in time" if each is None else f"{each} wrong values" for each in wrong]
        return {"ranks": ranks, "expected": any(each is None or each for each in wrong), "say": "; ".join(say)}
    if any(rank is None for rank in ranks):
        return {"ranks": ranks, "expected": False, "say": "a rank did not end in time, or failed"}
    whole = [rank for rank in ranks if rank is not None]
    if name == "interleavings":
        wrong = [rank["wrong"] for rank in whole]
        say = f"{whole[0]['count']} interleavings, wrong values: {wrong}"
        return {"ranks": ranks, "expected": not any(any(each) for each in wrong), "say": say}
    if name == "together":
        worst = {key: max(rank[key] for rank in whole) for key in whole[0] if key.endswith("_us")}
        ratio = worst["both_us"] / max(worst["p_alone_us"], worst["d_alone_us"])
        late = worst["d_beside_us"] / worst["d_once_us"]
        say = (
            f"P {worst['p_alone_us']:.0f} us, D {worst['d_alone_us']:.0f} us, one of each together"
            f" {worst['both_us']:.0f} us ({ratio:.2f} of the longer; on one stream {worst['one_stream_us']:.0f} us,"
            f" over one communication stream {worst['shared_us']:.0f} us), {whole[0]['replays']} of D beside each of P"
            f" {worst['full_us']:.0f} us; a replay of D beside P {worst['d_beside_us']:.0f} us, alone"
            f" {worst['d_once_us']:.0f} ({late:.2f}), over one communication stream {worst['d_shared_us']:.0f}"
        )
        serial = min(worst["one_stream_us"], worst["shared_us"]) > 1.05 * worst["both_us"]
        good = ratio <= 1.1 and late <= 1.3 and serial
        return {"ranks": ranks, "ratio": ratio, "d_ratio": late, "expected": good, "say": say}
    counts = max(rank["counts_us"] for rank in whole)
    say = f"P {max(rank['p_us'] for rank in whole):.0f} us an operation, its counts {counts:.0f} us of it (medians)"
    return {"ranks": ranks, "expected": True, "say": say}


if __name__ == "__main__":
    sys.exit(main())
