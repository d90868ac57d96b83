"""Lines of NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL (and INIT, which names communicators).

    host:71:71 [0] NCCL INFO AllReduce: opCount 1e7 sendbuff 0x1 recvbuff 0x2 count 18816 datatype 7 op 0 root 0
        comm 0x55 [nranks=16] stream 0x56
    host:71:71 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 3 nranks 16 .. commId 0x8af - Init COMPLETE

They show launches, with stream and root, and no end of any. A call that all members launched, and that nothing open is
before on any of their streams, is taken to have finished. The pointer of a communicator is the process's own: Init
lines join them (commId), else their size and order do, where that leaves no choice. The rank of a process is the one in
the largest communicator, or `globalrank` (RCCL), or a `[rank3]:` before the line, or the file's.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from verify.events import Communicator, Confidence, Event, Kind, State
from verify.readers.attempts import present_lines, restarted
from verify.readers.found import Found, nothing_open
from verify.readers.lines import MOST, SEATS, distinct, holds, named, rank_in, unusable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WHAT: Final = "NCCL log"
UNSEEN: Final = "a communicator that cannot be joined"
NEEDLES: Final = (b": opCount ", b" commId ")
_PROCESS = r"(?P<host>[^\s:\]]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\].{0,40}? NCCL INFO "
_CALL = re.compile(
    _PROCESS
    + r"(?P<op>\w{1,30}): opCount [0-9a-fA-F]{1,16} sendbuff \S{1,20} recvbuff \S{1,20} count (?P<count>\d{1,18})"
    r" datatype (?P<dtype>\d{1,3}) op \d{1,20} root (?P<root>-?\d{1,7}) comm (?P<comm>0x[0-9a-fA-F]{1,16})"
    r" \[nranks=(?P<size>\d{1,7})\] stream (?P<stream>\(nil\)|0x[0-9a-fA-F]{1,16})"
    r"(?:.{0,40}?globalrank (?P<rank>\d{1,7}))?"
)
_INIT = re.compile(
    _PROCESS + r".{0,60}?comm (?P<comm>0x[0-9a-fA-F]{1,16}) rank (?P<rank>\d{1,7}) n[rR]anks (?P<size>\d{1,7})"
    r".{0,200}?commId (?P<id>0x[0-9a-fA-F]{1,18})"
)
_OPERATIONS: Final = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AllToAll": "all_to_all",
    "AlltoAll": "all_to_all",
}
_ROOTED: Final = frozenset({"Broadcast", "Reduce", "Gather", "Scatter"})
_PAIRS: Final = {"Send": Kind.SEND, "Recv": Kind.RECV}
_DTYPES: Final = ("Int8", "UInt8", "Int32", "UInt32", "Int64", "UInt64", "Half", "Float", "Double", "BFloat16")
_Process = tuple[str, str]


class NcclLogReader:
    """See the module."""

    name = "nccl_log"

    def recognises(self, path: Path, head: bytes) -> bool:
        """A text file with a COLL line anywhere in it."""
        return holds(path, head, NEEDLES[:1])

    def belongs(self, path: Path) -> bool:
        """Whether a file is of a job whose COLL lines are in others: its process made communicators, and no call."""
        return holds(path, b"", NEEDLES)

    def read(self, path: Path) -> Found:
        """The lines of one log. Raises UsageError for one without any."""
        return of_logs([path])

    def read_all(self, paths: Sequence[Path]) -> Found:
        """The logs of one job, one a process as NCCL_DEBUG_FILE makes them."""
        return of_logs(paths)


READER = NcclLogReader()


@dataclass
class _Line:
    process: _Process
    op: str
    count: int
    dtype: str
    root: int
    comm: tuple[str, int]
    stream: str
    number: int
    """Of the calls of the process on the communicator, or of the transfers in this direction of the pair, from 0."""


def of_logs(paths: Sequence[Path]) -> Found:
    """The lines of the logs of one job together (NCCL_DEBUG_FILE makes one a process)."""
    log = _Log()
    for path in distinct(paths):
        log.take(path)
    if not log.lines and not any(map(restarted, paths)):
        raise unusable(WHAT, paths[0], "no line of NCCL_DEBUG_SUBSYS=COLL in it", "set NCCL_DEBUG=INFO as well")
    return log.found(named(paths))


class _Log:
    def __init__(self) -> None:
        self.lines: deque[_Line] = deque(maxlen=MOST)
        self.taken = 0
        self.ranks: dict[_Process, int] = {}
        self.inside: dict[tuple[_Process, str], tuple[int, int, str]] = {}
        """(process, pointer) -> rank in it, size, commId, by an Init line."""
        self.sizes: dict[tuple[_Process, str], int] = {}
        self.order: dict[_Process, list[str]] = defaultdict(list)
        self._counts: dict[tuple[_Process, str, str, int], int] = defaultdict(int)
        self._now: dict[tuple[_Process, str], str] = {}
        """What pointers that name another communicator than at first are called by now."""

    def take(self, path: Path) -> None:
        """Read one log."""
        for _, line in present_lines(WHAT, path, NEEDLES):
            if (call := _CALL.search(line)) is not None:
                process = (call["host"], call["pid"])
                rank = int(call["rank"]) if call["rank"] is not None else rank_in(line, path)
                if rank is not None:
                    self.ranks.setdefault(process, rank)
                pointer = self._now.get((process, call["comm"]), call["comm"])
                self._know(process, pointer, int(call["size"]))
                dtype = int(call["dtype"])
                named = _DTYPES[dtype] if dtype < len(_DTYPES) else str(dtype)
                comm = (pointer, int(call["size"]))
                pair = call["op"] in _PAIRS
                key = (process, pointer, call["op"] if pair else "", int(call["root"]) if pair else -1)
                number = self._counts[key]
                self._counts[key] += 1
                one = _Line(
                    process, call["op"], int(call["count"]), named, int(call["root"]), comm, call["stream"], number
                )
                self.lines.append(one)
                self.taken += 1
            elif (init := _INIT.search(line)) is not None and len(self.inside) < MOST:
                process = (init["host"], init["pid"])
                pointer = self._made(process, init["comm"], init["id"])
                self._know(process, pointer, int(init["size"]))
                self.inside[process, pointer] = (int(init["rank"]), int(init["size"]), init["id"])

    def _made(self, process: _Process, comm: str, ident: str) -> str:
        """What to call the communicator of an Init line: its pointer, and which one at that pointer if not the first.

        A pointer is free for another communicator once the one it named is destroyed.
        """
        pointer = self._now.get((process, comm), comm)
        before = self.inside.get((process, pointer))
        if before is not None and before[2] != ident:
            pointer = f"{comm} #{int(pointer.partition('#')[2] or 1) + 1}"
            self._now[process, comm] = pointer
        return pointer

    def _know(self, process: _Process, comm: str, size: int) -> None:
        if (process, comm) not in self.sizes and len(self.sizes) < MOST:
            self.sizes[process, comm] = size
            self.order[process].append(comm)

    def found(self, source: str) -> Found:
        """Everything that the lines say."""
        unknown = [f"{source}: launches only; what all members launched is taken to have finished"]
        if self.taken > len(self.lines):
            unknown.append(f"{source}: the first {self.taken - len(self.lines)} of its calls are left out")
        world = max(self.sizes.values(), default=0)
        for (process, _), (seat, size, _) in self.inside.items():
            if size == world:
                self.ranks.setdefault(process, seat)
        if nameless := sorted({line.process for line in self.lines} - self.ranks.keys()):
            told = ", ".join(":".join(process) for process in nameless[:4])
            unknown.append(f"{source}: which rank is {told}? Add INIT to NCCL_DEBUG_SUBSYS to see it")
        comms = self._communicators(world)
        events: list[Event] = []
        lost: set[int] = set()
        unseen: set[int] = set()
        for line in self.lines:
            rank, comm = self.ranks.get(line.process), comms.get((line.process, line.comm[0]))
            if rank is None or comm is None:
                lost.update([line.comm[1]] if rank is not None else [])
                unseen.update([rank] if rank is not None else [])
                continue
            events.append(self._event(line, rank, comm))
        if lost:
            sizes = ", ".join(map(str, sorted(lost)))
            unknown.append(f"{source}: who is in the communicators of {sizes} ranks? Add INIT to NCCL_DEBUG_SUBSYS")
        # A rank that made its communicator and has launched nothing in sight.
        silent = {process for process, _ in self.inside} - {line.process for line in self.lines}
        if self.taken == len(self.lines):
            events += [nothing_open(self.ranks[process]) for process in sorted(silent & self.ranks.keys())]
        present = frozenset(event.rank for event in events) | unseen
        expected = present | frozenset(range(world)) if world <= 1 << 18 else present
        # What a rank called where nobody knows who else has to come, it may wait in.
        waits = [Event(rank, Kind.WAIT, streams=(UNSEEN,), confidence=Confidence.INFERRED) for rank in sorted(unseen)]
        finished = [*finish(_grouped(events)), *waits]
        return Found(
            source, events=tuple(finished), present=present, expected=expected, unknown=tuple(unknown),
            doubt="NCCL's lines tell what was launched, not what has ended",
        )  # fmt: skip

    def _event(self, line: _Line, rank: int, comm: Communicator) -> Event:
        pair = line.op in _PAIRS
        peer = comm.members[line.root] if pair and 0 <= line.root < len(comm.members) else None
        return Event(
            rank,
            Kind.COLLECTIVE if peer is None else _PAIRS[line.op],
            "" if pair else _OPERATIONS.get(line.op, line.op),
            stream="the default stream" if line.stream == "(nil)" else line.stream,
            medium="nccl",
            communicator=comm,
            peer=peer,
            sequence=line.number,
            sizes=((line.count,),),
            dtype=line.dtype,
            root=line.root if line.op in _ROOTED else None,
        )

    def _communicators(self, world: int) -> dict[tuple[_Process, str], Communicator]:
        """Each process's pointers that can be joined with those of others."""
        found: dict[tuple[_Process, str], Communicator] = {}
        by_id: dict[tuple[str, int], dict[int, tuple[_Process, str]]] = defaultdict(dict)
        for where, (rank, size, ident) in self.inside.items():
            by_id[ident, size][rank] = where
        room = SEATS
        for (ident, size), seats in by_id.items():
            if (room := room - size) < 0:
                break
            ranks = {seat: self.ranks.get(where[0]) for seat, where in seats.items()}
            if size == world <= 1 << 18:
                ranks = {seat: ranks.get(seat, seat) for seat in range(size)}
            members = tuple(one for _, one in sorted(ranks.items()) if one is not None)
            if len(members) == size and len(set(members)) == size:
                found |= dict.fromkeys(seats.values(), Communicator(members, ident))
        # Without Init lines: the n-th communicator of a size, where as many processes have one as it has members.
        nth: dict[tuple[int, int], list[tuple[_Process, str]]] = defaultdict(list)
        for process, pointers in self.order.items():
            seen: dict[int, int] = defaultdict(int)
            for pointer in pointers:
                size = self.sizes[process, pointer]
                if (process, pointer) not in self.inside and process in self.ranks:
                    nth[size, seen[size]].append((process, pointer))
                seen[size] += 1
        for (size, number), places in nth.items():
            if (room := room - size) < 0:
                break
            ranks_ = sorted({self.ranks[process] for process, _ in places})
            members = tuple(ranks_) if len(ranks_) == size else ()
            if size == world and len(ranks_) <= size <= 1 << 18 and ranks_[-1] < size:
                members = tuple(range(size))
            if members:
                found |= dict.fromkeys(places, Communicator(members, f"communicator {number + 1} of {size} ranks"))
        return found


