"""Which of several dumps of one rank count, and which dumps are of another job, or of one that was started again since.

A process numbers its records and notes when it made each: two dumps in which one record has two times, or times do not
grow with the records, are of two processes. Where one dump was written before the other process began, the later one
counts, and other ranks' dumps of before are left out with it. Else they may be ranks of two jobs: nothing tells whose
dumps the other ranks' are, unless folders or names do.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from kernel.errors import UsageError
from verify.matching import JOINT
from verify.readers.jobs import APART_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from verify.readers.calls import Dump

SECOND: Final = 1_000_000_000
SKEW_S: Final = 10.0
"""By so much the clocks of two hosts may differ."""
STEP: Final = 60 * SECOND
"""A clock that is set may go back by so much."""


class Life(NamedTuple):
    """From the first to the last time in a dump. whole: nothing was recorded before."""

    first_ns: int
    last_ns: int
    whole: bool


def life_of(dump: Dump) -> Life | None:
    """None where it tells no time."""
    return Life(dump.moments[0].created_ns, dump.moved_ns, dump.whole) if dump.moments else None


def newest(found: Mapping[int, Sequence[Dump]], unknown: list[str]) -> dict[int, Dump]:
    """Of each rank the dump that saw the latest call, without those of an earlier run; a line in `unknown` for what is
    left out. Raises UsageError, one line, for dumps of two jobs.
    """
    restarts: list[tuple[Life, Life]] = []
    for rank, early, late in _parted(found):
        before, after = life_of(early), life_of(late)
        if before is None or after is None or not _written_before(early, after):
            raise _two_jobs(rank, early, late, [(rank, each) for rank, mine in found.items() for each in mine])
        restarts.append((before, after))
    kept: dict[int, Dump] = {}
    for rank, mine in sorted(found.items()):
        *others, kept[rank] = sorted(mine, key=_age)
        if others:
            names = ", ".join(dump.path.name for dump in others[:3]) + f" and {len(others) - 3} more" * (
                len(others) > 3
            )
            unknown.append(
                f"{len(mine)} dumps of rank {rank}: {kept[rank].path.name}, which saw the latest call, is used,"
                f" without {names}"
            )
    begun = {rank: life for rank, dump in kept.items() if (life := life_of(dump)) is not None and life.whole}
    latest = max((life.first_ns for life in begun.values()), default=0)
    old = {rank: dump for rank, dump in kept.items() if restarts or dump.moved_ns < latest}
    stale = {rank: why for rank, dump in old.items() if (why := _stale(dump, restarts, kept, begun))}
    for rank, why in stale.items():
        unknown.append(f"{kept[rank].path.name}: not used: it is of an earlier run: {why}")
    return {rank: dump for rank, dump in kept.items() if rank not in stale}


def _parted(found: Mapping[int, Sequence[Dump]]) -> Iterator[tuple[int, Dump, Dump]]:
    """Ranks of which there are dumps of two processes, the earlier and the later, each compared with the one before."""
    for rank, mine in sorted(found.items()):
        if len(mine) < 2:
            continue
        alike: dict[frozenset[str], list[Dump]] = {}
        for dump in sorted(mine, key=_age):
            alike.setdefault(backends_of(dump), []).append(dump)
        for some in alike.values():
            yield from ((rank, early, late) for early, late in pairwise(some) if two_processes(early, late))


def two_processes(one: Dump, other: Dump) -> bool:
    """Whether two dumps of one rank cannot be of one process. Each backend has records of its own."""
    if not backends_of(one) & backends_of(other):
        return False
    moments = sorted({*one.moments, *other.moments})
    return any(
        now.record == then.record or now.created_ns + STEP < then.created_ns for then, now in pairwise(moments)
    )


def _written_before(dump: Dump, life: Life) -> bool:
    """Whether a file is as old as that: a copy may be younger than what it holds, and never older."""
    try:
        return dump.moved_ns < life.first_ns and dump.path.stat().st_mtime_ns < life.first_ns
    except OSError:
        return False


def backends_of(dump: Dump) -> frozenset[str]:
    """Of its calls."""
    kinds = {kind for column in dump.columns.values() for kind in set(column.kinds)}
    return frozenset(dump.batches[kind].backend for kind in kinds)


def _stale(
    dump: Dump, restarts: Sequence[tuple[Life, Life]], others: Mapping[int, Dump], begun: Mapping[int, Life]
) -> str:
    """Why a dump is of a run before that of the others; "" where it may be of the same. begun: of ranks whose dumps
    hold their first call.
    """
    life = life_of(dump)
    if life is None:
        return ""
    for before, after in restarts:
        if life.first_ns <= before.last_ns and life.last_ns < after.first_ns:
            return "another rank was started again since"
    for rank, late in begun.items():
        gap = (late.first_ns - life.last_ns) / SECOND
        if gap > APART_S or (gap > SKEW_S and _ended_with(dump, rank)):
            return f"it ends {gap:.0f} s before {others[rank].path.name} begins"
    return ""


def _ended_with(dump: Dump, rank: int) -> bool:
    """Whether it shows that a collective has ended which cannot end without `rank`, and when."""
    for (name, transfer), column in dump.columns.items():
        if not transfer and rank in dump.groups.get(name, ()):
            batches = (dump.batches[kind] for kind in set(column.kinds))
            if any(each.done and each.backend == "nccl" and each.operation in JOINT for each in batches):
                return True
    return False


def of_equal(rank: int, one: Dump, other: Dump) -> str:
    """What two dumps of a rank tell that are equal to the last byte: the same once, and perhaps that it stood still."""
    try:
        apart = abs(one.path.stat().st_mtime_ns - other.path.stat().st_mtime_ns) / SECOND
    except OSError:
        return ""
    if apart < 1:
        return ""
    alike = one.path.name == other.path.name
    both = f"{one.path} and {other.path}" if alike else f"{one.path.name} and {other.path.name}"
    return f"{both} are equal: a copy, or rank {rank} recorded nothing in the {apart:.0f} s between them: counted once"


def _two_jobs(rank: int, one: Dump, other: Dump, everything: Sequence[tuple[int, Dump]]) -> UsageError:
    """The line that says so, with a command for each job where folders, or names without the rank, part them."""
    both = f"{one.path} and {other.path} are of two processes, and both named for rank {rank}"
    within = "if that is within a host, name them for their ranks in the job"
    what = f"{both}: {within}; if of two jobs, or two starts of one"
    folders = {str(dump.path.parent) for _, dump in everything}
    if told := commands(everything):
        return UsageError(f"{what}, look at one at a time: {told}")
    where = "folder" if len(folders) == 1 else "folders"
    return UsageError(f"{what}, sort the dumps in the {where} by job, and name those of one")


def patterns(dumps: Mapping[int, Dump]) -> list[str]:
    """How the files of some ranks are named, with a star in place of the rank, whatever folders they are in."""
    return sorted({_pattern(rank, dump).rpartition("/")[2] for rank, dump in dumps.items()})


def commands(everything: Sequence[tuple[int, Dump]], parties: Sequence[frozenset[int]] = ()) -> str:
    """A command for each job, where folders, or names without the rank, part their dumps; "" where they do not.

    parties: ranks of different jobs; without them, the jobs are those that have a dump of each rank.
    """
    for label in (lambda _, dump: str(dump.path.parent), _pattern):
        parts: dict[str, list[int]] = {}
        for each, dump in everything:
            parts.setdefault(label(each, dump), []).append(each)
        if parties:
            mixed = any(sum(bool(party.intersection(ranks)) for party in parties) > 1 for ranks in parts.values())
        else:
            mixed = len({tuple(sorted(ranks)) for ranks in parts.values()}) > 1
        if len(parts) > 1 and not mixed and all(len(set(ranks)) == len(ranks) for ranks in parts.values()):
            return "; ".join(f"`turnstile hang {part}`" for part in sorted(parts))
    return ""


def _pattern(rank: int, dump: Dump) -> str:
    """A file's name with a star for its rank, the last number that is equal to it."""
    places = [each for each in re.finditer(r"\d+", dump.path.name) if int(each[0]) == rank]
    if not places:
        return str(dump.path)
    start, end = places[-1].span()
    return str(dump.path.parent / f"{dump.path.name[:start]}*{dump.path.name[end:]}")


def _age(dump: Dump) -> tuple[int, int, str]:
    return dump.moved_ns, dump.entries, str(dump.path)
