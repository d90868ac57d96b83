"""One rank of a crossing: P's all-reduce and D's graph of an all-gather and a reduce-scatter, on two communicators.

The world is that of the paper's hazard, adp2 and ETP2: both phases' collectives have the members {0, 1}.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hazard_common import Occupier, begin, end

from kernel.errors import RankLost
from kernel.program import Call, Op, Site
from kernel.request import Phase
from kernel.topology import Role, World

CALL = Call(0, Site.GATHER, 0, Op.ALL_REDUCE, Role.TP, routed=True)


async def main(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from kernel.comm.nccl import NcclWorld
    from kernel.device.cuda import CudaDevice

    rank, rounds = config["rank"], config["rounds"]
    store = dist.TCPStore("127.0.0.1", config["port"], 2, rank == 0)
    nccl = NcclWorld(World(2, adp=2), rank, store, rank, max_ctas=config["max_ctas"])
    nccl.warm((torch.float32,))
    device = CudaDevice(rank, rank, {phase: nccl.collectives(phase) for phase in Phase})
    p, d, route = device.stream(Phase.P), device.stream(Phase.D), device.route()
    mine = torch.ones(config["elements"] // 2, device=device.torch_device)
    half = [mine.numel()] * 2

    def decode() -> Any:
        full = device.collectives(Phase.D).all_gather(Role.TP, mine)
        return device.collectives(Phase.D).reduce_scatter(Role.TP, full, half)

    x = torch.ones(config["elements"], device=device.torch_device)

    def reduce() -> Any:
        return device.collectives(Phase.P).all_reduce(Role.TP, x)

    def prefill() -> Any:
        with device.scope(Phase.P):
            return route.run(CALL, reduce) if config["routed"] else reduce()

    def submit_p(number: int) -> Any:
        if config["routed"]:
            route.reserve([CALL])
        return p.submit(prefill, f"P e{number} [0,1)")

    with device.scope(Phase.D):
        decode()
        torch.cuda.synchronize()
        graph = device.graph(Phase.D)
        graph.capture(decode)
    # Events, memory and kernels of all rounds exist before the window: making them can wait for a busy device.
    warm = [each for number in range(rounds) for each in (d.submit(graph.replay, "D warm"), submit_p(number))]
    for event in warm:
        await event.wait()
    del warm, event
    occupier = Occupier(config["free_sms"], config["window_s"] + 20.0)
    meet(store, "ready", rank)
    if config["occupied"]:
        occupier.hold()
    meet(store, "occupied", rank)

    def submit_d(number: int) -> Any:
        return d.submit(graph.replay, f"D {number}")

    first, second = (submit_p, submit_d) if rank == 0 and config["order"] == "opposite" else (submit_d, submit_p)
    events = []
    enqueued = time.monotonic()
    for number in range(rounds):
        events.append(first(number))
        await asyncio.sleep(0.002)  # the first of the pair is on the device before the second
        events.append(second(number))

    def done() -> int:
        return sum(event.done() for event in events)

    begun = time.monotonic()
    enqueued = begun - enqueued
    half_way = -1
    while time.monotonic() < begun + config["window_s"] and done() < len(events):
        if half_way < 0 and time.monotonic() > begun + config["window_s"] / 2:
            half_way = done()
        await asyncio.sleep(0.01)
    inside = done()
    report: dict[str, Any] = {
        "rank": rank,
        "inside": inside,
        "moved_late": half_way >= 0 and inside != half_way,
        "occupied_to_the_end": occupier.held if config["occupied"] else None,
        "enqueue_ms": round(enqueued * 1e3, 2),
        "took_ms": round((time.monotonic() - begun) * 1e3, 2),
    }
    meet(store, "window", rank)
    if config["occupied"]:
        occupier.release()
    for _ in range(300):
        if done() == len(events):
            break
        await asyncio.sleep(0.01)
    report["after"] = done()
    meet(store, "end", rank)
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await device.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    report["lost"] = sum(isinstance(each, RankLost) for each in outcomes)
    # Both waiters are through: the GPU has let go of everything, also of what hung.
    report["freed"] = all(device.stream(phase).ended.done() for phase in Phase)
    return report


def meet(store: Any, name: str, rank: int) -> None:
    """Both ranks are here."""
    store.set(f"{name} {rank}", "1")
    store.wait([f"{name} 0", f"{name} 1"])


if __name__ == "__main__":
    end(asyncio.run(main(begin())))
