"""What the checker costs, into bench/results/check.json: speed, executions, reduction, large scopes, `lean` and `fine`.

    speed        schedules by chance and steps a second, at the fidelities `any` and `fifo`
    policies     executions that each shipped policy needs for a proof
    mutants      executions until each planted mistake of tests/mutants.py is found, and SPIN's verdict on the same one
    reduction    Knuth's estimate (1975) of the number of orders of the same scenario, from random walks: the mean of
                 the product of the numbers of enabled actors. Its logarithm is told: few walks make up the mean
    large        one certified execution of 40 layers and 41 D iterations, each size in a process of its own
    lean         one all-rank exchange a round against two: virtual time on simulated ranks, and real ranks with --real
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

HOUSE = Path(__file__).parent.parent
sys.path.insert(0, str(HOUSE))

from kernel.inbox import Submit  # noqa: E402
from kernel.request import Request, SamplingParams  # noqa: E402
from kernel.topology import World  # noqa: E402
from verify.explore.certify import certify  # noqa: E402
from verify.explore.execution import execute  # noqa: E402
from verify.explore.search import uniform  # noqa: E402
from verify.sim.arrivals import SimTurn, Trajectory  # noqa: E402
from verify.sim.simulation import Engine, simulate  # noqa: E402
from verify.trial.enact import attempt, run  # noqa: E402
from verify.trial.family import START, family  # noqa: E402
from verify.trial.scenario import Scenario  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.sim.scheduler import Actor

RESULTS = Path(__file__).parent / "results" / "check.json"
LAYERS, ITERATIONS = 40, 41
SIZES = (8, 16, 64)
SCOPES = ((2, 2, 2), (4, 3, 3))
POLICIES = ("normal", "global_complete", "global_enqueue", "fine", "lean", "adaptive")


def met(ranks: int, segments: int, iterations: int, policy: str = "fine") -> Scenario:
    """A P epoch of so many segments that meets D."""
    world = World(ranks, 2, ranks, route="paper")
    return next(
        each for each in family(world, policy, segments, iterations) if any(at == START for at, _ in each.entries)
    )


def large(ranks: int, policy: str = "fine") -> Scenario:
    """Two turns of 41 D iterations, and a prompt whose 40 segments stand between them."""
    def submit(number: int, replica: int, out: int) -> Submit:
        prompt = tuple(range(100 * number, 100 * number + 3))
        return Submit(Request(number, number, replica, prompt, SamplingParams(max_tokens=out, ignore_eos=True)))

    entries = ((0, submit(0, 0, ITERATIONS + 1)), (0, submit(1, 1, ITERATIONS + 1)), (START, submit(2, 0, 1)))
    return Scenario(World(ranks, 2, ranks, route="paper"), policy, LAYERS, entries, blocks=64)


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, least and largest."""
    middle = statistics.median(values)
    return {"median": round(middle, digits), "min": round(min(values), digits), "max": round(max(values), digits)}


# -- one execution after the other --------------------------------------------------------------------------------


