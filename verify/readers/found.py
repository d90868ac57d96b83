"""What a reader found in one piece of evidence. Facts only: what cannot be known is said to be unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kernel.errors import UsageError
from verify.events import NOTHING, Confidence, Event, Kind, State

if TYPE_CHECKING:
    from pathlib import Path

    from verify.events import Communicator, Site


class Damaged(UsageError):
    """A file that its writer did not finish, or that was cut or changed since. In a folder the others still tell."""


class Empty(Damaged):
    """A file without a byte: the dump that was not written, or the log of a rank that has said nothing."""


ENDED = "one of its threads is gone: "
"""How a remark begins that is told of any rank, as it may be the cause though another rank is blamed."""

ENDED_ITS_RECORD: Final = "its program has ended its record"
"""How a line of `unknown` about a rank goes on that took its record out, and lives on."""
LOOK_AGAIN = "look again before believing that it is stuck"
"""How a line of `unknown` ends that is about a rank that moved a moment ago."""
STILL = "it was still there after it had logged "
"""How a remark begins of a rank whose log ends with a traceback, and whose process was seen since."""
AFTER = "it failed after another one: "
"""How a remark begins of a rank that raised what comes of another one's end."""
REFUSED_DATA = "got "
"""How a remark begins of a rank that said that it got more data than its call has room for."""
MEMBERS_UNTOLD = "who is in a group is not in a watchdog's lines, and taken from the ranks that name it"
PERHAPS_BY_IT = "it may have left by it"
"""How a line of `unknown` ends that names a rank and what it logged last but for a few lines."""
GROUP_UNTOLD = "some timeouts do not say which group they are of"
"""How lines of `unknown` end that other evidence may settle."""
UNNAMED_GROUP: Final = "a group that the log does not name"
"""What events call the group of calls of which nothing names one: they may be of several."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a host thread stood. frames: innermost first. holds_gil: as the tool said, None where it did not.

    awake: it ran between two looks, so that it is not blocked where it was seen. tid: its number, as Linux has it.
    """

    rank: int | None
    thread: str
    frames: tuple[Site, ...]
    pid: int | None = None
    holds_gil: bool | None = None
    awake: bool = False
    tid: int | None = None


class Damage(NamedTuple):
    """A ring that has lost events. what: how, in words. newest: whether the newest ones may be among them."""

    rank: int
    what: str
    newest: bool


class Named(NamedTuple):
    """A process group of torch: its name and description there, and what events call it. of_all: it is known, or taken,
    to be that of all ranks, whoever is seen to be in it.
    """

    name: str
    description: str
    communicator: Communicator
    of_all: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What one file, log or process told.

    source: its name as people know it. events: each rank's in its host order. present: ranks that left a record of
    calls. expected: ranks that should have. stacks: of host threads. unknown: what this cannot tell, a line each.
    moved_ns: when anything last moved, where known, on the clock of the source. unsure: rank and name of a group in
    which it may have made calls that this evidence lost. whole: ranks of which everything that can wait is here, graph
    replays and host waits too. doubt: why nothing that is wrong in this would not mean that nothing is; "" if it would.
    lively: ranks that moved a moment ago, and may move again. idle: ranks that have not left and of which the evidence
    shows no wait: they may be on their way to a call. orphaned: all ranks gave up since their launcher was gone.
    remarks: of a rank, what helps whoever has to look at it. named: groups of which it is known who belongs to them.
    loose: those that only the ranks are known of which speak of them. overdue: ranks of which a call has waited for as
    long as it may, so that nobody for whom it waits is merely late. timeout_s: for how long the open calls may, at
    most, where known. traced: a rank and the exception by which it left, as only the traceback that ends its log tells.
    undated: of these, the ranks of which there is more that may be later: lines of the log, a dump. deaf: ranks of
    which this never holds sends and receives, whatever they made. mixed: why this may be of two jobs, "" where nothing
    says so. waited: a rank and for how many seconds the newest of the calls has been open that its threads wait in.
    damaged: rings that have lost events. earlier: ranks whose evidence is not known to reach to when an open call of
    another one had waited for as long as it may: what they have done since it does not tell. recorded: ranks with a
    record of ours, whole or not. inferred: groups whose members nothing lists: there may be others than those that
    left a dump.
    """

    source: str
    events: tuple[Event, ...] = ()
    present: frozenset[int] = frozenset()
    expected: frozenset[int] = frozenset()
    stacks: tuple[Stack, ...] = ()
    unknown: tuple[str, ...] = ()
    moved_ns: int | None = None
    unsure: frozenset[tuple[int, str]] = frozenset()
    whole: frozenset[int] = frozenset()
    doubt: str = ""
    lively: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    orphaned: bool = False
    remarks: tuple[tuple[int, str], ...] = ()
    named: tuple[Named, ...] = ()
    loose: tuple[Named, ...] = ()
    overdue: frozenset[int] = frozenset()
    timeout_s: float | None = None
    deaf: frozenset[int] = frozenset()
    traced: frozenset[tuple[int, str]] = frozenset()
    undated: frozenset[int] = frozenset()
    mixed: str = ""
    earlier: frozenset[int] = frozenset()
    recorded: frozenset[int] = frozenset()
    waited: tuple[tuple[int, float], ...] = ()
    damaged: tuple[Damage, ...] = ()
    inferred: frozenset[str] = frozenset()


def nothing_open(rank: int, group: Communicator | None = None, sequence: int | None = None) -> Event:
    """An event that says of a rank without any other one that it is there and has nothing open, as evidence shows.

    group, sequence: its last call there, which is over.
    """
    return Event(
        rank, Kind.WAIT, communicator=group, sequence=sequence, state=State.COMPLETED, confidence=Confidence.INFERRED
    )


def waits_for_nothing(rank: int, thread: str = "") -> Event:
    """An event that says of a thread that it waits for nothing, whatever it has open."""
    return Event(rank, Kind.WAIT, NOTHING, thread=thread, state=State.COMPLETED, confidence=Confidence.INFERRED)


class Reader(Protocol):
    """A format. Readers execute nothing that they read and hold at most a bounded part of it."""

    name: str

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether a file that starts with `head` (its first 4 KiB) is of this format."""

    def read(self, path: Path) -> Found:
        """Read it. Raises UsageError, in one line with file and place, for what is damaged, hostile or too large."""
