"""The turnstile protocol (paper section 4) in stock asyncio primitives, for checkers that know nothing of this project.

It imports nothing but asyncio, so that it runs in any checker's own environment. Hosts and device streams are tasks of
one event loop; a rank has a host task for P, one for D, and a task for each stream that carries communication. The
world is the one of `verify`'s models: P is one all-reduce a segment over all ranks, D one all-gather an iteration over
its data-parallel group ({0,2} and {1,3} with four ranks, all ranks with fewer), the span K is one boundary, and every
rank takes part in every round. A collective is a meeting of its members' streams, and resident until all are there.

    turnstile   boundary, pre-d, D's launch, post-d, permit; P's all-reduce is routed to D's stream
    free        no turnstile and no route: two streams, and one slot on the device for a communication kernel

`turnstile` never deadlocks; `free` does as soon as one rank's slot holds P's kernel and a peer's holds D's.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

VARIANTS = ("turnstile", "free")


class Meeting:
    """Of `size` members: a rendezvous of hosts, or a collective of streams.

    It is asyncio.Barrier written out, because frontrun does not see what happens inside that one.
    """

    def __init__(self, size: int) -> None:
        self.missing = size
        self.met = asyncio.Event()

    async def join(self) -> None:
        """Arrive, and wait for the others."""
        self.missing -= 1
        if self.missing == 0:
            self.met.set()
        await self.met.wait()


class Kernel:
    """One rank's part of a collective."""

    def __init__(self) -> None:
        self.collective: Meeting | None = None
        self.enqueued = asyncio.Event()
        self.finished = asyncio.Event()


class Stream:
    """A FIFO of exactly `length` communication kernels."""

    def __init__(self, length: int) -> None:
        self.kernels = [Kernel() for _ in range(length)]
        self.tail = 0

    def enqueue(self, collective: Meeting) -> Kernel:
        """Never blocks: the launch queue is as long as the program."""
        kernel = self.kernels[self.tail]
        self.tail += 1
        kernel.collective = collective
        kernel.enqueued.set()
        return kernel

    async def run(self, slot: asyncio.Lock | None) -> None:
        """What the device does: each kernel is resident, in `slot` if there are several streams, until it finished."""
        for kernel in self.kernels:
            await kernel.enqueued.wait()
            assert kernel.collective is not None
            async with AsyncExitStack() as resident:
                if slot is not None:
                    await resident.enter_async_context(slot)
                await kernel.collective.join()
            kernel.finished.set()


class Rank:
    """One rank's state. With one communication stream its FIFO is the slot, so no lock is needed there."""

    def __init__(self, segments: int, iterations: int, *, routed: bool) -> None:
        self.launch = Stream(iterations + segments if routed else iterations)
        self.background = None if routed else Stream(segments)
        self.slot = None if routed else asyncio.Lock()
        self.reached = [asyncio.Event() for _ in range(segments + 1)]
        self.permits = [asyncio.Event() for _ in range(segments)]
        self.complete = False


class Protocol:
    """One epoch of P with `segments` boundary intervals beside `iterations` of D; a fresh one for each execution."""

    def __init__(self, ranks: int, segments: int, iterations: int, variant: str) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r} is none of {', '.join(VARIANTS)}")
        self.segments, self.iterations, self.turnstile = segments, iterations, variant == "turnstile"
        self.ranks = [Rank(segments, iterations, routed=self.turnstile) for _ in range(ranks)]
        groups = 2 if ranks == 4 else 1
        self.all_reduce = [Meeting(ranks) for _ in range(segments)]
        self.all_gather = [[Meeting(ranks // groups) for _ in range(groups)] for _ in range(iterations)]
        self.pre_d = [Meeting(ranks) for _ in range(segments + 1)]
        self.post_d = [Meeting(ranks) for _ in range(segments + 1)]

    def actors(self) -> list[Callable[[], Coroutine[object, object, None]]]:
        """Everything that runs concurrently, each to be called once."""
        found: list[Callable[[], Coroutine[object, object, None]]] = []
        host_p, host_d = (self.prefill, self.decode) if self.turnstile else (self.free_prefill, self.free_decode)
        for number, rank in enumerate(self.ranks):
            found += [partial(host_p, number), partial(host_d, number), partial(rank.launch.run, rank.slot)]
            if rank.background is not None:
                found.append(partial(rank.background.run, rank.slot))
        return found

    async def main(self) -> None:
        """All actors as tasks. They are awaited in turn, since a TaskGroup's callbacks would be choices too."""
        tasks = [asyncio.ensure_future(actor()) for actor in self.actors()]
        for task in tasks:
            await task

    async def prefill(self, number: int) -> None:
        """Stops at every boundary until the permit lies beyond it; the last segment reports completion."""
        rank = self.ranks[number]
        for boundary in range(self.segments):
            rank.reached[boundary].set()
            await rank.permits[boundary].wait()
            rank.launch.enqueue(self.all_reduce[boundary])
        rank.complete = True
        rank.reached[self.segments].set()

    async def decode(self, number: int) -> None:
        """A round is: boundary, pre-d, launch, post-d, permit. The round that finds P complete closes the epoch."""
        rank, turn, complete = self.ranks[number], 0, False
        while not complete:
            await rank.reached[turn].wait()
            complete = rank.complete  # once a round, while P is stopped
            await self.pre_d[turn].join()
            launched = self.launch(number, turn) if turn < self.iterations else None
            await self.post_d[turn].join()
            if not complete:
                rank.permits[turn].set()
            if launched is not None:
                await launched.finished.wait()
            turn += 1
        for iteration in range(turn, self.iterations):
            await self.launch(number, iteration).finished.wait()

    async def free_prefill(self, number: int) -> None:
        """Enqueues all of P at once and waits for its end."""
        background = self.ranks[number].background
        assert background is not None
        for collective in self.all_reduce:
            kernel = background.enqueue(collective)
        await kernel.finished.wait()

    async def free_decode(self, number: int) -> None:
        """One iteration after the other."""
        for iteration in range(self.iterations):
            await self.launch(number, iteration).finished.wait()

    def launch(self, number: int, iteration: int) -> Kernel:
        """D's graph launch, which is its all-gather."""
        groups = self.all_gather[iteration]
        return self.ranks[number].launch.enqueue(groups[number % len(groups)])
