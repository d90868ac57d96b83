"""Random programs for the tests of verify: correct ones, ones with one planted fault, and arbitrary ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from verify.events import Communicator, Event, Kind, Lane, Program

if TYPE_CHECKING:
    from collections.abc import Sequence

Step = dict[int, Event]
"""One operation of the whole job: what each rank that takes part calls."""

OPS = ("AR", "AG", "RS", "BAR")


def collective(
    members: Sequence[int], name: str = "", op: str = "AR", tag: str = "", stream: str = "", blocking: bool = False
) -> Step:
    comm = Communicator(tuple(members), name)
    return {
        rank: Event(rank, Kind.COLLECTIVE, op, stream=stream, communicator=comm, tag=tag, blocking=blocking)
        for rank in members
    }


def transfer(source: int, target: int, tag: str = "", blocking: bool = False) -> Step:
    return {
        source: Event(source, Kind.SEND, "send", peer=target, tag=tag, blocking=blocking),
        target: Event(target, Kind.RECV, "recv", peer=source, tag=tag, blocking=blocking),
    }


def swap(one: int, other: int, blocking: bool = False) -> Step:
    """Both send and receive in one group."""
    both = (transfer(one, other), transfer(other, one))
    return {
        rank: Event(rank, Kind.GROUP, "G", parts=tuple(step[rank] for step in both), blocking=blocking)
        for rank in (one, other)
    }


@st.composite
def steps(draw: st.DrawFn, ranks: int, most: int = 6) -> list[Step]:
    """The operations of a job in an order that all ranks can follow, on whatever streams, with host waits between."""
    found: list[Step] = []
    for _ in range(draw(st.integers(0, most))):
        blocking = draw(st.booleans())
        members = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=2, max_size=ranks)))
        kind = draw(st.sampled_from(["collective", "collective", "transfer", "swap", "wait", "any"]))
        if kind == "collective":
            names, streams = st.sampled_from(["", "a", "b"]), st.sampled_from(["", "s0", "s1"])
            op, tag = draw(st.sampled_from(OPS)), draw(st.sampled_from(["", "8B"]))
            found.append(collective(members, draw(names), op, tag, draw(streams), blocking))
        elif kind == "transfer":
            one, other = draw(st.permutations(members))[:2]
            found.append(transfer(one, other, draw(st.sampled_from(["", "x"])), blocking))
        elif kind == "swap":
            found.append(swap(members[0], members[1], blocking))
        else:
            rank, any_of = members[0], kind == "any"
            streams_ = ("s0", "a") if any_of else (draw(st.sampled_from(["*", "s0", "s1", "a", "{0,1}", "pp01"])),)
            found.append({rank: Event(rank, Kind.WAIT, streams=streams_, any_of=any_of)})
    return found


def project(ranks: int, job: Sequence[Step]) -> list[list[Event]]:
    """What each rank does, in the order of the job."""
    return [[step[rank] for step in job if rank in step] for rank in range(ranks)]


def program(events: Sequence[Sequence[Event]]) -> Program:
    return Program(tuple(Lane(rank, "", tuple(each)) for rank, each in enumerate(events)))


def correct(ranks: int, most: int = 6) -> st.SearchStrategy[Program]:
    """Every rank follows one order of the whole job: it completes on any device."""
    return steps(ranks, most).map(lambda job: program(project(ranks, job)))


@st.composite
def arbitrary(draw: st.DrawFn, most: int = 4) -> Program:
    """Two or three ranks whose calls were shuffled, dropped, changed, blocked outside or cut off, or are all right."""
    ranks = draw(st.integers(2, 3))
    events = project(ranks, draw(steps(ranks, most)))
    for _ in range(draw(st.integers(0, 3))):
        mine = events[draw(st.integers(0, ranks - 1))]
        if not mine:
            continue
        at = draw(st.integers(0, len(mine) - 1))
        rank = mine[at].rank
        match draw(st.sampled_from(["swap", "swap", "swap", "drop", "outside", "exit"])):
            case "swap":
                other = draw(st.integers(0, len(mine) - 1))
                mine[at], mine[other] = mine[other], mine[at]
            case "drop":
                del mine[at]
            case "outside":
                mine.insert(at, Event(rank, Kind.EXTERNAL, "io"))
            case "exit":
                mine.insert(at, Event(rank, Kind.EXIT))
    return program(events)
