"""Which calls of a large job a diagnosis can rest on; all others are left out before anything is made of them.

A call that met its counterparts, agreed with them and ended everywhere neither waits nor differs. Kept besides those
that do: the last calls of each rank (what pictures show, and where a rank stands), the last call of each member in
each group (it proves the earlier ones), the first one that others ended and a member never made, and where calls from
different lines meet and are open, one in which these lines met before and one that each line made with itself
(`verify.words.other_sites` needs them). Of several meetings that are wrong in the same way the first is kept. Numbers
rise along with the order of calls in every group, so that the first in number is the first in place; where they do not,
the group is kept whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from verify.arguments import difference, fits
from verify.events import OPERATIONS
from verify.matching import RECENT, UNEVEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from verify.events import Site, State
    from verify.readers.calls import Batch, Column, Dump, Group, Name
    from verify.readers.transfers import Side, Transfers

Kept = dict[int, "tuple[Name, bool, int]"]
"""Row of a dump -> its column and its place there."""
THRESHOLDS: int = 8


class Told(NamedTuple):
    """What a batch says when it meets others: two that are equal agree, and come from one line."""

    operation: str
    inputs: tuple[tuple[int, ...], ...] | None
    dtype: str | None
    site: Site | None
    done: bool
    fits: bool


def everything(dumps: Mapping[int, Dump]) -> dict[int, Kept]:
    """All calls of all ranks."""
    return {
        rank: {row: (*key, at) for key, column in dump.columns.items() for at, row in enumerate(column.rows)}
        for rank, dump in dumps.items()
    }


def fold(
    dumps: Mapping[int, Dump],
    collectives: Mapping[Group, dict[int, Column]],
    told: Mapping[int, Sequence[tuple[Group, int, State]]],
    transfers: Transfers,
) -> dict[int, Kept]:
    """What to keep of each rank's calls. told: calls of which only a counter tells."""
    kept: dict[int, Kept] = {rank: {} for rank in dumps}
    late = {rank: _recent(dump, transfers.silent.get(rank, ())) for rank, dump in dumps.items()}
    counted: dict[Group, dict[int, int]] = defaultdict(dict)
    for rank, calls in told.items():
        for group, number, _ in calls:
            counted[group][rank] = number
    views = _Views()
    for group, columns in collectives.items():
        wanted = _Meetings(group, columns, dumps, counted.get(group, {}), late, views).wanted()
        for rank, column in columns.items():
            mine = kept[rank]
            for at in _positions(column.seqs, wanted):
                mine[column.rows[at]] = (group.name, False, at)
    for (group, _, _), sides in transfers.pairs.items():
        columns = transfers.columns[group]
        numbers = _pair(group, sides, dumps, columns, late)
        for rank, side in sides.items():
            mine, column = kept[rank], columns[rank]
            for n in _places(side, numbers):
                at = side.at[n]
                mine[column.rows[at]] = (group.name, True, at)
    return kept


def _recent(dump: Dump, silent: Iterable[int]) -> int:
    """The row from which on the last calls of a rank stand."""
    row, left, hidden = dump.rows, RECENT, set(silent)
    while row > 0 and left > 0:
        row -= 1
        left -= row not in hidden
    return row


def _positions(seqs: array[int], wanted: set[int] | None) -> Iterable[int]:
    """Places of the wanted numbers in a column of rising ones; None: all."""
    if wanted is None:
        return range(len(seqs))
    found = ((bisect_left(seqs, seq), seq) for seq in wanted)
    return [at for at, seq in found if at < len(seqs) and seqs[at] == seq]


class _Views:
    """What batches say, each looked at once, and as a small number: equal numbers are equal words."""

    def __init__(self) -> None:
        self.words: list[Told] = []
        self._numbers: dict[Told, int] = {}
        self._seen: dict[tuple[int, int], dict[int, int]] = {}

    def column(self, batches: Sequence[Batch], members: int, kinds: array[int]) -> array[int]:
        """The words of a column of a group of so many members."""
        seen = self._seen.setdefault((id(batches), members), {})
        for kind in set(kinds):
            if kind not in seen:
                batch = batches[kind]
                told = Told(
                    batch.operation, None if batch.operation in UNEVEN else batch.inputs, batch.dtype, batch.site,
                    batch.done, fits(batch.operation, batch.backend, batch.inputs, batch.outputs, members),
                )  # fmt: skip
                seen[kind] = self._numbers.setdefault(told, len(self.words))
                if seen[kind] == len(self.words):
                    self.words.append(told)
        return array("I", map(seen.__getitem__, kinds))


