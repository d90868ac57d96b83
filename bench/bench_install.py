"""What `turnstile.record.install` costs a training loop, and how long `turnstile hang --pid` takes to its report.

The loop: a small model, two ranks on gloo, gradients averaged by an all-reduce for each tensor, and one of the loss.
Runs with and without a record take turns in the same two processes, so that whatever else the machine does meets both;
the overhead is the median of the pairs' ratios. A call by itself is measured on torch's fake backend, which does
nothing. The report: from the start of the command to its end, on jobs that hang, one of them with a rank that holds the
interpreter lock. Writes bench/results/install.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).resolve().parent.parent
RESULTS = HOUSE / "bench" / "results" / "install.json"
STEPS, PAIRS, WARM = 40, 30, 20
WIDTH, BATCH = 512, 256
HANGS = 5


def train(rank: int, home: str, out: Any) -> None:
    """One rank: PAIRS times a stretch of STEPS steps without and with a record, in turns."""
    import torch
    import torch.distributed as dist

    from turnstile import record

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{home}/store", 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    layers: list[Any] = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def stretch(steps: int) -> tuple[float, float]:
        dist.barrier()
        wall, own = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimiser.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            works = [dist.all_reduce(each.grad, async_op=True) for each in model.parameters()]
            for work in works:
                work.wait()
            optimiser.step()
            dist.all_reduce(loss.detach())
        return (time.perf_counter() - wall) / steps, (time.process_time() - own) / steps

    stretch(WARM)
    pairs = []
    for number in range(PAIRS):
        figures: dict[bool, tuple[float, float]] = {}
        for recorded in (number % 2 == 0, number % 2 == 1):
            if recorded:
                with record.install(f"{home}/run", rank=rank):
                    figures[True] = stretch(STEPS)
            else:
                figures[False] = stretch(STEPS)
        pairs.append({"without": figures[False], "with": figures[True]})
    out.put((rank, pairs))
    out.close()
    out.join_thread()
    dist.destroy_process_group()


def loop() -> dict[str, Any]:
    """Both ranks' pairs, in milliseconds a step, and the ratios of their wall times."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as home:
        out = context.Queue()
        ranks = [context.Process(target=train, args=(rank, home, out)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        try:
            found = dict(out.get(timeout=900) for _ in ranks)
        finally:
            for process in ranks:
                process.join(30)
                process.kill()
    ratios = [pair["with"][0] / pair["without"][0] - 1 for pairs in found.values() for pair in pairs]
    work = [pair["with"][1] / pair["without"][1] - 1 for pairs in found.values() for pair in pairs]
    steps = {side: [1e3 * pair[side][0] for pair in found[0]] for side in ("without", "with")}
    return {
        "what": f"4 linear layers of {WIDTH}, batch {BATCH}, 2 ranks on gloo, 9 all-reduces a step",
        "steps_a_run": STEPS,
        "pairs": PAIRS,
        "ms_a_step": {side: spread(values) for side, values in steps.items()},
        "overhead_of_wall_time": spread(ratios, 4),
        "overhead_of_processor_time": spread(work, 4),
    }


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    """Least, quartiles and largest."""
    low, middle, high = statistics.quantiles(values, n=4)
    figures = {"min": min(values), "lower": low, "median": middle, "upper": high, "max": max(values)}
    return {name: round(value, digits) for name, value in figures.items()}


CALL = """
import json, sys, time
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from turnstile import record
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
x, figures = torch.ones(4), {"without": [], "with": []}
def batch():
    start = time.thread_time_ns()
    for _ in range(2000):
        dist.all_reduce(x)
    return (time.thread_time_ns() - start) / 2000 / 1e3
for _ in range(30):
    figures["without"].append(batch())
    with record.install(sys.argv[1], rank=0):
        figures["with"].append(batch())
print(json.dumps(figures))
"""


def call() -> dict[str, Any]:
    """Microseconds of processor time of a blocking all_reduce on a backend that does nothing."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-W", "ignore", "-c", CALL, home]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HOUSE)
    figures = json.loads(ended.stdout)
    return {side: spread(values) for side, values in figures.items()}


def reports() -> dict[str, Any]:
    """Seconds from the start of `turnstile hang --pid` to its end, on stuck jobs that a test uses too."""
    from tests.test_hang_real import Job

    found = {}
    for name, scene, recorded in (
        ("a crossing, with a record", "crossing", True),
        ("a holder of the interpreter lock, with a record", "holds_gil", True),
        ("a holder of the interpreter lock, from stacks alone", "holds_gil", False),
    ):
        with tempfile.TemporaryDirectory() as home, Job(Path(home), scene, recorded=recorded) as job:
            job.until(lambda job=job: job.waits(0))  # type: ignore[misc]
            seconds, verdicts = [], []
            for _ in range(HANGS):
                start = time.perf_counter()
                answer = job.hang()
                seconds.append(time.perf_counter() - start)
                verdicts.append(" ".join(map(str, answer.verdict)))
            found[name] = {"seconds": [round(each, 2) for each in seconds], "verdicts": sorted(set(verdicts))}
    return found


def main() -> None:
    """Measure, print and write."""
    load = os.getloadavg()[0]
    results = {"loop": loop(), "call_us": call(), "hang_report": reports()}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    import torch

    found = {
        "command": "python bench/bench_install.py",
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": f"{platform.machine()} {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "remark": "a shared machine: other jobs ran meanwhile, as the load says; two ranks on two cores",
        "results": results,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
