"""A device job of `tests.statespace` as coroutines on the simulated device, so that the explorer can be compared."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests import statespace
from verify.sim.collectives import Communicator, Shape
from verify.sim.device import SimEvent
from verify.sim.kernels import Chip, Queue
from verify.sim.scheduler import Scheduler
from verify.sim.waits import Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.explore.lanes import LaneLoop
    from verify.sim.scheduler import Choose
    from verify.sim.trace import Trace


class Meeting:
    """A barrier of host threads, for which to come and to wait are facts."""

    def __init__(self, size: int, trace: Trace) -> None:
        self.size, self.trace = size, trace
        self.came: list[int] = []
        self.waiters: list[Wait] = []

    async def __call__(self) -> None:
        self.came.append(self.trace.now)
        waiter = Wait()
        self.waiters.append(waiter)
        if len(self.came) == self.size:
            for each in self.waiters:
                each.causes = tuple(self.came)
                each.set_result(None)
        await waiter


class World:
    """The ranks, devices and collectives of a job."""

    def __init__(self, job: statespace.Job, choose: Choose | None, trace: Trace, loop: Callable[..., LaneLoop]) -> None:
        self.scheduler = Scheduler(choose)
        self.scheduler.trace = trace
        ops = [(rank, op) for rank, each in enumerate(job.ranks) for thread in each.threads for op in thread]
        members: dict[str, set[int]] = {}
        for rank, op in ops:
            if isinstance(op, statespace.Enqueue) and op.instance is not None:
                members.setdefault(op.instance, set()).add(rank)
        self.ended = {name: SimEvent(name, self.scheduler) for name in members}
        self.collectives = {
            name: Communicator("c", name, tuple(sorted(who)), self.scheduler, lambda *_: 0)  # type: ignore[arg-type]
            for name, who in members.items()
        }
        names = {op.name for _, op in ops if isinstance(op, statespace.Barrier)}
        self.barriers = {
            name: Meeting(sum(isinstance(op, statespace.Barrier) and op.name == name for _, op in ops), trace)
            for name in names
        }
        self.chips: list[Chip] = []
        self.tasks: list[asyncio.Task[None]] = []
        for rank, each in enumerate(job.ranks):
            mine = [op for r, op in ops if r == rank and isinstance(op, statespace.Enqueue)]
            chip = Chip(rank, self.scheduler, each.capacity)
            chip.queues = {op.stream: Queue(chip, op.stream) for op in mine}  # type: ignore[misc, arg-type]
            chip.width = sum(max(op.weight for op in mine if op.stream == name) for name in chip.queues)
            chip.least = min((op.weight for op in mine), default=1)
            chip.idle = self.look
            self.chips.append(chip)
        self.loops = [loop(rank, self.scheduler) for rank in range(len(job.ranks))]
        for rank, each in enumerate(job.ranks):
            for number, thread in enumerate(each.threads):
                task = self.loops[rank].create_task(self.host(rank, thread), name=f"thread {number}")
                task.add_done_callback(lambda _: self.look())
                self.tasks.append(task)

    def look(self) -> None:
        if all(task.done() for task in self.tasks) and not any(chip.outstanding for chip in self.chips):
            self.scheduler.stop()

    async def host(self, rank: int, thread: tuple[statespace.Op, ...]) -> None:
        for op in thread:
            if isinstance(op, statespace.Enqueue):
                assert op.instance is not None
                self.enqueue(rank, op, op.instance)
                await asyncio.sleep(0)
            elif isinstance(op, statespace.Wait):
                await self.ended[op.instance].wait()
            else:
                await self.barriers[op.name]()

    def enqueue(self, rank: int, op: statespace.Enqueue, name: str) -> None:
        self.scheduler.trace.touch("stream", rank, op.stream)  # type: ignore[union-attr]
        kernel = self.collectives[name].kernel(rank, Shape("all_reduce", (1,), "c"), op.weight)  # type: ignore[arg-type]
        ended = self.ended[name]
        if rank == self.collectives[name].members[-1]:
            ended.returned(None)
            kernel.then = lambda: ended.finish(kernel.ended)
        self.chips[rank].queues[op.stream].append(kernel)  # type: ignore[index]

    def run(self) -> None:
        try:
            if self.tasks:
                self.scheduler.run()
        finally:
            for task in self.tasks:
                task.cancel()
            self.scheduler.drain(100_000)
            for loop in self.loops:
                loop.close()


def program(job: statespace.Job) -> Callable[..., None]:
    """What `verify.explore` runs."""

    def run(*, choose: Choose | None, trace: Trace, loop: Callable[..., Any], **_: Any) -> None:
        World(job, choose, trace, loop).run()

    return run
