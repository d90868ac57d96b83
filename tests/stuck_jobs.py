"""Random jobs of four ranks with one planted fault, run to the end: where every rank stands when nothing moves."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from verify.events import Communicator, Event, Kind, Lane, Program, Site
from verify.execution import Execution
from verify.notation import format_event

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from verify.matching import Launch

RANKS = 4
GROUPS = {
    "0": ("default_pg", (0, 1, 2, 3)), "1": ("tp", (0, 1)), "2": ("tp", (2, 3)), "3": ("dp", (0, 2)),
    "4": ("dp", (1, 3)), "5": ("ep", (0, 1, 2)),
}  # fmt: skip
NAMES = sorted(GROUPS)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
CROSSED = [
    (one, other)
    for one in NAMES
    for other in NAMES
    if one != other and len(set(GROUPS[one][1]) & set(GROUPS[other][1])) > 1
]
Step = dict[int, Event]
"""One operation of the job: what each rank that takes part calls."""


class Fault(StrEnum):
    """What is planted."""

    NONE = "none"
    EXCEPTION = "exception"
    EXIT = "exit"
    OPERATION = "operation"
    SIZE = "size"
    DTYPE = "dtype"
    ROOT = "root"
    SITE = "site"
    CYCLE = "cycle"
    PAIR_CYCLE = "pair cycle"
    MIXED_CYCLE = "mixed cycle"
    MISSING = "missing"
    NO_SEND = "no send"
    OUTSIDE = "outside"
    STALL = "stall"
    EQUAL = "equal"


class Job:
    """rank: who is to blame, or has a part in it. group: where the fault is. launches: rank -> what it issued.

    left: how the rank left, or what it is blocked in.
    """

    def __init__(
        self, fault: Fault, rank: int, group: str, launches: dict[int, list[Launch]], left: dict[int, Event]
    ) -> None:
        self.fault, self.rank, self.group, self.launches, self.left = fault, rank, group, launches, left

    def __repr__(self) -> str:
        """In the notation; `?` marks what is not done."""
        lanes = [
            f"r{rank}: " + " ".join(format_event(one.event) + "?" * (not one.done) for one in mine)
            for rank, mine in self.launches.items()
        ]
        return f"<{self.fault} on rank {self.rank}: {'; '.join(lanes)}>"

    @property
    def members(self) -> tuple[int, ...]:
        return GROUPS[self.group][1]


def collective(
    group: str, op: str = "all_reduce", size: int = 8, dtype: str = "Float", root: int = 0, line: int = 7,
    blocking: bool = True,
) -> Step:  # fmt: skip
    """The call of all members. An all_gather and a reduce_scatter have the sizes that they must have."""
    members = GROUPS[group][1]
    n = len(members)
    taken, given = {"all_gather": (size, size * n), "reduce_scatter": (size * n, size)}.get(op, (size, size))
    rooted = op == "broadcast"
    return {
        rank: Event(
            rank, Kind.COLLECTIVE, op, communicator=Communicator(members, group), sizes=((taken,),),
            outputs=((given,),), dtype=dtype, root=root if rooted else None, site=Site("train.py", line, "step"),
            blocking=blocking,
        )
        for rank in members
    }  # fmt: skip


def transfer(source: int, target: int, blocking: bool = True) -> Step:
    """A send and its recv, in the group of all."""
    everybody = Communicator(GROUPS["0"][1], "0")
    call = Event(
        source, Kind.SEND, "send", communicator=everybody, peer=target, sizes=((8,),), dtype="Float",
        blocking=blocking, site=Site("pipe.py", 3, "push"),
    )  # fmt: skip
    return {source: call, target: replace(call, rank=target, kind=Kind.RECV, operation="recv", peer=source)}


@st.composite
def steps(draw: st.DrawFn, pairs: bool, always: bool, most: int = 5) -> list[Step]:
    """Operations in an order that all ranks follow; hosts wait for some of them, or always."""
    found = []
    for _ in range(draw(st.integers(0, most))):
        blocking = always or draw(st.booleans())
        if pairs and draw(st.integers(0, 3)) == 0:
            one, other = draw(st.permutations(range(RANKS)))[:2]
            found.append(transfer(one, other, blocking))
        else:
            found.append(
                collective(
                    draw(st.sampled_from(NAMES)), draw(st.sampled_from(OPS)), draw(st.sampled_from((8, 64))),
                    blocking=blocking,
                )
            )  # fmt: skip
    return found


def _of(job: Sequence[Step], rank: int) -> list[Event]:
    return [step[rank] for step in job if rank in step]


WAIT = {rank: Event(rank, Kind.WAIT, streams=("*",)) for rank in range(RANKS)}


@st.composite
def jobs(draw: st.DrawFn, faults: Collection[Fault] = tuple(Fault), pairs: bool = True, blocking: bool = False) -> Job:
    """A job with one of `faults` at a random place. pairs: sends and receives as well. blocking: hosts always wait."""
    fault = draw(st.sampled_from(sorted(faults)))
    before, after = draw(steps(pairs, blocking)), draw(steps(pairs, blocking))
    group, op = draw(st.sampled_from(NAMES)), draw(st.sampled_from(OPS))
    rank = draw(st.sampled_from(GROUPS[group][1]))
    middle = {each: _of([collective(group, op)], each) for each in range(RANKS)}
    cut, left, stalled = False, [], False
    match fault:
        case Fault.NONE:
            pass
        case Fault.EQUAL:
            after = []
        case Fault.MISSING | Fault.EXIT | Fault.EXCEPTION | Fault.OUTSIDE:
            middle[rank], cut = [], True
            kind = Kind.EXTERNAL if fault is Fault.OUTSIDE else Kind.EXIT
            what = {Fault.OUTSIDE: "read", Fault.EXCEPTION: "ValueError: bad batch"}.get(fault, "")
            left = [] if fault is Fault.MISSING else [Event(rank, kind, what, site=Site("data.py", 5, "load"))]
        case Fault.OPERATION:
            other = draw(st.sampled_from([each for each in OPS if each != op]))
            middle[rank] = _of([collective(group, other)], rank)
        case Fault.SIZE:
            middle[rank] = _of([collective(group, op, size=56)], rank)
        case Fault.DTYPE:
            middle[rank] = _of([collective(group, op, dtype="Half")], rank)
        case Fault.ROOT:
            middle = {each: _of([collective(group, "broadcast", root=each == rank)], each) for each in range(RANKS)}
        case Fault.SITE:
            sure = collective(group, op, line=31)
            middle = {each: _of([sure, collective(group, op, line=31)], each) for each in range(RANKS)}
            middle[rank] = _of([sure, collective(group, op, line=99)], rank)
        case Fault.CYCLE:
            one, other = (collective(name) for name in draw(st.sampled_from(CROSSED)))
            rank = draw(st.sampled_from(sorted(set(one) & set(other))))
            middle = {each: _of([other, one] if each == rank else [one, other], each) for each in range(RANKS)}
        case Fault.PAIR_CYCLE:
            peer = draw(st.sampled_from([each for each in range(RANKS) if each != rank]))
            middle = {each: [] for each in range(RANKS)}
            for mine, other_ in ((rank, peer), (peer, rank)):
                middle[mine] = [transfer(mine, other_)[mine], transfer(other_, mine)[mine]]
        case Fault.MIXED_CYCLE:
            peer = draw(st.sampled_from([each for each in GROUPS[group][1] if each != rank]))
            sent, called = transfer(rank, peer), collective(group)
            middle = {each: _of([called], each) for each in range(RANKS)}
            middle[rank], middle[peer] = [sent[rank], called[rank]], [called[peer], sent[peer]]
        case Fault.NO_SEND:
            peer = draw(st.sampled_from([each for each in range(RANKS) if each != rank]))
            middle = {each: [] for each in range(RANKS)}
            middle[peer], cut = [transfer(rank, peer)[peer]], True
        case Fault.STALL:
            cut = stalled = True
    lanes = []
    for each in range(RANKS):
        rest = left if cut and each == rank else [*_of(after, each), WAIT[each]]
        lanes.append(Lane(each, "", (*_of(before, each), WAIT[each], *middle[each], *rest)))
    run = Execution(Program(tuple(lanes)))
    run.run()
    launches = run.launches
    if stalled:
        launches[rank][-1].done = False
    if fault is Fault.EQUAL:
        _stop_everywhere(launches, group)
    return Job(fault, rank, group, launches, {each.rank: each for each in left})


def _stop_everywhere(launches: dict[int, list[Launch]], group: str) -> None:
    """As a broken link does: the last call of all on the group never ends, nobody gets further on it."""
    for rank in GROUPS[group][1]:
        last = [n for n, one in enumerate(launches[rank]) if _name(one) == group][-1]
        launches[rank][last].done = False


def _name(launch: Launch) -> str:
    return launch.event.communicator.name if launch.event.communicator is not None else ""


def calls(job: Job, rank: int) -> Iterator[tuple[Event, bool]]:
    """What a rank called, and whether it is done."""
    for launch in job.launches[rank]:
        yield launch.event, launch.done
