"""Dumps of several backends: a process has a recorder for NCCL's calls and one for gloo's, and each writes dumps of its
own.

What both hold of one process is told together, if it is certain that they are of one: a thread that makes calls has an
address that the system chooses by chance, unless it was told not to. A call of one backend and one of the other do not
meet, though they be of one group and have one number. Where nothing shows whose they are, those of one backend are
looked at alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from verify import words
from verify.readers.lives import backends_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verify.readers.calls import Dump
    from verify.readers.found import Found

_FIXED: Final = re.compile(r"(1555|2aaa|7fff)\w{8}$")
"""Where Linux puts the threads of every process where it places nothing by chance, as many containers have it."""
Dumps = dict[int, "list[Dump]"]
"""Of each rank, those that are named for it."""


class Family(NamedTuple):
    """Dumps of one backend. suffix: what is put after the names of its groups."""

    suffix: str
    dumps: Dumps


def families(found: Mapping[int, Sequence[Dump]], unknown: list[str]) -> list[Family]:
    """The dumps by backend, the one with most ranks first; a line in `unknown` for what is not used.

    All of them together where no rank has dumps of two.
    """
    kinds: dict[frozenset[str], Dumps] = defaultdict(dict)
    for rank, dumps in found.items():
        for dump in dumps:
            kinds[backends_of(dump)].setdefault(rank, []).append(dump)
    silent = kinds.pop(frozenset(), {})
    ranks = [rank for mine in kinds.values() for rank in mine]
    if len(ranks) == len(set(ranks)) or any(len(kind) > 1 for kind in kinds):
        return [Family("", {rank: list(dumps) for rank, dumps in found.items()})]
    first, *others = sorted(kinds, key=lambda kind: (-len(kinds[kind]), kind == {"gloo"}, sorted(kind)))
    for rank, dumps in silent.items():
        kinds[first].setdefault(rank, []).extend(dumps)
    parts = [Family("", kinds[first])]
    for kind in others:
        usual = _usual(kinds[kind]) | _usual(kinds[first])
        apart = [rank for rank, mine in kinds[kind].items() if not _of_one_process(mine, kinds[first].get(rank), usual)]
        name, main = "".join(kind), "".join(first)
        if apart:
            who = f"whether those of {words.ranks(apart)} are of the same processes as {main}'s is not in them"
            many = sum(map(len, kinds[kind].values()))
            unknown.append(f"{many} dump{'s' if many > 1 else ''} of {name}: not used: {who}")
            continue
        parts.append(Family(f" ({name})", kinds[kind]))
        unknown.append(f"in which order a rank made calls of {main} and of {name} is not in their dumps")
    return parts


def _usual(dumps: Dumps) -> set[str]:
    """Threads that tell nothing: those that several ranks have, and those where they are without chance."""
    often: Counter[str] = Counter()
    for mine in dumps.values():
        often.update(frozenset[str]().union(*(dump.threads for dump in mine)))
    return {thread for thread, times in often.items() if times > 1 or _FIXED.match(_hex(thread))}


def _hex(thread: str) -> str:
    return f"{int(thread):x}" if thread.isascii() and thread.isdigit() else thread


def _of_one_process(one: Sequence[Dump], other: Sequence[Dump] | None, usual: set[str]) -> bool:
    """Whether dumps of a rank are of one process. other: None where the rank has left none of that backend."""
    if other is None:
        return True
    return all(any((mine.threads & theirs.threads) - usual for theirs in other) for mine in one)


def joined(found: Sequence[Found]) -> Found:
    """What dumps of several backends tell of the same processes."""
    first = found[0]
    present = frozenset[int]().union(*(each.present for each in found))
    unsure = {
        (rank, str(call.communicator))
        for each in found for event in each.events for call in event.calls if call.communicator is not None
        for rank in (present - each.present).intersection(call.communicator.members)
    }  # fmt: skip
    return replace(
        first,
        source=", ".join(dict.fromkeys(each.source for each in found)),
        events=tuple(event for each in found for event in each.events),
        present=present,
        expected=frozenset[int]().union(*(each.expected for each in found)),
        unknown=tuple(dict.fromkeys(line for each in found for line in each.unknown)),
        moved_ns=max((each.moved_ns for each in found if each.moved_ns is not None), default=None),
        unsure=frozenset[tuple[int, str]](unsure).union(*(each.unsure for each in found)),
        doubt=next((each.doubt for each in found if each.doubt), ""),
        overdue=frozenset[int]().union(*(each.overdue for each in found)),
        timeout_s=max((each.timeout_s for each in found if each.timeout_s is not None), default=None),
        deaf=frozenset[int]().union(*(each.deaf for each in found)),
        mixed=next((each.mixed for each in found if each.mixed), ""),
        earlier=frozenset[int]().union(*(each.earlier for each in found)),
        inferred=frozenset[str]().union(*(each.inferred for each in found)),
    )