class _Meetings:
    """The collectives of one group, by number as recorded."""

    def __init__(
        self, group: Group, columns: dict[int, Column], dumps: Mapping[int, Dump], counted: dict[int, int],
        late: Mapping[int, int], views: _Views,
    ) -> None:  # fmt: skip
        self.group, self.columns, self.dumps, self.counted, self.views = group, columns, dumps, counted, views
        self.late = late
        self.words = {
            rank: views.column(dumps[rank].batches, len(group.members), column.kinds)
            for rank, column in columns.items()
        }
        self.first: dict[int, int] = {}
        """Number -> what one member said."""
        self.mixed: dict[int, set[int]] = {}
        """Number -> all that was said, where it is not one and the same."""
        self.seen: dict[int, int] = {}
        """Number -> how many members' calls the dumps hold."""

    def wanted(self) -> set[int] | None:
        """The numbers to keep; None for all."""
        if not all(_rising(column.seqs) for column in self.columns.values()):
            return None
        self._meet()
        last = {rank: column.seqs[-1] for rank, column in self.columns.items()} | self.counted
        ends = sorted({last.get(member, 0) for member in self.group.members} | {*last.values()})
        keep = set(last.values())
        for rank, column in self.columns.items():
            keep.update(column.seqs[bisect_left(column.rows, self.late[rank]) :])
        keep |= self._faults(ends)
        keep |= self._unmade(ends)
        return keep

    def _meet(self) -> None:
        alike: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
        for rank, column in self.columns.items():
            alike[column.seqs.tobytes(), self.words[rank].tobytes()].append(rank)
        first, mixed, seen = self.first, self.mixed, self.seen
        for ranks in alike.values():
            seqs, words = self.columns[ranks[0]].seqs, self.words[ranks[0]]
            many = len(ranks)
            if not first:
                first.update(zip(seqs, words, strict=True))
                seen.update(dict.fromkeys(seqs, many))
                continue
            for seq, word in zip(seqs, words, strict=True):
                if (other := first.setdefault(seq, word)) != word:
                    mixed.setdefault(seq, {other}).add(word)
                seen[seq] = seen.get(seq, 0) + many

    def _said(self, seq: int) -> list[Told]:
        words = self.views.words
        return [words[word] for word in self.mixed.get(seq, (self.first[seq],))]

    def _faults(self, ends: Sequence[int]) -> set[int]:
        """Meetings that are open, and the first of each kind that differ or that no right program makes."""
        words = self.views.words
        odd = {word for word in set(self.first.values()) if not (words[word].done and words[word].fits)}
        unusual: list[int] = []
        if odd or self.mixed:
            unusual = [seq for seq, word in self.first.items() if word in odd or seq in self.mixed]
        keep: set[int] = set()
        differing: list[int] = []
        wrong: list[int] = []
        places: list[int] = []
        for seq in unusual:
            said = self._said(seq)
            if not all(each.done for each in said):
                keep.add(seq)
            if not all(each.fits for each in said):
                wrong.append(seq)
            if _differ(said):
                differing.append(seq)
            elif len({each.site for each in said}) > 1:
                places.append(seq)
        keep |= set(sorted(wrong)[:1]) | _firsts(differing, ends) | self._uneven() | self._sites(places)
        return keep

    def _sites(self, places: Sequence[int]) -> set[int]:
        """For open meetings of several lines: the first of the same lines that ended, and of each line with itself."""
        whole = len(self.group.members)
        sites = {seq: frozenset(each.site for each in self._said(seq)) for seq in places if self.seen[seq] == whole}
        ended = {seq for seq in sites if all(each.done for each in self._said(seq))}
        asked = {each for seq, each in sites.items() if seq not in ended and None not in each}
        if not asked:
            return set()
        met: dict[frozenset[Site | None], int] = {}
        for seq in sorted(ended):
            if sites[seq] in asked:
                met.setdefault(sites[seq], seq)
        alone: dict[Site | None, int] = {}
        for seq, word in self.first.items():
            if seq not in self.mixed or len({each.site for each in self._said(seq)}) == 1:
                site = self.views.words[word].site
                if self.seen[seq] == whole and site is not None and site not in alone:
                    alone[site] = seq
        return {*met.values(), *(alone[site] for each in asked for site in each if site in alone)}

    def _uneven(self) -> set[int]:
        """The first all_to_all whose members send and expect different sums, all of them known."""
        sums: dict[int, int] = {}
        unknown: set[int] = set()
        whole = len(self.group.members)
        for rank, column in self.columns.items():
            batches = self.dumps[rank].batches
            moved = {kind: batches[kind] for kind in set(column.kinds) if batches[kind].operation == "all_to_all"}
            by = {kind: difference(batch.backend, batch.inputs, batch.outputs) for kind, batch in moved.items()}
            if not any(each is None or each for each in by.values()):
                continue
            for seq, kind in zip(column.seqs, column.kinds, strict=True):
                if kind in by:
                    if (each := by[kind]) is None:
                        unknown.add(seq)
                    else:
                        sums[seq] = sums.get(seq, 0) + each
        lost = [seq for seq, each in sums.items() if each and seq not in unknown and self.seen[seq] == whole]
        return {min(lost)} if lost else set()

    def _unmade(self, ends: Sequence[int]) -> set[int]:
        """For each number after which a member made no call: the first call after it, in the order of ranks, that
        somebody has ended."""
        keep: set[int] = set()
        ranks = sorted(self.columns)
        for end in [*ends[:THRESHOLDS], *ends[-THRESHOLDS:]]:
            for rank in ranks:
                seqs = self.columns[rank].seqs
                ended = False
                for seq in seqs[bisect_left(seqs, end + 1) :]:
                    keep.add(seq)
                    if ended := any(each.done for each in self._said(seq)):
                        break
                if ended:
                    break
        return keep


