"""One rank of a turnstile run: the real rank, planner, policy and rendezvous, with a model that only moves rows.

`cycles` rounds with an open P epoch and a D iteration are counted, on each of which the host arrives at the rendezvous
up to skew_ms late. slow_ms: device time of each P segment.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from hazard_common import begin, end

from kernel.cache import KVCache
from kernel.comm.rendezvous import SharedRendezvous
from kernel.comm.shared import Arena
from kernel.inbox import Inbox, Stop, Submit
from kernel.journal import Journal
from kernel.rank import Ports, Rank
from kernel.record import NullRecorder
from kernel.request import Phase, Request, Sampled, SamplingParams
from kernel.sched import registry
from kernel.sched.policy import Limits
from kernel.topology import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.ports import Step
    from kernel.request import Row

LAYERS, PROMPT = 8, 256
HIDDEN = {"cuda": 2048, "cpu": 32}


class Rows:
    """A model that runs its program on rows of ones: each sum over two ranks is halved, so that they stay ones."""

    layers = LAYERS

    def __init__(self, device: torch.device, slow_ms: float) -> None:
        self._device, self._slow_ms = device, slow_ms
        self._weights = torch.eye(HIDDEN[device.type], device=device)
        self.last: dict[Phase, torch.Tensor] = {}

    async def forward(self, step: Step, rows: Sequence[Row]) -> list[Sampled | None]:
        """See `kernel.ports.Model`."""
        count = sum(row.fed for row in rows)
        x = torch.ones(count, len(self._weights), device=self._device)
        for layer in range(LAYERS):
            await step.boundary(layer)
            if layer == 0:
                x = step.embed(x)
            x = self._compute(step.phase, x)
            full = step.gather(layer, x)
            x = step.scatter(layer, self._compute(step.phase, full) / 2)
        self.last[step.phase] = step.head(x)
        return [Sampled(0, 0.0) if row.sample is not None else None for row in rows]

    def _compute(self, phase: Phase, x: torch.Tensor) -> torch.Tensor:
        if phase is Phase.P and self._slow_ms:
            if self._device.type == "cuda":
                torch.cuda._sleep(int(self._slow_ms * 0.9e6))  # half of it in clock cycles, at about 1.8 GHz
            else:
                time.sleep(self._slow_ms / 2e3)
        for _ in range(4 if phase is Phase.P and self._device.type == "cuda" else 1):
            x = x @ self._weights
        return x

    def reload(self, path: str) -> None:
        """Not here."""
        raise NotImplementedError


class Skewed:
    """A rendezvous whose rank comes late before D."""

    def __init__(self, inner: SharedRendezvous, chance: random.Random, skew_ms: float) -> None:
        self._inner, self._chance, self._skew_s = inner, chance, skew_ms / 1e3

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        """See `kernel.ports.Rendezvous`."""
        if tag == "pre-d" and self._skew_s:
            await asyncio.sleep(self._chance.random() * self._skew_s)
        return await self._inner.exchange(tag, payload)

    def close(self) -> None:
        """See `kernel.ports.Rendezvous`."""
        self._inner.close()


class Counting:
    """A policy and its gate, counted. It stops the rank after `cycles` rounds in which both phases took part."""

    def __init__(self, inner: Any, inbox: Inbox, cycles: int) -> None:
        self._inner, self._inbox, self._target = inner, inbox, cycles
        self._gate: Any = None
        self.cycles = self.early = 0
        self.device: Any = None
        self._newest: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def see(self, event: Any) -> Any:
        """P's newest submission."""
        self._newest = event
        return event

    async def turn(self, gate: Any) -> None:
        """See `kernel.sched.policy.Policy`."""
        both = gate.p_active and gate.d_ready
        await self._inner.turn(_Observed(gate, self))
        if both and self.cycles < self._target:
            self.cycles += 1
            if self.cycles == self._target:
                self._inbox.put(Stop())

    def acknowledged(self, gate: Any) -> None:
        """All ranks have launched D; is P still at work here?"""
        if gate.p_active and gate.d_ready and self._newest is not None and not self._newest.done():
            self.early += 1


class _Observed:
    def __init__(self, gate: Any, counting: Counting) -> None:
        self._gate, self._counting = gate, counting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    async def rendezvous(self, tag: str) -> None:
        await self._gate.rendezvous(tag)
        if tag == "post-d":
            self._counting.acknowledged(self._gate)


