"""The hazard is real and gone: collectives of prefill and decode that cross on two GPUs, and the turnstile on top.

    python bench/gpu/hazard.py --out hazard.json                # all of it, about four minutes on two GPUs
    python bench/gpu/hazard.py --only cycles --device cpu       # the turnstile's part on the CPU world

Each experiment has two ranks of its own, which this process starts, bounds in time and kills. One JSON object with what
every rank saw; exit code 0 when every experiment came out as expected, 1 otherwise, 2 for unusable input.

crossing      opposite host order on two communicators (`unordered`), few free SMs: no progress while the occupier stays
consistent    the same load in one order, two streams, same pressure: may stop until the occupier goes (conditional)
routed        the same load in one order through the route, same pressure: finishes
free          opposite order, two streams, no occupier: finishes (the hazard is conditional)
one_stream    opposite order on one stream, no occupier: hangs for good, until the communicators are aborted
cycles        turnstile cycles of the real rank under `fine`, up to 20 ms of skew, one run a seed: all of them finish
delayed       the same with a slow P: D is acknowledged while P is incomplete
overlap       CUPTI: the registered pair never overlaps, P's computation overlaps D
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from kernel.comm.shared import Arena  # noqa: E402
from kernel.topology import World  # noqa: E402

CROSSINGS: Final = {
    "crossing": {"order": "opposite", "routed": False, "occupied": True},
    "consistent": {"order": "consistent", "routed": False, "occupied": True},
    "routed": {"order": "consistent", "routed": True, "occupied": True},
    "free": {"order": "opposite", "routed": False, "occupied": False},
    "one_stream": {"order": "opposite", "routed": True, "occupied": False},
}
TURNS: Final = {
    "cycles": {"skew_ms": 20.0, "slow_ms": 0.0, "profile": False},
    "delayed": {"skew_ms": 0.0, "slow_ms": 10.0, "profile": False},
    "overlap": {"skew_ms": 0.0, "slow_ms": 4.0, "profile": True},  # without, P has hardly anything to overlap with
}


def main() -> int:
    """Run what was asked for; the exit code."""
    args = arguments()
    names = args.only or [*CROSSINGS, *TURNS]
    if args.device == "cpu":
        names = [name for name in names if name in ("cycles", "delayed")]
    found: dict[str, Any] = {}
    for name in names:
        begun = time.monotonic()
        found[name] = crossing(name, args) if name in CROSSINGS else turns(name, args)
        found[name]["took_s"] = round(time.monotonic() - begun, 2)
        print(f"{name:12} {'as expected' if found[name]['expected'] else 'NOT AS EXPECTED'}  {found[name]['say']}")
        if args.out:  # after each, so that a bound on the whole loses nothing
            report = {"experiments": found, "arguments": {k: v for k, v in vars(args).items() if k != "out"}}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(each["expected"] for each in found.values()) else 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--only", action="append", choices=[*CROSSINGS, *TURNS], help="an experiment (repeatable)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--max-ctas", type=int, default=16, help="CTAs of one collective")
    parser.add_argument("--free-sms", type=int, default=24, help="SMs that the occupier leaves")
    parser.add_argument("--elements", type=int, default=1 << 20, help="floats of one collective")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of collectives; more fill the launch queue")
    parser.add_argument("--window-s", type=float, default=4.0, help="how long a crossing is watched")
    parser.add_argument("--cycles", type=int, default=512, help="turnstile cycles a seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bound-s", type=float, default=90.0, help="most seconds of one run; then it is killed")
    return parser.parse_args()


def crossing(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One crossing of P's and D's collectives."""
    keys = ("max_ctas", "free_sms", "elements", "rounds", "window_s")
    setting = {**CROSSINGS[name], **{key: getattr(args, key) for key in keys}}
    ranks = start("crossing", setting, args)
    known = all("inside" in rank for rank in ranks)
    total = 2 * args.rounds
    inside = [rank.get("inside", -1) for rank in ranks]
    after = [rank.get("after", -1) for rank in ranks]
    if name == "crossing":
        # Whatever came first may have passed before the other rank stood against it; the load as a whole did not.
        expected = known and max(inside) < total and not any(rank["moved_late"] for rank in ranks)
        expected = expected and min(after) == total
        say = f"{inside} of {total} done while the occupier stayed, {after} after it had gone"
    elif name == "consistent":
        # Each rank's device decides by itself which of two kernels it starts when there is room for one.
        expected = known and min(after) == total
        say = f"{inside} of {total} done while the occupier stayed, {after} after it had gone"
    elif name == "one_stream":
        expected = known and max(inside) < total and max(after) < total and all(rank["freed"] for rank in ranks)
        say = f"{inside} of {total} done in the window, freed by abort: {[rank.get('freed') for rank in ranks]}"
    else:
        expected = known and min(inside) == total
        say = f"{inside} of {total} done"
    return {"setting": setting, "ranks": ranks, "expected": expected, "say": say}


def turns(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Turnstile cycles of real ranks, one world a seed."""
    seeds = args.seeds if name == "cycles" else 1
    cycles = args.cycles if name == "cycles" else 60 if name == "delayed" else 40
    runs = []
    for seed in range(seeds):
        setting = {**TURNS[name], "device": args.device, "max_ctas": args.max_ctas, "cycles": cycles, "seed": seed}
        runs.append(start("turns", setting, args))
    ranks = [rank for run in runs for rank in run]
    known = all("cycles" in rank for rank in ranks)
    done = sum(run[0].get("cycles", 0) for run in runs)
    expected = known and done == seeds * cycles and all(rank["right"] for rank in ranks)
    say = f"{done} of {seeds * cycles} cycles"
    if known and name == "delayed":
        early = [rank["acknowledged_early"] for rank in ranks]
        expected = expected and min(early) > 0
        say += f"; D acknowledged while P was incomplete in {early} of them"
    if known and name == "overlap":
        pair = [rank["registered_ms"] for rank in ranks]
        compute = [rank["compute_ms"] for rank in ranks]
        on_d = all(rank["routed_on_decode"] for rank in ranks)
        expected = expected and max(pair) == 0.0 and min(compute) > 0.0 and on_d
        say += f"; registered pair overlaps {pair} ms, P's computation and D {compute} ms, routed on D's stream: {on_d}"
    return {"setting": setting, "ranks": ranks, "expected": expected, "say": say}


def start(what: str, setting: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Two ranks that run bench/gpu/hazard_`what`.py; what each printed last, or what became of it."""
    arena = Arena.create(World(2, adp=2))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    try:
        for rank in range(2):
            config = json.dumps({"rank": rank, "port": port, "arena": arena.fd, "parent": os.getpid(), **setting})
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / f"hazard_{what}.py"), config],
                    pass_fds=arena.fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        end = time.monotonic() + args.bound_s
        return [outcome(process, end) for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        arena.close()


def outcome(process: subprocess.Popen[str], end: float) -> dict[str, Any]:
    """What a rank reported; one that is late is killed, with its Python stacks in the report."""
    try:
        out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # faulthandler prints where its threads are
        time.sleep(0.5)
        process.kill()
        out, err = process.communicate()
        return {"killed": True, "stderr": err[:6000]}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"failed": process.returncode, "stderr": err[-3000:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