def _grouped(events: list[Event]) -> list[Event]:
    """Sends and receives that follow each other on a rank, its communicator and its stream are one launch."""
    found: list[Event] = []
    last: dict[int, int] = {}
    for event in events:
        at = last.get(event.rank)
        before = found[at] if at is not None else None
        if before is not None and _transfers(event) and _transfers(before):
            parts = before.calls
            same = (parts[0].communicator, parts[0].stream) == (event.communicator, event.stream)
            # A second transfer to the same peer in the same direction may begin the next group.
            fresh = all((part.kind, part.peer) != (event.kind, event.peer) for part in parts)
            if same and fresh and at is not None:
                group = Event(event.rank, Kind.GROUP, stream=event.stream, medium="nccl", parts=(*parts, event))
                found[at] = replace(group, confidence=Confidence.INFERRED)
                continue
        last[event.rank] = len(found)
        found.append(event)
    return found


def _transfers(event: Event) -> bool:
    """Whether it is a send, a receive or a group of them; what only says that a rank has nothing open is none."""
    return event.kind in (Kind.SEND, Kind.RECV, Kind.GROUP)


def finish(events: list[Event]) -> list[Event]:
    """Those that all members launched, and that nothing unfinished is before on any of their streams, are finished.

    A member whose oldest call in sight is a later one has made the earlier ones out of sight.
    """
    queues: dict[tuple[int, str], deque[int]] = defaultdict(deque)
    holders: dict[tuple[object, ...], list[int]] = defaultdict(list)
    missing: dict[tuple[object, ...], int] = {}
    oldest: dict[tuple[object, ...], int] = {}
    for number, event in enumerate(events):
        for queue in event.queues:
            queues[event.rank, queue].append(number)
        for call in event.calls:
            holders[_meeting(call)].append(number)
            seat = _seat(call, call.rank)
            oldest[seat] = min(oldest.get(seat, call.sequence or 0), call.sequence or 0)
    for event in events:
        for call in event.calls:
            if (key := _meeting(call)) not in missing:
                out = sum(oldest.get(seat, 0) > (call.sequence or 0) for seat in _seats(call))
                missing[key] = len(_seats(call)) - len(holders[key]) - out
    done: set[int] = set()
    over: set[tuple[int, int]] = set()
    """(number, position) of the parts of a group that finished without the others."""

    def ready(number: int) -> bool:
        event = events[number]
        heads = (queues[event.rank, queue] for queue in event.queues)
        return all(line and line[0] == number for line in heads)

    def left(number: int) -> list[Event]:
        return [call for position, call in enumerate(events[number].calls) if (number, position) not in over]

    todo = deque(range(len(events)))
    stalled: deque[int] = deque()

    def end(number: int) -> None:
        done.add(number)
        for queue in events[number].queues:
            line = queues[events[number].rank, queue]
            line.popleft()
            if line:
                todo.append(line[0])

    def part(number: int) -> None:
        """That transfers were one launch is a guess: where they do not finish as one, those with a counterpart do."""
        for position, call in enumerate(events[number].calls):
            holding = holders[key := _meeting(call)]
            if (number, position) in over or missing[key] > 0 or not all(one in done or ready(one) for one in holding):
                continue
            for other in holding:
                if other not in done:
                    over.update((other, at) for at, one in enumerate(events[other].calls) if _meeting(one) == key)
                    if not left(other):
                        end(other)

    while todo or stalled:
        if not todo:
            number = stalled.popleft()
            if events[number].kind is Kind.GROUP and number not in done and ready(number):
                part(number)
            continue
        number = todo.popleft()
        if number in done or not ready(number):
            continue
        together, more = {number}, [number]
        whole = True
        while more and whole:
            for call in left(more.pop()):
                key = _meeting(call)
                whole = whole and missing[key] <= 0
                fresh = [other for other in holders[key] if other not in together and other not in done]
                together.update(fresh)
                more += fresh
        if whole and all(map(ready, together)):
            for other in together:
                end(other)
        else:
            # It stands first: the groups that it has a part in may finish that.
            stalled.extend(other for call in events[number].calls for other in holders[_meeting(call)])
    found: list[Event] = []
    for number, event in enumerate(events):
        if event.kind is Kind.GROUP and number not in done and ready(number):
            states = ((number, at) in over for at in range(len(event.parts)))
            found += [
                replace(call, state=State.COMPLETED if met else State.SCHEDULED)
                for call, met in zip(event.parts, states, strict=True)
            ]
            continue
        ended = number in done or not event.calls
        found.append(replace(event, state=State.COMPLETED if ended else State.SCHEDULED))
    return found


def _seat(call: Event, rank: int | None) -> tuple[object, ...]:
    """The seat of a member at the calls that `call` is one of."""
    if call.kind is Kind.COLLECTIVE:
        return (call.communicator, rank)
    return (call.communicator, *_ends(call), rank)


def _seats(call: Event) -> list[tuple[object, ...]]:
    """Everybody who has to come."""
    if call.kind is not Kind.COLLECTIVE:
        return [_seat(call, end) for end in _ends(call)]
    members = call.communicator.members if call.communicator is not None else (call.rank,)
    return [_seat(call, member) for member in members]


def _ends(call: Event) -> tuple[int | None, int | None]:
    return (call.rank, call.peer) if call.kind is Kind.SEND else (call.peer, call.rank)


def _meeting(call: Event) -> tuple[object, ...]:
    if call.kind is Kind.COLLECTIVE:
        return (call.communicator, call.sequence)
    return (call.communicator, _ends(call), call.sequence)
