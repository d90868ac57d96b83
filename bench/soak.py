"""A long run of everything that could leak or jam, into bench/results/soak.json: `python bench/soak.py --minutes 30`.

Episodes follow each other on one engine: storms of aborts, sessions closed in the middle of prefill, turns that want
several times the KV pool together, hundreds of tiny turns at once, conversations, pauses and flushes. After each one
nothing may be left: a turn that takes the whole pool of a replica must run, a known prompt must give its first answer
again, and processes must hold the descriptors and threads they began with. Memory of every rank is sampled, and a line
is fitted to it after a fifth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel.request import SamplingParams
from kernel.topology import World
from models.tiny import write_checkpoint
from rollout.engine import Engine
from rollout.ranks.launcher import Launcher
from rollout.report import files as report_files

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from rollout.ranks.nursery import Nursery

RESULTS: Final = Path(__file__).parent / "results" / "soak.json"
WORLD: Final = World(4, 2, 4)
POOL: Final = 1024
"""KV tokens of a replica."""
PROBE: Final = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
VOCABULARY: Final = 256
EVERY_S: Final = 5.0
SETTLED: Final = 0.2
"""Of the time, before memory counts."""


@dataclass
class Sample:
    """A process at a moment. seconds: since the start; mib: its own memory; shared: what it touched of the world's."""

    seconds: float
    mib: float
    shared: float
    descriptors: int
    threads: int


@dataclass
class Soak:
    """What happened so far. processes: those of the ranks. answer: the probe's first one."""

    engine: Engine
    rng: random.Random
    processes: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    samples: list[list[Sample]] = field(default_factory=list)
    answer: tuple[int, ...] = ()
    began: float = field(default_factory=time.monotonic)

    # -- episodes -------------------------------------------------------------------------------------------------

    async def storm(self) -> None:
        """Turns that are aborted, and sessions that are closed, at any moment of their lives."""

        async def one() -> None:
            session = self.engine.session()
            turn = session.generate(self._prompt(20, 200), SamplingParams(max_tokens=self.rng.randint(1, 40)))
            await asyncio.sleep(self.rng.random() ** 3 * 0.2)
            if self.rng.random() < 0.5:
                turn.abort()
                done = await turn
                self._require(len(done.tokens) <= turn.request.params.max_tokens, "aborted turns end")
                self.counts["aborted" if done.finish_reason == "abort" else "finished before the abort"] += 1
                await session.close()
            else:
                await session.close()
                self.counts["closed in flight" if not turn.ended else "closed"] += 1
                await turn

        await self._all(one() for _ in range(24))

    async def exhaustion(self) -> None:
        """Turns that want several times the pool."""

        async def one() -> None:
            session = self.engine.session()
            asked = self.rng.randint(40, 120)
            params = SamplingParams(max_tokens=asked, ignore_eos=True)
            done = await session.generate(self._prompt(100, 400), params)
            self._require(len(done.tokens) == asked, "turns that wait for the pool end whole")
            await session.close()
            self.counts["waited for the pool"] += 1

        await self._all(one() for _ in range(16))

    async def tiny(self) -> None:
        """Hundreds of turns of a few tokens."""

        async def one() -> None:
            asked = self.rng.randint(1, 3)
            done = await self.engine.generate(self._prompt(1, 4), SamplingParams(max_tokens=asked, ignore_eos=True))
            self._require(len(done.tokens) == asked, "tiny turns end whole")
            self.counts["tiny"] += 1

        await self._all(one() for _ in range(200))

    async def conversations(self) -> None:
        """Several turns each, while the engine pauses and drops what idle sessions keep."""

        async def one() -> None:
            session = self.engine.session()
            context: list[int] = []
            for _ in range(4):
                context += self._prompt(1, 40)
                done = await session.generate(context, SamplingParams(max_tokens=20, ignore_eos=True))
                self._require(done.cached_tokens < len(context), "no turn reuses more than there was")
                context += done.tokens
            await session.close()
            self.counts["conversations"] += 1

        async def disturb() -> None:
            for _ in range(3):
                await asyncio.sleep(self.rng.random() * 0.1)
                await self.engine.pause()
                await self.engine.flush()
                await self.engine.resume()

        await self._all([*(one() for _ in range(8)), disturb()])

    # -- between them ---------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Nothing is left of what was: raises AssertionError otherwise."""
        engine = self.engine
        self._require(not engine._turns and not any(engine._load), "no turn and no session is left")
        answers = await self._on_each(PROBE, 16)
        self.answer = self.answer or answers[0]
        self._require(set(answers) == {self.answer}, "a known prompt gives its answer on every replica")
        whole = await self._on_each([3 + at % (VOCABULARY - 3) for at in range(POOL - 8)], 8)
        self._require({len(each) for each in whole} == {8}, "a turn that takes the whole pool runs")

    async def _on_each(self, prompt: Sequence[int], asked: int) -> list[tuple[int, ...]]:
        replicas = range(self.engine.world.adp)
        sessions = [self.engine.session() for _ in replicas]
        self._require({each.replica for each in sessions} == set(replicas), "sessions go round the replicas")
        params = SamplingParams(max_tokens=asked, ignore_eos=True)
        done = await asyncio.gather(*(each.generate(prompt, params) for each in sessions))
        for each in sessions:
            await each.close()
        return [each.tokens for each in done]

    def sample(self) -> None:
        """Look at the ranks' processes."""
        self.samples.append([look(pid, time.monotonic() - self.began) for pid in self.processes])

    def open_as_before(self) -> None:
        """Descriptors and threads are as many as after the first episodes."""
        first, last = self.samples[0], self.samples[-1]
        for before, now in zip(first, last, strict=True):
            self._require(now.descriptors <= before.descriptors, "ranks hold no more descriptors")
            self._require(now.threads <= before.threads, "ranks hold no more threads")

    def _prompt(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(3, VOCABULARY) for _ in range(self.rng.randint(least, most))]

    def _require(self, true: bool, what: str) -> None:
        assert true, what
        self.checks[what] += 1

    async def _all(self, some: Any) -> None:
        work: list[Coroutine[Any, Any, None]] = list(some)
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)


