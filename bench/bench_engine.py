"""Our engine beside others that run on a CPU, on one checkpoint in one run, into bench/results/engine.json.

A random Qwen3-MoE of 4 layers with 8 experts, 2 of them a token; prompts of 200 tokens, 64 tokens out, greedy; and a
replay of conversations whose turns continue a context. Each engine is loaded once, in an environment of its own
(bench/peers/engines), and all are asked in turn, round by round, so that a busy machine slows all of them. What counts
are ratios inside one round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.engines.install import PEERS, Unavailable, python_of

from models.tiny import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "peers" / "engines"
RESULTS = Path(__file__).parent / "results" / "engine.json"
SHAPE: dict[str, int] = {
    "vocab": 512, "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 32, "experts": 8, "top_k": 2,
    "expert_width": 128,
}  # fmt: skip
ROWS = 64
INPUT, OUTPUT = 200, 64
CONVERSATIONS, TURNS, MORE = 8, 5, 100
"""Of the replay: each turn adds MORE tokens, as a tool's answer does, to the context and generates half of OUTPUT."""


class Engine:
    """A process that answers (`peers.engines.answer`)."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        env = {**os.environ, "PYTHONPATH": str(ROOT)} if "bench.peers" in " ".join(command) else None
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, cwd=ROOT, env=env
        )
        self.about: dict[str, Any] = self._answer()["ready"]

    def ask(self, prompts: list[list[int]], tokens: int, sessions: list[int] | None) -> dict[str, Any]:
        """One question."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens, "sessions": sessions}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise Unavailable(f"ended: {said[-1][:200]}")
        found: dict[str, Any] = json.loads(line)
        return found


def prompt(seed: int, length: int) -> list[int]:
    """Token ids."""
    return random.Random(seed).choices(range(SHAPE["vocab"]), k=length)


def batch(engine: Engine, requests: int, seed: int) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of independent requests."""
    found = engine.ask([prompt(1000 * seed + n, INPUT) for n in range(requests)], OUTPUT, None)
    return found["seconds"], found["tokens"]


def replay(engine: Engine, seed: int, first: int) -> float:
    """Seconds of all turns of the conversations, one turn of each at a time. first: number of their sessions."""
    contexts = [prompt(1000 * seed + n, INPUT) for n in range(CONVERSATIONS)]
    seconds = 0.0
    for turn in range(TURNS):
        found = engine.ask(contexts, OUTPUT // 2, list(range(first, first + CONVERSATIONS)))
        seconds += found["seconds"]
        for n, tokens in enumerate(found["tokens"]):
            contexts[n] = contexts[n] + tokens + prompt(seed + 7 * turn + n, MORE)
    return seconds


def start(options: argparse.Namespace, checkpoint: Path, logs: Path) -> tuple[list[Engine], dict[str, str]]:
    """All engines that can be had, and why the others cannot."""
    given = dict(each.split("=", 1) for each in options.python)
    ours = [sys.executable, "-m", "bench.peers.engines.ours", str(checkpoint), str(ROWS)]
    wanted: list[tuple[str, list[str] | None, Any]] = [("turnstile", ours, None)]
    wanted += [("turnstile float32", [*ours, "dtype=float32"], None)]
    wanted += [("turnstile compiled", [*ours, "compiled=1"], None)]
    wanted += [("turnstile compiled float32", [*ours, "compiled=1", "dtype=float32"], None)]
    for peer in PEERS:
        for mode in peer.modes if peer.name in options.peers else ():
            wanted.append((f"{peer.name} {mode}".strip(), None, (peer, mode)))
    engines, absent = [], {}
    for name, own, of in wanted:
        try:
            command = own
            if command is None:
                peer, mode = of
                python = Path(given[peer.name]) if peer.name in given else python_of(peer, options.cache)
                command = [str(python), str(SCRIPTS / f"run_{peer.name}.py"), str(checkpoint), str(ROWS)]
                command += [mode] if mode else []
            engines.append(Engine(name, command, logs / f"{name.replace(' ', '-')}.log"))
            print(f"{name}: {engines[-1].about}", flush=True)
        except Unavailable as reason:
            absent[name] = str(reason)
            print(f"{name}: left out, {reason}", flush=True)
    return engines, absent


def measure(engines: list[Engine], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells, the engines in turn within each round, in another order each time."""
    cells: list[dict[str, Any]] = []
    for requests in options.requests:
        seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        tokens: dict[str, list[list[int]]] = {}
        for round_ in range(-1, options.repeat):  # the first one warms up
            for engine in random.Random(round_).sample(engines, len(engines)):
                took, tokens[engine.name] = batch(engine, requests, round_ + 1)
                if round_ >= 0:
                    seconds[engine.name].append(took)
        cells.append(cell(f"{requests} requests", requests * OUTPUT, seconds, tokens))
    seconds = {engine.name: [] for engine in engines}
    for round_ in range(-1, options.repeat):
        for engine in random.Random(round_).sample(engines, len(engines)):
            took = replay(engine, 50 + round_, (round_ + 1) * CONVERSATIONS)
            if round_ >= 0:
                seconds[engine.name].append(took)
    what = f"{CONVERSATIONS} conversations of {TURNS} turns"
    cells.append(cell(what, CONVERSATIONS * TURNS * OUTPUT // 2, seconds, {}))
    return cells


def reference(engines: Iterable[str]) -> str:
    """Which row of ours the others are held against: compiled kernels, as all but transformers bring them along."""
    return "turnstile compiled" if "turnstile compiled" in engines else "turnstile"


def cell(what: str, tokens: int, seconds: dict[str, list[float]], drawn: dict[str, list[list[int]]]) -> dict[str, Any]:
    """A row: output tokens a second of each engine, ours over theirs within each round, and how many tokens agree."""
    ours = seconds[reference(seconds)]
    rows = {}
    for name, took in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(took, ours, strict=True)]
        rows[name] = {
            "tokens_per_s": round(tokens / statistics.median(took), 1),
            "seconds": [round(each, 4) for each in took],
            "turnstile_is_faster_by": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
        if drawn:
            pairs = [
                a == b
                for one, two in zip(drawn[reference(drawn)], drawn[name], strict=True)
                for a, b in zip(one, two, strict=False)
            ]
            rows[name]["tokens_equal_ours"] = round(sum(pairs) / len(pairs), 3)
    line = ", ".join(f"{name} {row['tokens_per_s']:,.0f}" for name, row in rows.items())
    print(f"{what}: tokens/s {line}", flush=True)
    return {"what": what, "engines": rows}


def arguments() -> argparse.Namespace:
    """Of the command line."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", nargs="*", default=[peer.name for peer in PEERS], metavar="NAME")
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH", help="an environment that is there")
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=home / "turnstile-bench" / "engines", help="for environments")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Start, measure, print and write."""
    options = arguments()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    report: dict[str, Any] = {
        "what": f"a random Qwen3-MoE {SHAPE}; {INPUT} tokens in, {OUTPUT} out, greedy; 2 threads",
        "command": "python bench/bench_engine.py",
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 2),
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "tiny", **SHAPE)  # type: ignore[arg-type]
        engines, absent = start(options, checkpoint, Path(folder))
        try:
            report["reference"] = reference(engine.name for engine in engines)
            report["engines"], report["absent"] = {engine.name: engine.about for engine in engines}, absent
            report["cells"] = measure(engines, options)
        finally:
            for engine in engines:
                engine.close()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
