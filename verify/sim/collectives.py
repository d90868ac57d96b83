"""Simulated communicators: members meet by order of call, and a collective runs only when all of them are resident.

There is one communicator for each phase, role and group; the n-th call of one member meets the n-th call of every
other. A collective is a rendezvous (the most synchronising reading of NCCL's kernels): it holds its room on every
member from the moment it is resident there until it finishes on all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kernel.request import Phase
from kernel.topology import Role, World
from verify.sim.errors import Mismatch
from verify.sim.kernels import Kernel
from verify.sim.waits import call_site
from verify.sources import Site, place

if TYPE_CHECKING:
    from verify.sim.scheduler import Scheduler

Cost = Callable[[str, int, int], int]
"""Nanoseconds of a collective, given its operation, number of members and rows."""


class Shape(NamedTuple):
    """What members must agree on. rows: of the input (and of each member's share, where they differ)."""

    op: str
    rows: tuple[int, ...]
    stream: Phase

    def __str__(self) -> str:
        return f"{self.op} of {'+'.join(map(str, self.rows))} rows on stream {self.stream}"


class Instance:
    """One collective: the n-th of its communicator."""

    __slots__ = ("communicator", "first", "kernels", "label", "name", "number", "resident", "shape")

    def __init__(self, communicator: Communicator, number: int, shape: Shape, first: tuple[int, Site]) -> None:
        self.communicator, self.number, self.shape, self.first = communicator, number, shape, first
        self.name = f"{communicator.name} #{number}"
        self.label = f"{communicator.phase} {shape.op} {communicator.role} #{number}"
        self.kernels: dict[int, Kernel] = {}
        self.resident = 0

    def __str__(self) -> str:
        return self.name

    def joined(self, kernel: Kernel) -> None:
        """A member's kernel is resident; the last one lets all of them run."""
        self.resident += 1
        if self.resident == len(self.communicator.members):
            scheduler = self.communicator.scheduler
            duration = self.communicator.cost(self.shape.op, self.resident, sum(self.shape.rows))
            if duration:
                scheduler.alarm(scheduler.now_ns + duration, self)
            else:
                scheduler.enable(self)

    def causes(self) -> tuple[int, ...]:
        """The steps without which it could not finish."""
        return tuple(step for kernel in self.kernels.values() for step in kernel.begun)

    def act(self) -> None:
        """Finish on all members."""
        del self.communicator.open[self.number]
        kernels, self.kernels = self.kernels, {}  # so that both can go
        for member in self.communicator.members:
            kernel = kernels[member]
            kernel.queue.chip.retire(kernel)

    def missing(self) -> str:
        """Members that are not resident, and why, in words."""
        reasons = []
        for member in self.communicator.members:
            kernel = self.kernels.get(member)
            if kernel is None:
                reasons.append(f"rank {member} (not enqueued there)")
            elif not kernel.resident:
                reasons.append(f"rank {member} ({kernel.queue.why(kernel)})")
        return ", ".join(reasons) or "its time to pass"


class Communicator:
    """The collectives of one phase over one group."""

    def __init__(
        self, phase: Phase, role: Role, members: tuple[int, ...], scheduler: Scheduler, cost: Cost
    ) -> None:
        self.phase, self.role, self.members, self.scheduler, self.cost = phase, role, members, scheduler, cost
        self.open: dict[int, Instance] = {}
        self._calls = dict.fromkeys(members, 0)
        self.name = f"{phase} {role}{{{','.join(map(str, members))}}}"

    def __str__(self) -> str:
        return self.name

    def kernel(self, rank: int, shape: Shape, weight: int) -> Kernel:
        """The kernel of `rank`'s next call. Raises Mismatch when an earlier member's call is another collective."""
        number = self._calls[rank]
        instance = self.open.get(number)
        if instance is None:
            instance = self.open[number] = Instance(self, number, shape, (rank, call_site()))
        elif instance.shape != shape:
            first, where = instance.first
            raise Mismatch(
                f"call {number} on {self} is {shape} at {place(call_site())} on rank {rank}, but {instance.shape} at"
                f" {place(where)} on rank {first}: all members make the same calls in the same order"
            )
        self._calls[rank] = number + 1
        kernel = Kernel(instance.label, weight, meeting=instance)
        instance.kernels[rank] = kernel
        return kernel


class Communicators:
    """All communicators of a simulated world."""

    def __init__(self, world: World, scheduler: Scheduler, cost: Cost) -> None:
        self.world = world
        self._of: dict[tuple[Phase, Role, int], Communicator] = {}
        for phase in Phase:
            for role in Role:
                for group in world.groups[world.canonical(role)]:
                    same = self._of.get((phase, world.canonical(role), group[0]))
                    communicator = same or Communicator(phase, role, group, scheduler, cost)
                    for rank in group:
                        self._of[phase, role, rank] = communicator

    def of(self, phase: Phase, role: Role, rank: int) -> Communicator:
        """The communicator that `rank` uses for `role` in `phase`; roles with equal groups share one."""
        return self._of[phase, role, rank]
