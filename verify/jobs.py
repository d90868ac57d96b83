"""Which job a process belongs to: `pgrep -f train.py` finds the ranks of every job on the host, and ranks repeat.

Ranks of one job have in their environment alike what their launcher put there: a port, an id of the run, how many ranks
there are. Where that does not part two processes of one rank, the address of the job's master and the launcher do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify import words
from verify.lineage import ancestors

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from pathlib import Path

SHARED: Final = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "WORLD_SIZE")
"""What all ranks of a job have in their environment alike."""
NAMES: Final = (*SHARED, "MASTER_ADDR")
"""What is printed of a job, where it tells it from the others."""
MOST: Final = 64
"""Pids of one command that are printed."""


def refuse_several(
    ranks: Mapping[int, int | None], environments: Mapping[int, Mapping[str, str]], launcher: Callable[[int], int]
) -> None:
    """Raise UsageError, one line with the command for each job, where processes are ranks of several jobs.

    ranks: pid -> its rank; None where it is not known: such a process is of no job in particular. launcher: of a pid.
    """
    known = {pid: rank for pid, rank in ranks.items() if rank is not None}
    told = {pid: environments[pid] for pid in known}
    # What one of them lacks does not tell it from the others.
    common = [name for name in SHARED if all(name in each for each in told.values())]
    jobs = _parted(known, lambda pid: tuple(told[pid][name] for name in common))
    for key in (lambda pid: told[pid].get("MASTER_ADDR"), launcher):
        jobs = [part for job in jobs for part in (_parted(job, key) if _twice(job, known) else [job])]
    for job in jobs:
        if twice := _twice(job, known):
            one, other = twice
            raise UsageError(f"--pid {one} and --pid {other} are both rank {known[one]}: give the pids of one job")
    if len(jobs) > 1:
        differ = [name for name in NAMES if len({told[job[0]].get(name) for job in jobs}) > 1][:2]
        raise _several([(job, [f"{name}={told[job[0]].get(name, '')}" for name in differ]) for job in jobs], known)


def refuse_records(paths: Mapping[int, Sequence[Path]], ranks: Mapping[int, int | None]) -> None:
    """The same where two processes keep the record of one rank, by the folders of their records."""
    keep = {pid: mine[0].parent for pid, mine in paths.items() if mine}
    jobs = _parted(keep, keep.__getitem__)
    if len(jobs) > 1:
        raise _several([(job, [f"record in {keep[job[0]]}"]) for job in jobs], ranks)


def launcher_of(pid: int) -> int:
    """Its parent, 0 if that is not seen."""
    return next(iter(ancestors(pid)), 0)


def _several(jobs: Sequence[tuple[Sequence[int], Sequence[str]]], ranks: Mapping[int, int | None]) -> UsageError:
    commands = []
    for job, told in jobs:
        numbers = [rank for pid in job if (rank := ranks.get(pid)) is not None]
        what = ", ".join([*([words.ranks(numbers)] if numbers else []), *told])
        commands.append(f"`turnstile hang {' '.join(f'--pid {pid}' for pid in job[:MOST])}` ({what})")
    return UsageError(f"--pid: processes of {len(jobs)} jobs: look at one at a time: {'; '.join(commands)}")


def _parted(pids: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Those of equal key together, in their order."""
    found: dict[Hashable, list[int]] = {}
    for pid in pids:
        found.setdefault(key(pid), []).append(pid)
    return list(found.values())


def _twice(job: Iterable[int], ranks: Mapping[int, int]) -> tuple[int, int] | None:
    """Two processes of one rank, if there are."""
    seen: dict[int, int] = {}
    for pid in job:
        if ranks[pid] in seen:
            return seen[ranks[pid]], pid
        seen[ranks[pid]] = pid
    return None
