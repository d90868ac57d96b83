"""Whose a dump is, where its own content contradicts the name of its file: a dump does not say its rank, and files are
copied, renamed and collected under wrong names.

A send `0->1` is the sender's, a recv `0<-1` that of rank 0 of the group: they tell the rank of whoever recorded them.
And two processes do not make all of their records in the same nanoseconds: dumps that are equal are of one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify import words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from verify.readers.calls import Call, Dump

Dumps = dict[int, "list[Dump]"]
REAL_NS: Final = 10**18
"""Times of before 2001 are of no clock."""
ADDRESS: Final = 9
"""Digits of the address of a thread, at least."""


def by_content(found: Dumps, unknown: list[str]) -> Dumps:
    """The dumps by the ranks that their content allows; a line for each whose name it contradicts. Raises UsageError
    where none is left.
    """
    kept: Dumps = defaultdict(list)
    moved: list[tuple[int, Dump, str]] = []
    for rank, dumps in found.items():
        for dump in dumps:
            own = _by_transfers(dump)
            if own is None or own == rank or dump.rank is not None:
                kept[rank].append(dump)
            else:
                line = f"{dump.path.name}: its name does not say rank {own}, its sends and receives do"
                moved.append((own, dump, line))
                unknown.append(line)
    for own, dump, line in moved:
        if own not in kept:
            kept[own].append(dump)
        elif not any(_one_process(dump, other) for other in kept[own]):
            unknown[unknown.index(line)] = f"{line}; not used: there is another dump of that rank"
    lost = _under_two_names(kept, unknown)
    left = {rank: [dump for dump in dumps if id(dump) not in lost] for rank, dumps in kept.items()}
    if found and not any(left.values()):
        raise UsageError(f"{next(iter(found.values()))[0].path}: {unknown[-1]}: name each dump after its own rank")
    return defaultdict(list, {rank: dumps for rank, dumps in left.items() if dumps})


def _by_transfers(dump: Dump) -> int | None:
    """The rank that made the sends and receives of a dump; None where there are none, or they contradict each other."""
    own: set[int] = set()
    for (name, transfers), column in dump.columns.items():
        members = dump.groups.get(name, ()) if transfers else ()
        for kind in set(column.kinds) if members else ():
            own |= {members[end] for end in _own_ends(dump.batches[kind].calls) if 0 <= end < len(members)}
    return next(iter(own)) if len(own) == 1 else None


def _own_ends(calls: Iterable[Call]) -> set[int]:
    """Which rank of the group recorded some transfers."""
    return {call.ends[not call.operation.startswith("send")] for call in calls if call.ends is not None}


def _one_process(one: Dump, other: Dump) -> bool:
    """Whether two files are copies of one dump."""
    # As processes write them, with times and threads: what was made by hand may be equal.
    real = any(len(each) >= ADDRESS for each in one.threads) and any(each.created_ns > REAL_NS for each in one.moments)
    return real and one.mark == other.mark


def _under_two_names(kept: Dumps, unknown: list[str]) -> set[int]:
    """Dumps of one process that are named after several ranks, by identity, but for the one whose rank is known."""
    alike: dict[bytes, list[tuple[int, Dump]]] = defaultdict(list)
    for rank, dumps in kept.items():
        for dump in dumps:
            alike[dump.mark].append((rank, dump))
    lost: set[int] = set()
    for same in alike.values():
        if len({rank for rank, _ in same}) < 2 or not _one_process(same[0][1], same[1][1]):
            continue
        sure = {rank for rank, dump in same if dump.rank == rank or _by_transfers(dump) == rank}
        gone = [(rank, dump) for rank, dump in same if len(sure) != 1 or rank not in sure]
        lost |= {id(dump) for _, dump in gone}
        names = ", ".join(sorted({dump.path.name for _, dump in same})[:4])
        whose = f"of rank {min(sure)}" if len(sure) == 1 else "and nothing tells of which rank"
        not_for = words.ranks(rank for rank, _ in gone)
        unknown.append(f"{names}: dumps of one process, {whose}: not used for {not_for}")
    return lost