def requests(replicas: int, cycles: int) -> list[Submit]:
    """For each replica one long decode, and prompts of one epoch each, enough for all cycles."""
    found = []
    for replica in range(replicas):
        number = replica * 100_000
        long = SamplingParams(max_tokens=4 * cycles + 200, ignore_eos=True)
        found.append(Submit(Request(number, number, replica, tuple(range(16)), long)))
        for index in range(1, cycles // (LAYERS - 1) + 8):
            once = SamplingParams(max_tokens=1, ignore_eos=True)
            found.append(Submit(Request(number + index, number + index, replica, tuple(range(PROMPT)), once)))
    return found


async def main(config: dict[str, Any]) -> dict[str, Any]:
    rank, world = config["rank"], World(2, adp=2)
    arena = Arena.attach(config["arena"], rank)
    device: Any
    if config["device"] == "cuda":
        import torch.distributed as dist

        from kernel.comm.nccl import NcclWorld
        from kernel.device.cuda import CudaDevice

        store = dist.TCPStore("127.0.0.1", config["port"], 2, rank == 0)
        nccl = NcclWorld(world, rank, store, rank, max_ctas=config["max_ctas"])
        nccl.warm((torch.float32,))
        device = CudaDevice(rank, rank, {phase: nccl.collectives(phase) for phase in Phase})
        place = device.torch_device
    else:
        from kernel.comm.shm_collectives import SharedCollectives
        from kernel.device.cpu import CpuDevice

        device, place = CpuDevice(rank, {p: SharedCollectives(arena, p, rank) for p in Phase}), torch.device("cpu")
    limits = Limits(2, 2, LAYERS, prefill_tokens=PROMPT, rows=4, buckets=(1, 2, 4))
    inbox = Inbox()
    policy: Any = Counting(registry.create("fine", limits), inbox, config["cycles"])
    stream = device.stream(Phase.P)
    submit = stream.submit
    stream.submit = lambda work, label: policy.see(submit(work, label))
    model = Rows(place, config["slow_ms"])
    rendezvous = Skewed(SharedRendezvous(arena, rank), random.Random(f"{config['seed']} {rank}"), config["skew_ms"])
    blocks = (4 * config["cycles"] + 216) // 16 + 200
    ports = Ports(
        device=device,
        rendezvous=rendezvous,
        model=model,
        cache=KVCache(blocks, 16),
        inbox=inbox,
        journal=Journal(NullRecorder()),
        emit=lambda output: None,
        use_policy=lambda entry: policy,
    )
    inbox.put(*requests(2, config["cycles"]))
    engine = Rank(rank, world, limits, policy, ports)
    report: dict[str, Any] = {"rank": rank, "seed": config["seed"]}
    begun = time.monotonic()
    if config["profile"]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            await engine.run()
            torch.cuda.synchronize()
        report |= overlaps(found)
    else:
        await engine.run()
    report["took_s"] = round(time.monotonic() - begun, 3)
    report |= {"cycles": policy.cycles, "acknowledged_early": policy.early}
    if place.type == "cuda":
        torch.cuda.synchronize()
    report["right"] = all(bool((x == 1).all()) for x in model.last.values()) and len(model.last) == 2
    await device.close()
    return report


def overlaps(found: Any) -> dict[str, Any]:
    """Milliseconds in which kernels ran at once, from CUPTI: the registered pair, and P's computation with D."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    streams: dict[str, set[int]] = defaultdict(set)
    for event in found.profiler.kineto_results.events():
        name, stream = event.name(), int(event.device_resource_id())
        if "ncclDevKernel" in name:
            kind = "P" if "AllReduce" in name else "D"
        elif event.device_type().name == "CUDA" and "nccl" not in name.lower() and "Mem" not in name:
            kind = f"compute on {stream}"
        else:
            continue
        spans[kind].append((event.start_ns(), event.start_ns() + event.duration_ns()))
        streams[kind].add(stream)
    decode = streams["D"]
    prefill = [span for kind, part in spans.items() if kind[0] == "c" and not streams[kind] & decode for span in part]
    on_d = [span for kind, part in spans.items() if kind[0] == "c" and streams[kind] & decode for span in part]
    return {
        "registered_ms": shared_ms(spans["P"], spans["D"]),
        "compute_ms": shared_ms(prefill, [*spans["D"], *on_d]),
        "routed_on_decode": bool(streams["P"]) and streams["P"] == streams["D"],
        "kernels": {kind: len(part) for kind, part in spans.items()},
    }


def shared_ms(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> float:
    """Time in which a span of both runs."""
    points: list[tuple[int, int, int]] = []
    for which, part in enumerate((first, second)):
        for start, stop in part:
            points += [(start, 1, which), (stop, -1, which)]
    running, since, total = [0, 0], 0, 0
    for at, step, which in sorted(points):
        if all(running):
            total += at - since
        since = at
        running[which] += step
    return round(total / 1e6, 4)


if __name__ == "__main__":
    end(asyncio.run(main(begin())))
