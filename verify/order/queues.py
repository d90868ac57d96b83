"""What stands in every device queue: the one form that programs, records and lines of text are brought to.

    instance   a collective that happens once: (communicator, sequence number); its members each have one kernel of it
    queue      a place where one rank's kernels stand in a fixed order: a stream. A kernel with event edges to and from
               a second stream (the selective route) stands in both
    edge       one kernel of a rank before another one, where no queue says so: an event, or a wait of the host

Instances are numbers, queues are arrays of them: 4 bytes a kernel and queue. The order of what a rank issued is kept
beside its queues; it is a linear extension of them, since nothing can be queued behind what is not there yet.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from verify.blame import Class, Verdict
    from verify.events import Communicator


class Edge(NamedTuple):
    """`before` finishes before `after` starts, on `rank`. soft: only one of several such edges has to hold."""

    before: int
    after: int
    rank: int
    reason: str
    soft: bool = False


class Odd(NamedTuple):
    """A member whose call differs from the first one of its instance."""

    instance: int
    rank: int
    label: str


class End(NamedTuple):
    """Why a rank calls nothing more: what that makes of a call that it misses, and in words."""

    cls: Class
    text: str


@dataclass
class Queue:
    """The calls of one stream of a rank, in order. sites: number of each one's call site, or empty."""

    rank: int
    name: str
    calls: array[int] = field(default_factory=lambda: array("i"))
    sites: array[int] = field(default_factory=lambda: array("i"))


@dataclass
class Orders:
    """All queues of all ranks.

    communicators: by number; those of one rank's point of view are merged by name and members. comm, seq: of each
    instance. shape: number of the set of queues that it stands in, see `shapes`. label: what is called, of the first
    member that came; `odd` are those that call something else under the same number. host: instances that need no room
    on a device. weights: room that a kernel of each communicator takes. issued: rank -> its instances as the host
    issued them. waits: rank -> those that its hosts wait for, if they are kept. open: instances that some members may
    have called out of sight (before a ring's oldest event, or after the end of a run that was cut off): judged as far
    as they are seen. absent: members that never call an instance, beyond what its shape shows (`absentees`). ends: how
    ranks that stop early stop. found: faults that show while reading. racing: ranks whose threads race for the order.
    roles: names of queues mean the same on all ranks. scope: in words.
    """

    communicators: list[Communicator] = field(default_factory=list)
    queues: list[Queue] = field(default_factory=list)
    comm: array[int] = field(default_factory=lambda: array("i"))
    seq: array[int] = field(default_factory=lambda: array("q"))
    label: list[str] = field(default_factory=list)
    shape: array[int] = field(default_factory=lambda: array("i"))
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    issued: dict[int, array[int]] = field(default_factory=dict)
    waits: dict[int, list[int]] = field(default_factory=dict)
    odd: list[Odd] = field(default_factory=list)
    host: set[int] = field(default_factory=set)
    weights: list[int] = field(default_factory=list)
    sites: list[str] = field(default_factory=lambda: [""])
    open: set[int] = field(default_factory=set)
    absent: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    found: list[Verdict] = field(default_factory=list)
    racing: tuple[int, ...] = ()
    roles: bool = True
    scope: str = ""

    @property
    def kernels(self) -> int:
        """Calls of all ranks together."""
        return sum(map(len, self.issued.values()))

    def name(self, instance: int) -> str:
        """`AR P.TP 17`."""
        label = self.label[instance] if self.label else ""
        return f"{label} {self.communicators[self.comm[instance]]} {self.seq[instance]}".lstrip()

    def weight(self, instance: int) -> int:
        """Room that a kernel of the instance takes on a device."""
        return 0 if instance in self.host else self.weights[self.comm[instance]]

    def ranks_of(self, instance: int) -> tuple[int, ...]:
        """Ranks that call it, sorted."""
        return tuple(sorted({self.queues[place].rank for place in self.shapes[self.shape[instance]]}))

    def site(self, queue: int, position: int) -> str:
        """Where the program under test made a call, "" where that is not known."""
        sites = self.queues[queue].sites
        return self.sites[sites[position]] if sites else ""

    def queues_of(self) -> dict[int, list[int]]:
        """Rank -> its queues."""
        found: dict[int, list[int]] = {rank: [] for rank in sorted(self.issued)}
        for number, queue in enumerate(self.queues):
            found.setdefault(queue.rank, []).append(number)
        return found

    def device_queues(self) -> list[Queue]:
        """Each rank's kernels in the order of issue: the only queue of a device that runs one kernel at a time."""
        return [
            Queue(rank, "", array("i", (each for each in calls if each not in self.host)) if self.host else calls)
            for rank, calls in self.issued.items()
        ]

    def place(self) -> None:
        """Find the shapes from the queues. For whoever filled the queues call by call."""
        places: list[list[int]] = [[] for _ in self.comm]
        for number, queue in enumerate(self.queues):
            for instance in queue.calls:
                places[instance].append(number)
        known: dict[tuple[int, ...], int] = {}
        self.shape = array("i", (known.setdefault(tuple(each), len(known)) for each in places))
        self.shapes = list(known)


def absentees(orders: Orders) -> dict[int, tuple[int, ...]]:
    """Instance -> members that never call it, except for open ones."""
    lacking: dict[tuple[int, int], tuple[int, ...]] = {}
    for comm, shape in set(zip(orders.comm, orders.shape, strict=True)):
        there = {orders.queues[place].rank for place in orders.shapes[shape]}
        if missing := set(orders.communicators[comm].members) - there:
            lacking[comm, shape] = tuple(sorted(missing))
    found = dict(orders.absent)
    if lacking:
        for instance, key in enumerate(zip(orders.comm, orders.shape, strict=True)):
            if key in lacking and instance not in orders.open:
                found[instance] = tuple(sorted({*lacking[key], *found.get(instance, ())}))
    return found