def _rising(seqs: array[int]) -> bool:
    """Whether the numbers rise and start at 1 or later: 0 is told as 1 is."""
    if len(seqs) == 0 or seqs[0] < 1:
        return False
    return seqs == array("q", range(seqs[0], seqs[0] + len(seqs))) or all(map(int.__lt__, seqs, seqs[1:]))


def _differ(said: Iterable[Told]) -> bool:
    """Whether calls that meet disagree, as `Meeting.sides` tells: what one of them does not know is not compared."""
    operations, sizes, types, _, _, _ = zip(*said, strict=True)
    names = {OPERATIONS.get(each, each) for each in operations}
    return any(len(field) > 1 and not field & {None, ""} for field in (names, set(sizes), set(types)))


def _firsts(numbers: Sequence[int], ends: Sequence[int]) -> set[int]:
    """The first of the numbers between one end of a member's calls and the next."""
    found: dict[int, int] = {}
    for number in sorted(numbers):
        found.setdefault(bisect_left(ends, number), number)
    return set(found.values())


def _pair(
    group: Group, sides: Mapping[int, Side], dumps: Mapping[int, Dump], columns: Mapping[int, Column],
    late: Mapping[int, int],
) -> set[int] | None:  # fmt: skip
    """The numbers of a pair's transfers to keep: open, differing, the last ones; None for all."""
    keep: set[int] = set()
    said: list[dict[int, tuple[object, ...]]] = []
    for rank, side in sides.items():
        numbers, column, batches = side.numbers(), columns[rank], dumps[rank].batches
        if side.numbered and any(one >= other for one, other in pairwise(numbers)):
            return None
        words: dict[tuple[int, int], tuple[object, ...]] = {}
        mine: dict[int, tuple[object, ...]] = {}
        for number, at, part in zip(numbers, side.at, side.parts, strict=True):
            kind = column.kinds[at]
            if (word := words.get((kind, part))) is None:
                batch = batches[kind]
                call = batch.calls[part]
                compared = (None, None) if side.loose else (call.inputs, call.dtype)
                word = words[kind, part] = (batch.done, *compared)
            mine[number] = word
            if not word[0]:
                keep.add(number)
        keep.add(numbers[-1])
        keep.update(numbers[bisect_left(side.at, bisect_left(column.rows, late[rank])) :])
        said.append(mine)
    if len(said) == 2:
        one, other = said
        differing = (
            number
            for number, word in one.items()
            if number in other
            and any(a != b and None not in (a, b) for a, b in zip(word[1:], other[number][1:], strict=True))
        )
        keep.update(sorted(differing)[:1])
    return keep


def _places(side: Side, wanted: set[int] | None) -> Iterable[int]:
    """Places on a side of the wanted numbers."""
    if wanted is None:
        return range(len(side.at))
    if not side.numbered:
        return [number - side.first for number in wanted if 0 <= number - side.first < len(side.at)]
    return _positions(side.seqs, {number + 1 for number in wanted})