def look(pid: int, seconds: float) -> Sample:
    """What /proc says of a process."""
    status = dict(
        line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    )
    own, shared = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem"))
    return Sample(seconds, own, shared, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"]))


def slope(samples: Sequence[Sample]) -> float:
    """MiB an hour of the line of least squares; 0 for less than two moments."""
    mean_x = sum(each.seconds for each in samples) / max(1, len(samples))
    mean_y = sum(each.mib for each in samples) / max(1, len(samples))
    spread = sum((each.seconds - mean_x) ** 2 for each in samples)
    return 3600 * sum((s.seconds - mean_x) * (s.mib - mean_y) for s in samples) / spread if spread else 0.0


def halved(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The later half: caches of shapes fill up, a leak goes on."""
    return samples[len(samples) // 2 :]


async def soak(
    goes_on: Callable[[Soak], bool], seed: int = 0, nursery: Nursery | None = None, world: World = WORLD
) -> Soak:
    """Episodes as long as `goes_on` says. Raises AssertionError for what is not as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "model", max_positions=4096)
        async with Engine(
            model, world, kv_tokens=POOL, prefill_tokens=96, rows=12, out=Path(folder) / "run", record_events=1 << 14,
            nursery=nursery,
        ) as engine:  # fmt: skip
            run = Soak(engine, random.Random(seed))
            assert isinstance(engine._launcher, Launcher)
            run.processes = [each.process.pid for each in engine._launcher._ranks]
            episodes = (run.storm, run.exhaustion, run.tiny, run.conversations)
            for episode in episodes:  # what is made at first use is made
                await episode()
                await run.check()
            run.sample()
            while goes_on(run):
                episode = run.rng.choice(episodes)
                await episode()
                await run.check()
                run.counts[f"episodes of {episode.__name__}"] += 1
                if time.monotonic() - run.began - run.samples[-1][0].seconds >= EVERY_S:
                    run.sample()
                    run.open_as_before()
            run.sample()
            run.open_as_before()
    return run


def settled(run: Soak, rank: int) -> list[Sample]:
    """Samples of a rank that count."""
    start = SETTLED * run.samples[-1][0].seconds
    return [each[rank] for each in run.samples if each[rank].seconds >= start]


def main() -> int:
    """Run, print and write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    run = asyncio.run(soak(lambda run: time.monotonic() - run.began < 60 * given.minutes, given.seed))
    ranks = [
        {
            "rank": rank,
            "mib_first": round(settled(run, rank)[0].mib, 2),
            "mib_last": round(run.samples[-1][rank].mib, 2),
            "slope_mib_per_hour": round(slope(settled(run, rank)), 3),
            "second_half_mib_per_hour": round(slope(halved(settled(run, rank))), 3),
            "shared_mib_last": round(run.samples[-1][rank].shared, 2),
            "descriptors": run.samples[-1][rank].descriptors,
            "threads": run.samples[-1][rank].threads,
            "samples": [[round(each[rank].seconds, 1), round(each[rank].mib, 2)] for each in run.samples],
        }
        for rank in range(WORLD.size)
    ]
    report_files.write_json(
        given.out,
        {
            **report_files.surroundings(),
            "command": ["python", *sys.argv],
            "minutes": given.minutes, "seed": given.seed, "world": str(WORLD), "kv_tokens": POOL,
            "counts": dict(run.counts), "checks": dict(run.checks), "ranks": ranks,
        },
    )  # fmt: skip
    for rank in ranks:
        print(
            f"rank {rank['rank']}: {rank['mib_first']} MiB, then {rank['mib_last']} MiB,"
            f" {rank['slope_mib_per_hour']:+} MiB an hour, {rank['second_half_mib_per_hour']:+} in the second half;"
            f" {rank['shared_mib_last']} MiB of shared memory touched"
        )
    print(json.dumps({"counts": dict(run.counts), "checks": dict(run.checks)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
