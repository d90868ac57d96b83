"""The event model: what a rank did, or will do, whoever tells it (a record, a dump, a log, a stack, a line of text).

An `Event` is one call of one host thread. Evidence fills in what it saw; what it could not see stays None or UNKNOWN
and is never guessed. A `Program` is the same events seen before a run: what every rank does, in host order
(`verify.notation` is its text form). `verify.waitgraph` judges both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

OPERATIONS = {
    "AR": "all_reduce",
    "AG": "all_gather",
    "RS": "reduce_scatter",
    "RSv": "reduce_scatterv",
    "A2A": "all_to_all",
    "BC": "broadcast",
    "BAR": "barrier",
    "D": "dispatch",
    "LLD": "low-latency dispatch",
    "INIT": "creation of the group",
    "FIN": "destruction of the group",
}
"""Words of the notation that have a longer name; any other word is an operation of its own."""

HOST_MEDIA = frozenset({"gloo", "mpi", "host", "zmq", "tcp"})
"""Media that need no room on a device."""

KERNEL = "[kernel]"
"""The file of a frame that says where Linux keeps a thread."""

NOTHING = "nothing"
"""The operation of a WAIT that is over, of a thread that waits for none of the calls that it has open."""

ANYBODY = "? anybody"
"""How the stream of a receive begins that stands for one sender of several, any of which will do."""

HOST_OPERATIONS = frozenset({"INIT", "FIN"})
"""Operations that never need room on a device, whatever the medium."""


class Kind(StrEnum):
    """What an event is."""

    COLLECTIVE = "collective"
    SEND = "send"
    RECV = "recv"
    GROUP = "group"
    """One launch of several sends and receives (`parts`), which complete together."""
    WAIT = "wait"
    """The host waits for `streams`: for all of them, or for any one."""
    EXTERNAL = "external"
    """The host is blocked outside collectives, in `operation`."""
    EXIT = "exit"
    """The thread left; `operation` names the exception, empty where it returned or nothing is known."""


class State(StrEnum):
    """How far an operation got, as the evidence says. `scheduled` may be running: many tools never see a start."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """Where an event comes from. INFERRED: nobody saw the call itself, so its arguments are on no side of a mismatch.

    How far a call got may be concluded all the same for one that was observed.
    """

    OBSERVED = "observed"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


@dataclass(frozen=True, order=True)
class Site:
    """A call site in the program under test."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        if not self.line and self.function:
            # A frame without a line: of a library, or of the kernel.
            name = re.sub(r"(\.(constprop|isra|part|cold)(\.\d+)?)+$", "", self.function)
            return f"{name} in the kernel" if self.file == KERNEL else f"{name} in {self.file}" if self.file else name
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, order=True)
class Communicator:
    """Who takes part. Two communicators are the same if name and members are; without a name the members name it."""

    members: tuple[int, ...]
    name: str = ""

    def __str__(self) -> str:
        return self._label

    @cached_property
    def _label(self) -> str:
        return self.name or "{" + ",".join(map(str, self.members)) + "}"


def pair_stream(one: int, other: int) -> str:
    """The stream that point-to-point calls of two ranks share unless told otherwise: `pp01`, `pp3_12`."""
    low, high = sorted((one, other))
    return f"pp{low}{high}" if high < 10 else f"pp{low}_{high}"


@dataclass(frozen=True)
class Event:
    """One call of one host thread.

    rank, thread: who calls. kind, operation: what, in the words of `OPERATIONS`. blocking: the host goes on only when
    it is done. stream: where it is queued (a group is queued on the streams of all of its parts). also: queues that it
    stands in as well, as an event edge makes it; the notation has no word for them. communicator: of a
    collective; of a send or recv where known. peer: the other rank of a send or recv. sequence: its number in the
    communicator or in the direction of a pair, from 0; None = the order of the events says it. tag: size or variant,
    opaque. sizes, outputs: input and output shapes, in elements. splits: elements for each member, of an
    all_to_all; of an expert exchange's dispatch in our own record, rows of each member for this rank. streams, any_of:
    of a wait; `("*",)` is every stream of the rank. parts: of a group. skipped: how many calls of the rank right before
    it the evidence left out, as they met, agreed and ended. failed: what a call raised that is over: it did not
    complete.
    """

    rank: int
    kind: Kind
    operation: str = ""
    thread: str = ""
    stream: str = ""
    also: tuple[str, ...] = ()
    medium: str = ""
    communicator: Communicator | None = None
    peer: int | None = None
    sequence: int | None = None
    tag: str = ""
    sizes: tuple[tuple[int, ...], ...] | None = None
    outputs: tuple[tuple[int, ...], ...] | None = None
    dtype: str | None = None
    root: int | None = None
    splits: tuple[int, ...] | None = None
    blocking: bool = False
    streams: tuple[str, ...] = ()
    any_of: bool = False
    parts: tuple[Event, ...] = ()
    site: Site | None = None
    state: State = State.UNKNOWN
    confidence: Confidence = Confidence.OBSERVED
    skipped: int = 0
    failed: str = ""

    def now(self, state: State, site: Site | None = None) -> Event:
        """The same event in another state, its site made known if it was not; much cheaper than `replace`."""
        made = object.__new__(Event)
        made.__dict__.update(self.__dict__)
        made.__dict__["state"] = state
        if site is not None:
            made.__dict__["site"] = site
        return made

    @property
    def calls(self) -> tuple[Event, ...]:
        """The operations that this event launches: the parts of a group, itself, or nothing."""
        if self.kind is Kind.GROUP:
            return self.parts
        return (self,) if self.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV) else ()

    @property
    def default_stream(self) -> str:
        """The stream of a call that names none: one for each communicator, or for each pair of ranks."""
        if self.kind is Kind.COLLECTIVE:
            return str(self.communicator)
        return pair_stream(self.rank, self.peer) if self.peer is not None else ""

    @cached_property
    def queues(self) -> tuple[str, ...]:
        """The streams that it is queued on."""
        queues = {call.stream or call.default_stream for call in self.calls}
        return tuple(sorted(queues.union(*(call.also for call in self.calls))))

    @property
    def on_device(self) -> bool:
        """Whether it needs room on the device, unless the evidence says that it does not."""
        return any(each.medium not in HOST_MEDIA and each.operation not in HOST_OPERATIONS for each in self.calls)

    @property
    def name(self) -> str:
        """The operation in words."""
        return OPERATIONS.get(self.operation, self.operation or self.kind.value)


@dataclass(frozen=True)
class Lane:
    """What one host thread of a rank does, in its order."""

    rank: int
    thread: str = ""
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        return f"r{self.rank}" + (f"/{self.thread}" if self.thread else "")


@dataclass(frozen=True)
class Program:
    """What every rank does. The threads of a rank share its streams and its device."""

    lanes: tuple[Lane, ...] = field(default=())

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that have a lane, in order."""
        return tuple(sorted({lane.rank for lane in self.lanes}))
