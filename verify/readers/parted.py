"""Dumps of two jobs whose ranks do not meet: ranks 0 and 1 of one, 2 and 3 of the other, in one folder.

No two of them are of one rank, so that nothing is there twice. But ranks of one job agree on how many they are, and no
collective ends on one of them before another one has called it. Where dumps tell otherwise, and no difference of two
hosts' clocks explains it, they are of two jobs, or of two starts of one: those that had ended before the others began
are left out; else nobody can be blamed, and the line that says so has a command for each job where names or folders
part them. Where their clocks may differ so, it is not certain, and whatever is found depends on it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from kernel.errors import UsageError
from verify import words
from verify.readers.lives import SECOND, SKEW_S, commands, life_of, patterns

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from verify.readers.calls import Dump, Name, Span


class Parties(NamedTuple):
    """Ranks of two jobs, and how that is known. Ranks of which it is not known are in neither. sure: that they are."""

    one: frozenset[int]
    other: frozenset[int]
    why: str
    sure: bool = True


class Kept(NamedTuple):
    """Dumps of one job. mixed: why they may be of two all the same, "" where nothing says so."""

    dumps: dict[int, Dump]
    mixed: str = ""


def of_one_job(dumps: Mapping[int, Dump], unknown: list[str]) -> Kept:
    """The dumps of the newest job, with a line in `unknown` for what is left out, or not certain. Raises UsageError,
    one line, where jobs ran at the same time.
    """
    left = dict(dumps)
    while (found := _by_size(left) or _by_time(left)) is not None:
        if not found.sure:
            unknown.append(f"{found.why}: the clocks of their hosts differ, or their dumps are of two jobs")
            return Kept(left, found.why)
        early, late = sorted((found.one, found.other), key=lambda ranks: _last(left, ranks))
        if not 0 < _last(left, early) < _began(left, late):
            raise _refusal(found, left)
        names = ", ".join(left[rank].path.name for rank in sorted(early)[:3])
        more = f" and {len(early) - 3} more" if len(early) > 3 else ""
        unknown.append(f"{names}{more}: not used: of an earlier run: {found.why}")
        left = {rank: dump for rank, dump in left.items() if rank not in early}
    named = patterns(left)
    if 1 < len(named) <= 4 and not any(dump.spans for dump in left.values()):
        told = " and ".join(named)
        unknown.append(f"{told}: whether dumps so named are of one job is not in them")
    return Kept(left)


def _by_size(dumps: Mapping[int, Dump]) -> Parties | None:
    """By the size of the group of all ranks, where all who tell it say consistently who is in it."""
    sizes: dict[int, set[int]] = defaultdict(set)
    known: dict[int, bool] = {}
    for rank, dump in dumps.items():
        for (_, described), members in dump.groups.items():
            if described == "default_pg" and rank < len(members):
                # By identity: dumps share their lists of members, which may be long.
                if id(members) not in known:
                    known[id(members)] = members == tuple(range(len(members)))
                if known[id(members)]:
                    sizes[len(members)].add(rank)
    if len(sizes) < 2:
        return None
    # Of more than two, one after the other.
    parties = sorted(sizes.items(), key=lambda each: (len(each[1]), each[0]))[-2:]
    told = [f"{words.ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} of {size}" for size, ranks in parties]
    one, other = (frozenset(ranks) for _, ranks in parties)
    return Parties(one, other, " and ".join(told))


def _by_time(dumps: Mapping[int, Dump]) -> Parties | None:
    """By a collective that ended on some before others called it."""
    skew = int(SKEW_S * SECOND)
    seen: dict[tuple[Name, tuple[int, ...], int], dict[int, Span]] = defaultdict(dict)
    again = {name for dump in dumps.values() for name in dump.again}
    for rank, dump in dumps.items():
        for span in dump.spans:
            # Of a name that several groups have, only who is in it tells which it is.
            if span.group not in again and (members := dump.groups.get(span.group, ())):
                seen[span.group, members, span.sequence][rank] = span
    unsure: Parties | None = None
    for (group, _, sequence), spans in seen.items():
        first = min(spans, key=lambda rank: spans[rank].ended_ns)
        late = frozenset(rank for rank in spans if spans[rank].began_ns > spans[first].ended_ns + skew)
        if not late:
            continue
        early = frozenset(spans) - late
        last = max(late, key=lambda rank: spans[rank].began_ns)
        gap = (min(spans[rank].began_ns for rank in late) - spans[first].ended_ns) / SECOND
        call = f"call {sequence} on {group[1] or group[0]}"
        why = f"{call} ended on {words.ranks(early)} {gap:.0f} s before {words.ranks(late)} made it"
        both = [(mine[first], mine[last]) for mine in seen.values() if first in mine and last in mine]
        found = Parties(early, late, why, sure=not _of_two_clocks(both))
        if found.sure:
            return found
        unsure = unsure or found
    return unsure


def _of_two_clocks(both: Collection[tuple[Span, Span]]) -> bool:
    """Whether one difference of two clocks makes sense of all collectives that two ranks have ended together."""
    least = max(other.began_ns - one.ended_ns for one, other in both)
    most = min(other.ended_ns - one.began_ns for one, other in both)
    return least <= most


def _began(dumps: Mapping[int, Dump], ranks: frozenset[int]) -> int:
    """When the first of some ranks began; 0 where no dump holds its first call."""
    lives = [life for rank in ranks if (life := life_of(dumps[rank])) is not None and life.whole]
    return min((life.first_ns for life in lives), default=0)


def _last(dumps: Mapping[int, Dump], ranks: frozenset[int]) -> int:
    return max(dumps[rank].moved_ns for rank in ranks)


def _refusal(found: Parties, dumps: Mapping[int, Dump]) -> UsageError:
    one, other = (dumps[min(ranks)].path for ranks in (found.one, found.other))
    what = f"{one} and {other} are of two jobs, or of two starts of one: {found.why}"
    if told := commands(list(dumps.items()), (found.one, found.other)):
        return UsageError(f"{what}: look at one at a time: {told}")
    return UsageError(f"{what}: name the dumps of one")
