"""What decode pays for multiplexing when there is no prefill, into bench/results/decode.json.

Real ranks that stay up, a batch whose requests are prefilled together and then only decode, and of each run the rounds
in which all rows decode and no prefill is near, read from the record.

    policies   runs under `fine` (multiplexes) and `normal` (does not) in turn, on the same prompts: the tokens must be
               equal, and so must be the collectives, their bytes and the exchanges of every single round; then how
               long a round takes, paired, and the CPU time of all ranks, which a busy machine disturbs less
    stretches  one run that changes between `fine` and `normal` every few rounds, by the CPU time of the ranks
    exchange   one run under `fine` that leaves the round's one exchange out in every other stretch of rounds: what a
               decode loop would cost that never asked the other ranks, paired stretch by stretch
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measured
from bench.batches import SHAPE, batch, cpu_s
from bench.rounds import Round, alike, decode_only, rounds, traffic
from bench.stretch_policy import FINE, StretchConfig
from bench.stretches import measure as stretches_of
from bench.switch_policy import OFF, ON
from kernel.record import read_run
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

POLICIES = ("fine", "normal")
AIM_PERCENT = 1.0
EDGE = 3
"""Rounds at the start of a stretch that do not count: ranks come apart, or together again."""


def windows(run: Path, rows: int) -> dict[int, list[Round]]:
    """The decode-only rounds of each rank. Raises SystemExit where there are too few to say anything."""
    found = {rank: decode_only(rounds(recording.events), rows) for rank, recording in read_run(run).items()}
    if min(map(len, found.values())) < 20:
        raise SystemExit(f"{run}: {[len(each) for each in found.values()]} decode-only rounds: give more --tokens")
    return found


def ms(some: Sequence[Round]) -> float:
    """Median length of a round."""
    return statistics.median(one.took_ns for one in some) / 1e6


async def policies(engine: Engine, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Runs under both policies in turn."""
    taken: dict[str, list[float]] = {name: [] for name in POLICIES}
    cpu: dict[str, list[float]] = {name: [] for name in POLICIES}
    waited: dict[str, list[float]] = {name: [] for name in POLICIES}
    tokens: dict[int, dict[str, Any]] = {}
    kinds: dict[str, list[Round]] = {name: [] for name in POLICIES}
    for round_, name in measured.turns(POLICIES, asked.repeat + 1):
        run = folder / f"{name}-{round_}"
        await engine.flush()
        await engine.use_policy(name, record=run)
        before = cpu_s(engine)
        drawn, _ = await batch(engine, asked.rows * engine.world.adp, asked.prompt, asked.tokens, round_)
        used = cpu_s(engine) - before
        tokens.setdefault(round_, {})[name] = drawn
        if round_ == 0:  # it warms up
            continue
        await engine.use_policy(name)  # the record is whole once it is closed
        ranks = windows(run, asked.rows)
        cpu[name].append(used)
        taken[name].append(statistics.fmean(map(ms, ranks.values())))
        everything = [one for each in ranks.values() for one in each]
        waited[name].append(sum(one.waited_ns for one in everything) / sum(one.took_ns for one in everything))
        kinds[name] += everything
    one = {name: kinds[name][0] for name in POLICIES}
    equal = alike(kinds["fine"] + kinds["normal"])
    ratio = measured.paired(taken["fine"], taken["normal"])
    processor = measured.paired(cpu["fine"], cpu["normal"])
    found: dict[str, Any] = {
        "round_ms": {name: measured.spread(each) for name, each in taken.items()},
        "fine_over_normal": {**ratio, "percent": measured.percent_more(ratio)},
        "cpu_of_a_run": {**processor, "percent": measured.percent_more(processor)},
        "aim_percent": AIM_PERCENT,
        "met": measured.below(measured.percent_more(ratio), AIM_PERCENT),
        "same_tokens": all(each["fine"] == each["normal"] for each in tokens.values()),
        "same_calls_bytes_and_exchanges": equal,
        "rounds": {name: len(each) for name, each in kinds.items()},
        "calls_a_round": {name: sum(each.calls.values()) for name, each in one.items()},
        "bytes_a_round": {
            name: traffic(each.calls, SHAPE["hidden"], SHAPE["vocab"], 4) for name, each in one.items()
        },
        "exchanges_a_round": {name: dict(each.exchanges) for name, each in one.items()},
        "calls": [f"{call.op} over {call.group}, {call.rows} rows: {n}" for call, n in one["fine"].calls.items()],
        "share_of_a_round_in_the_exchange": {name: measured.spread(each) for name, each in waited.items()},
    }
    print(
        f"a round: fine {found['round_ms']['fine']['median']} ms, normal {found['round_ms']['normal']['median']} ms,"
        f" {found['fine_over_normal']['percent']} % more,"
        f" {found['cpu_of_a_run']['percent']} % CPU time; equal calls, bytes, exchanges: {equal};"
        f" equal tokens: {found['same_tokens']}",
        flush=True,
    )
    return found


