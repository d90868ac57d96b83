"""Which sends and receives of several dumps meet: the n-th of a pair of ranks on one side with the n-th on the other.

Where the dumps hold everything since the start they are counted; in a group of two, one counter serves both ends;
otherwise the unfinished ones are paired by their order, and their arguments are not compared (`Side.loose`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.readers.calls import Batch, Column, Dump, Group


@dataclass(slots=True)
class Side:
    """The transfers of one direction of a pair as one of the two ranks recorded them.

    at: their places in its column, not falling. parts: which of the transfers of that batch. seqs: as recorded.
    head: how many of the first have ended. numbered: each has the number that it recorded; else they are counted on
    from `first`. loose: their pairing was inferred.
    """

    at: array[int] = field(default_factory=lambda: array("I"))
    parts: array[int] = field(default_factory=lambda: array("I"))
    seqs: array[int] = field(default_factory=lambda: array("q"))
    head: int = -1
    numbered: bool = False
    first: int = 0
    loose: bool = False

    def numbers(self) -> range | list[int]:
        """The number of each transfer, from 0."""
        if self.numbered:
            return [seq - 1 for seq in self.seqs]
        return range(self.first, self.first + len(self.at))


Pair = tuple["Group", int, int]
"""A group, sender and receiver."""


def ends_of(batch: Batch, rank: int, group: Group) -> list[tuple[int, int, int]]:
    """Which of the transfers of a batch can meet another one: place in the batch, sender, receiver."""
    found = []
    for part, call in enumerate(batch.calls):
        if call.ends is not None and max(call.ends) < len(group.members):
            source, target = (group.members[end] for end in call.ends)
            if rank in (source, target) and source != target:
                found.append((part, source, target))
    return found


class Transfers:
    """All transfers of a job. columns: group -> rank -> its transfers. silent: rank -> rows that can meet nothing."""

    def __init__(self, dumps: Mapping[int, Dump], columns: dict[Group, dict[int, Column]]) -> None:
        self.columns = columns
        self.pairs: dict[Pair, dict[int, Side]] = defaultdict(dict)
        self.silent: dict[int, set[int]] = {}
        self.unknown: list[str] = []
        for group, ranks in columns.items():
            for rank, column in ranks.items():
                self._collect(group, rank, column, dumps[rank])
        self._number(dumps)

    def number(self, group: Group, source: int, target: int, rank: int, at: int, part: int) -> tuple[int, bool]:
        """The number of a transfer, from 0, and whether its pairing was inferred."""
        side = self.pairs[group, source, target][rank]
        first = bisect_left(side.at, at)
        n = bisect_left(side.parts, part, first, bisect_right(side.at, at, first))
        return (side.seqs[n] - 1 if side.numbered else side.first + n), side.loose

    def _collect(self, group: Group, rank: int, column: Column, dump: Dump) -> None:
        ends: dict[int, list[tuple[int, Side, bool]]] = {}
        for at, (kind, seq) in enumerate(zip(column.kinds, column.seqs, strict=True)):
            if (mine := ends.get(kind)) is None:
                batch = dump.batches[kind]
                mine = ends[kind] = [
                    (part, self.pairs[group, source, target].setdefault(rank, Side()), batch.calls[part].done)
                    for part, source, target in ends_of(batch, rank, group)
                ]
            for part, side, done in mine:
                if side.head < 0 and not done:
                    side.head = len(side.at)
                side.at.append(at)
                side.parts.append(part)
                side.seqs.append(seq)
            if not mine:
                self.silent.setdefault(rank, set()).add(column.rows[at])

    def _number(self, dumps: Mapping[int, Dump]) -> None:
        guessed: set[tuple[int, int]] = set()
        counters: dict[Group, bool] = {}
        for (group, source, target), sides in self.pairs.items():
            if all(dumps[rank].whole for rank in sides):
                continue
            if len(group.members) == 2:
                if group not in counters:
                    counters[group] = _one_counter(self.columns[group], dumps)
                if counters[group]:
                    for side in sides.values():
                        side.numbered = True
                    continue
            heads = [side.head if side.head >= 0 else len(side.at) for side in sides.values()]
            for side, head in zip(sides.values(), heads, strict=True):
                side.first, side.loose = max(heads) - head, True
            if len(sides) == 2:
                guessed.add((source, target))
        if guessed:
            one, other = min(guessed)
            self.unknown.append(
                f"numbers of transfers (rank {one} to {other}{f', {len(guessed) - 1} more' * (len(guessed) > 1)}): "
                "the dumps lack the first ones, so the unfinished ones are paired in their order"
            )


def _one_counter(ranks: Mapping[int, Column], dumps: Mapping[int, Dump]) -> bool:
    """Whether the counters of two ranks agree: what both numbered alike is a send on one and its recv on the other."""
    numbered = []
    for rank, column in ranks.items():
        batches = dumps[rank].batches
        if any(batches[kind].entries > 1 for kind in set(column.kinds)) or len(set(column.seqs)) < len(column.seqs):
            return False
        numbered.append({seq: batches[kind].calls[0].ends for seq, kind in zip(column.seqs, column.kinds, strict=True)})
    shared = set(numbered[0]).intersection(*numbered[1:]) if len(numbered) > 1 else set()
    return all(len({one[seq] for one in numbered}) == 1 for seq in shared)