def speed(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Schedules by chance, as the search does when a budget is spent, and the plain run of the same scenario."""
    rows = []
    for ranks, segments, iterations in SCOPES:
        program = partial(run, met(ranks, segments, iterations))
        kinds: dict[str, Callable[[int], int]] = {
            "any": lambda seed, p=program: len(execute(p, uniform(seed)).trace.names),  # type: ignore[misc]
            "fifo": lambda seed, p=program: len(execute(p, uniform(seed), fifo=True).trace.names),  # type: ignore[misc]
            "default order, without a trace": lambda seed, p=program: attempt(*p.args).steps,  # type: ignore[misc]
        }
        for name, once in kinds.items():
            schedules, steps, seed = [], [], 0
            for _ in range(repeats):
                start, count, made = time.process_time(), 0, 0
                while time.process_time() - start < seconds:
                    made += once(seed)
                    count, seed = count + 1, seed + 1
                taken = time.process_time() - start
                schedules.append(count / taken)
                steps.append(made / taken)
            rows.append(
                {"scope": f"{ranks}x{segments}x{iterations}", "order": name, "schedules_per_s": spread(schedules, 1),
                 "steps_per_s": spread(steps, 0)}
            )  # fmt: skip
            print(f"speed   {rows[-1]['scope']} {name}: {rows[-1]['schedules_per_s']['median']} schedules/s")
    return rows


class Walk:
    """A `choose` by chance that multiplies up how many it could choose from."""

    def __init__(self, seed: int) -> None:
        self.draws, self.log10, self.choices = random.Random(seed), 0.0, 0

    def __call__(self, enabled: Sequence[Actor]) -> int:
        self.log10 += math.log10(len(enabled))
        self.choices += 1
        return self.draws.randrange(len(enabled))


def reduction(walks: int) -> list[dict[str, Any]]:
    """How many orders there are, where the explorer needs one execution."""
    rows = []
    for ranks, segments, iterations in SCOPES:
        scenario = met(ranks, segments, iterations)
        logs, choices = [], []
        for seed in range(walks):
            walk = Walk(seed)
            execute(partial(run, scenario), walk)
            logs.append(walk.log10)
            choices.append(walk.choices)
        highest = max(logs)
        mean = highest + math.log10(sum(10 ** (log - highest) for log in logs) / len(logs))
        result = certify(partial(run, scenario), str(scenario))
        rows.append(
            {"scope": f"{ranks}x{segments}x{iterations}", "walks": walks, "log10_orders": round(mean, 1),
             "log10_single_walks": spread(logs, 1), "choices": spread(choices, 0), "verdict": str(result.verdict),
             "executions": result.evidence.executions, "steps": result.evidence.steps}
        )  # fmt: skip
        print(f"orders  {rows[-1]['scope']}: 10^{mean:.1f}, {result.evidence.executions} execution: {result.verdict}")
    return rows


def policies() -> list[dict[str, Any]]:
    """A proof of each."""
    rows = []
    for name in POLICIES:
        start = time.process_time()
        result = certify(partial(run, met(4, 3, 3, name)), name)
        rows.append(
            {"policy": name, "scope": "4x3x3", "verdict": str(result.verdict), "steps": result.evidence.steps,
             "executions": result.evidence.executions, "seconds": round(time.process_time() - start, 3)}
        )  # fmt: skip
    return rows


def mutants(spin: bool) -> list[dict[str, Any]]:
    """Each planted mistake."""
    from tests.mutants import MUTANTS
    from tests.planted import planted
    from tests.test_explore_mutants import judged

    rows = []
    oracle = _spin() if spin else None
    for mutant in MUTANTS:
        start = time.process_time()
        with planted(mutant.changes):
            report = judged(mutant, explained=False)
        taken = time.process_time() - start
        rows.append(
            {"mutant": mutant.name, "verdict": str(report.verdict), "class": str(report.cls),
             "certainty": str(report.certainty), "executions": report.executions, "seconds": round(taken, 3),
             **({"spin": oracle(mutant.spin)} if oracle is not None and mutant.spin else {})}
        )  # fmt: skip
        print(f"mutant  {mutant.name}: {report.verdict} ({report.cls}), {report.executions} executions, {taken:.2f} s")
    return rows


def _spin() -> Callable[[str], dict[str, Any]] | None:
    """Asks SPIN about a variant with two ranks; None where it is not installed."""
    from tests.spin_oracle import check, missing
    from tests.spin_variants import VARIANTS

    if missing() is not None:
        return None
    known: dict[str, dict[str, Any]] = {}

    def ask(name: str) -> dict[str, Any]:
        if name not in known:
            variant = next(each for each in VARIANTS if each.name == name)
            with tempfile.TemporaryDirectory() as folder:
                found = check(variant, 2, Path(folder))
            known[name] = {
                "variant": name, "verdict": str(found.verdict), "states": found.states,
                "seconds": round(found.seconds, 3),
            }  # fmt: skip
        return known[name]

    return ask


# -- large scopes -------------------------------------------------------------------------------------------------


def certified(ranks: int) -> dict[str, Any]:
    """One execution, in this process."""
    scenario = large(ranks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, wall = time.process_time(), time.perf_counter()
    result = certify(partial(run, scenario), str(scenario))
    taken, lasted = time.process_time() - start, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "ranks": ranks, "layers": LAYERS, "iterations": ITERATIONS, "verdict": str(result.verdict),
        "executions": result.evidence.executions, "steps": result.evidence.steps, "cpu_s": round(taken, 2),
        "wall_s": round(lasted, 2), "memory_mb": round((peak - before) / 1024, 1), "peak_mb": round(peak / 1024, 1),
    }  # fmt: skip


def in_processes(sizes: Sequence[int], repeats: int, limit_s: float) -> list[dict[str, Any]]:
    """Each size in a process of its own; one that takes too long is said to."""
    rows = []
    for size in sizes:
        found: list[dict[str, Any]] = []
        for _ in range(repeats if size <= 16 else 1):
            command = [sys.executable, __file__, "--certify", str(size)]
            try:
                ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s)
            except subprocess.TimeoutExpired:
                break
            found.append(json.loads(ended.stdout))
        if not found:
            rows.append({"ranks": size, "verdict": "unfinished", "limit_s": limit_s})
        else:
            seconds = {key: spread([each[key] for each in found], 2) for key in ("cpu_s", "wall_s")}
            rows.append({**found[0], **seconds, "repeats": len(found)})
        print(f"large   {size} ranks: {rows[-1]}")
    return rows


# -- lean and fine ------------------------------------------------------------------------------------------------


def exchanges(ranks: int, rendezvous_us: Sequence[int]) -> list[dict[str, Any]]:
    """Both policies on the same arrivals in virtual time, with the default costs of a layer."""
    draws = random.Random(0)

    def turn(number: int) -> SimTurn:
        tokens = tuple(draws.randrange(1000) for _ in range(draws.randint(20, 400)))
        wait = draws.randint(5, 40) * 1_000_000 if number else 0
        return SimTurn(tokens, SamplingParams(max_tokens=draws.randint(10, 60), ignore_eos=True), wait)

    asked = [Trajectory(session, tuple(turn(number) for number in range(3))) for session in range(12)]
    rows = []
    for us in rendezvous_us:
        for policy in ("fine", "lean"):
            engine = Engine(layers=8, blocks=4000, audit=False)
            cost = type(engine.cost)(rendezvous_ns=1000 * us)
            engine = Engine(layers=8, blocks=4000, audit=False, cost=cost)
            found = simulate(World(ranks, 2, ranks), policy, asked, engine)
            log = found.logs[0]
            waits, met_, launched, ended = 0, 0, 0, 0
            gaps: list[int] = []
            since = 0
            for at, what, where, which in log:
                if where == "host" and what == "arrive":
                    since = at
                elif where == "host" and what == "leave":
                    waits, met_ = waits + at - since, met_ + 1
                elif where == "D" and which.startswith("D ") and which[2:].isdigit():
                    if what == "enqueue":
                        launched += 1
                    elif what == "finish":
                        ended = at
                elif where == "D" and what == "start" and ended:
                    gaps.append(at - ended)
                    ended = 0
            rows.append(
                {"policy": policy, "rendezvous_us": us, "makespan_ms": round(found.makespan_ns / 1e6, 2),
                 "iterations": launched, "exchanges_per_iteration": round(met_ / max(1, launched), 3),
                 "in_exchanges_ms": round(waits / 1e6, 2), "mean_d_gap_us": round(statistics.mean(gaps) / 1e3, 1)}
            )  # fmt: skip
            print(f"lean    {rows[-1]}")
    return rows


def real(repeats: int) -> dict[str, Any]:
    """Both on four real ranks of this machine."""
    command = [sys.executable, "-m", "turnstile", "compare", "--demo", "--policy", "fine", "--policy", "lean"]
    with tempfile.TemporaryDirectory() as out:
        ended = subprocess.run(
            [*command, "--repeat", str(repeats), "--json", "--out", f"{out}/run"], capture_output=True, text=True,
            check=True, cwd=HOUSE,
        )  # fmt: skip
    keys = ("policy", "makespan_s", "mean_decode_wait_ms", "mean_rendezvous_ms", "mean_trajectory_completion_s")
    names = [*keys, *(f"{key}_iqr" for key in keys[1:])]
    policies_ = json.loads(ended.stdout)["policies"]
    rows = [{key: each[key] for key in names if key in each} for each in policies_]
    return {"command": " ".join(["turnstile", *command[3:], "--repeat", str(repeats)]), "policies": rows}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--certify", type=int, metavar="RANKS", help="one large scope, in this process")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of speed")
    parser.add_argument("--walks", type=int, default=100)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a large scope may take")
    parser.add_argument("--no-spin", action="store_true")
    parser.add_argument("--real", action="store_true", help="also compare lean and fine on real ranks")
    asked = parser.parse_args()
    if asked.certify:
        print(json.dumps(certified(asked.certify)))
        return
    load = round(os.getloadavg()[0], 1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=HOUSE)
    found: dict[str, Any] = {
        "command": " ".join(["python", "bench/bench_check.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "host": f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "load_before": load,
        "unit": "CPU seconds of the process unless it says wall; scope is ranks x segments x D iterations",
        "repeats": asked.repeat,
        "speed": speed(asked.repeat, asked.seconds),
        "reduction": reduction(asked.walks),
        "policies": policies(),
        "mutants": mutants(not asked.no_spin),
        "large": in_processes(asked.sizes, asked.repeat, asked.limit),
        "lean": exchanges(4, (50, 500, 5000)),
    }
    if asked.real:
        found["lean_real"] = real(asked.repeat)
    found["load_after"] = round(os.getloadavg()[0], 1)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