class Builder:
    """Fills `Orders` call by call, in each rank's host order."""

    def __init__(self, roles: bool) -> None:
        self.orders = Orders(roles=roles)
        self._communicators: dict[Communicator, int] = {}
        self._instances: dict[tuple[int, int], int] = {}
        self._queues: dict[tuple[int, str], int] = {}
        self._sites: dict[str, int] = {"": 0}
        self._waited: dict[tuple[int, str], list[tuple[int, str, bool]]] = {}
        self._heeded: dict[tuple[int, str], dict[int, int]] = {}

    def communicator(self, communicator: Communicator, weight: int = 1) -> int:
        """Its number."""
        number = self._communicators.get(communicator)
        if number is None:
            number = self._communicators[communicator] = len(self._communicators)
            self.orders.communicators.append(communicator)
            self.orders.weights.append(weight)
        return number

    def instance(self, communicator: int, sequence: int, label: str = "") -> int:
        """Its number."""
        key = (communicator, sequence)
        number = self._instances.get(key)
        if number is None:
            number = self._instances[key] = len(self._instances)
            self.orders.comm.append(communicator)
            self.orders.seq.append(sequence)
            self.orders.label.append(label)
        return number

    def queue(self, rank: int, name: str) -> int:
        """Its number."""
        number = self._queues.get((rank, name))
        if number is None:
            number = self._queues[rank, name] = len(self._queues)
            self.orders.queues.append(Queue(rank, name))
        return number

    def enqueue(
        self, rank: int, names: Iterable[str], instance: int, site: str = "", label: str | None = None, thread: str = ""
    ) -> None:
        """A call of `thread` on `rank` that stands in the queues `names`, behind what the thread has waited for."""
        orders, mark = self.orders, self._sites.setdefault(site, len(self._sites))
        if mark == len(orders.sites):
            orders.sites.append(site)
        if label is not None and label != orders.label[instance]:
            orders.odd.append(Odd(instance, rank, label))
        orders.issued.setdefault(rank, array("i")).append(instance)
        numbers = [self.queue(rank, name) for name in names]
        waited, heeded = self._waited.get((rank, thread), []), self._heeded.setdefault((rank, thread), {})
        # A queue that already stands behind a wait hands it on to all that follows in it.
        known = min(heeded.get(number, 0) for number in numbers)
        for before, reason, soft in waited[known:]:
            orders.edges.append(Edge(before, instance, rank, reason, soft))
        for number in numbers:
            orders.queues[number].calls.append(instance)
            orders.queues[number].sites.append(mark)
            heeded[number] = len(waited)

    def rank(self, rank: int) -> None:
        """There is such a rank, even if it calls nothing."""
        self.orders.issued.setdefault(rank, array("i"))

    def wait(self, rank: int, instance: int, reason: str, thread: str = "", soft: bool = False) -> None:
        """The host thread goes on only when its rank's kernel of `instance` is finished."""
        self._waited.setdefault((rank, thread), []).append((instance, reason, soft))
        if not soft:
            self.orders.waits.setdefault(rank, []).append(instance)

    def last(self, rank: int, name: str) -> int | None:
        """The newest call in a queue."""
        number = self._queues.get((rank, name))
        calls = self.orders.queues[number].calls if number is not None else ()
        return calls[-1] if calls else None

    def names(self, rank: int) -> list[str]:
        """The queues of a rank so far."""
        return [name for owner, name in self._queues if owner == rank]

    def finish(self) -> Orders:
        """The whole."""
        self.orders.place()
        return self.orders


def sort(
    orders: Orders,
    extra: Sequence[Queue] = (),
    blocked: Mapping[int, int] | None = None,
    soft: bool = True,
) -> tuple[list[int], list[int]]:
    """Kahn's algorithm over instances: (a topological order, what keeps each instance).

    An instance is taken when it is at the head of all its queues, so that no edge is ever stored. The second list
    counts, for each instance, the queues and edges that still keep it; those that are not 0 are stuck. extra: more
    queues. blocked: instance -> members that never come. soft: heed soft edges. Linear in the calls.
    """
    total = len(orders.comm)
    sizes = [len(places) for places in orders.shapes]
    left = [sizes[shape] for shape in orders.shape]
    heads = [chain(queue.calls, (total,)) for queue in orders.queues]
    moves = [tuple(heads[place] for place in places) for places in orders.shapes]
    after: dict[int, list[int]] = {}
    for edge in orders.edges:
        if soft or not edge.soft:
            after.setdefault(edge.before, []).append(edge.after)
            left[edge.after] += 1
    for instance, missing in (blocked or {}).items():
        left[instance] += missing
    for queue in extra:
        for one, other in pairwise(queue.calls):
            after.setdefault(one, []).append(other)
            left[other] += 1
    left.append(1 << 60)  # whoever is at its end
    order: list[int] = []
    take = order.append
    for instance in map(next, heads):
        left[instance] -= 1
        if not left[instance]:
            take(instance)
    shape = orders.shape
    for instance in order:  # grows while it is read: first taken, first followed
        for following in map(next, moves[shape[instance]]):
            keeps = left[following] = left[following] - 1
            if not keeps:
                take(following)
        if instance in after:
            for following in after[instance]:
                left[following] -= 1
                if not left[following]:
                    take(following)
    left.pop()
    return order, left
