"""Which of some processes are the ranks, where a pattern found their wrappers, launchers and workers as well.

`pgrep -f train.py` also finds `timeout 600 python train.py` and `torchrun train.py`, whose command lines name the
script, and the workers that a rank has forked, whose command line is its own. Their stacks say nothing of the rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

PYTHON: Final = re.compile(r"(^|/)(lib)?(python|pypy)[\d.]*[a-z]*(\.so[.\d]*)?( \(deleted\))?$")
DEEPEST: Final = 64
"""Ancestors that are asked for."""


def is_python(pid: int) -> bool | None:
    """Whether an interpreter runs in a process: its program, or a library that it has loaded; None if it may not be
    asked.
    """
    place = Path(f"/proc/{pid}")
    try:
        if PYTHON.search(str((place / "exe").readlink())):
            return True
        with open(place / "maps", errors="replace") as maps:
            found = {path[0] for line in maps if (path := line.rstrip("\n").split(maxsplit=5)[5:])}
    except OSError:
        return None
    # A process that has just ended, or is about to start its program, has no memory.
    return any(PYTHON.search(name) for name in found) if found else None


def ancestors(pid: int) -> list[int]:
    """The parents of a process, the nearest first, as far as they are seen."""
    found: list[int] = []
    while len(found) < DEEPEST:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            pid = int(fields[1])
        except (OSError, ValueError, IndexError):
            break
        if pid < 1:
            break
        found.append(pid)
    return found


def only_ranks(pids: Sequence[int], ranks: Mapping[int, int | None], owners: Collection[int]) -> list[int]:
    """Those of `pids` that are ranks, in their order. ranks: as the environment says. owners: that write a record.

    Left out, if others remain: what has no interpreter; what has no rank and started one that is given (a launcher);
    and of a process and its descendants with one rank all but the one that keeps a record, else the first of them,
    which forked the others.
    """
    kept = [pid for pid in pids if is_python(pid) is not False] or list(pids)
    above = {pid: set(ancestors(pid)) for pid in kept}
    launchers = {
        pid
        for pid in kept
        if ranks[pid] is None and any(pid in above[other] and ranks[other] is not None for other in kept)
    }
    kept = [pid for pid in kept if pid not in launchers]
    left = []
    for pid in kept:
        family = [
            other
            for other in kept
            if other != pid and ranks[other] == ranks[pid] is not None and (other in above[pid] or pid in above[other])
        ]
        own = pid in owners
        better = any((other in owners, other in above[pid]) > (own, False) for other in family)
        if not better:
            left.append(pid)
    return left