def stretches(all_rounds: Sequence[Round]) -> dict[str, list[list[Round]]]:
    """The rounds of each stretch with and without its exchange, in order. A mark in round k is about k's exchange."""
    found: dict[str, list[list[Round]]] = {ON: [], OFF: []}
    current: list[Round] = []
    for one in all_rounds:
        for text, _ in one.marks:
            if text in found:
                current = []
                found[text].append(current)
        current.append(one)
    found[ON] = found[ON][: len(found[OFF])]  # the last mark begins no stretch
    return found


async def exchange(engine: Engine, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """One run that leaves the exchange out every other stretch."""
    run, length = folder / "switch", asked.stretch
    file = Path(__file__).parent / "switch_policy.py"
    await engine.flush()
    await engine.use_policy(f"{file}:Switch:rows={asked.rows},length={length},pairs={asked.pairs}", record=run)
    tokens = 2 * length * asked.pairs + 60
    await batch(engine, asked.rows * engine.world.adp, asked.prompt, tokens)
    await engine.use_policy("fine")
    with_, without = [], []
    for recording in read_run(run).values():
        found = stretches(rounds(recording.events))
        with_.append([ms(each[EDGE:length]) for each in found[ON]])
        without.append([ms(each[EDGE:length]) for each in found[OFF]])
    pairs = [[statistics.fmean(pair) for pair in zip(*each, strict=True)] for each in (with_, without)]
    ratio = measured.paired(pairs[0], pairs[1])
    result = {
        "round_ms_with": measured.spread(pairs[0]), "round_ms_without": measured.spread(pairs[1]),
        "with_over_without": {**ratio, "percent": measured.percent_more(ratio)},
        "stretches_of": length,
    }  # fmt: skip
    print(
        f"the one exchange: {result['round_ms_with']['median']} ms a round with it,"
        f" {result['round_ms_without']['median']} without, {result['with_over_without']['percent']} % more"
    )
    return result


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one engine."""
    world = World(asked.ranks, asked.ranks, asked.ranks)
    sizes = StretchConfig(FINE, rows=asked.rows, pairs=asked.changes)
    most = max(asked.tokens, 2 * asked.stretch * asked.pairs + 60, sizes.rounds) + asked.prompt
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_checkpoint(folder / "model", **SHAPE, max_positions=most)  # type: ignore[arg-type]
        blocks = asked.rows * (most // 16 + 2)
        async with Engine(model, world, kv_tokens=16 * blocks, rows=asked.rows, record_events=1 << 18) as engine:
            found = {"world": str(world), "model": SHAPE, "rows": asked.rows}
            found["policies"] = await policies(engine, folder, asked)
            found["stretches"] = await stretches_of(engine, folder / "stretches", sizes, asked.prompt)
            found["policies"]["met"] = measured.below(found["stretches"]["percent"], AIM_PERCENT)
            found["exchange"] = await exchange(engine, folder, asked)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = measured.arguments(__doc__, "decode.json", 12, "pairs of runs")
    parser.add_argument("--ranks", type=int, default=2, help="attention replicas of one rank each (default: 2)")
    parser.add_argument("--rows", type=int, default=8, help="of a replica (default: 8)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens (default: 32)")
    parser.add_argument("--tokens", type=int, default=200, help="of each request of a run (default: 200)")
    parser.add_argument("--pairs", type=int, default=20, help="of stretches with and without it (default: 20)")
    parser.add_argument("--changes", type=int, default=100, help="pairs of stretches of either policy (default: 100)")
    parser.add_argument("--stretch", type=int, default=30, help="rounds of a stretch (default: 30)")
    asked = parser.parse_args()
    report = measured.surroundings()
    measured.write(asked.output, {**report, **asyncio.run(measure(asked))})


if __name__ == "__main__":
    main()
