"""Processes that were given and are no ranks: a shell, a launcher, a worker of a rank, another Python program.

Their stacks say nothing of a job. A rank keeps a record, or has torch loaded, or is a Python program that was started
with a RANK in its environment.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from verify.lineage import PYTHON, ancestors, is_python

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

TORCH: Final = re.compile(r"/(libtorch(_\w+)?|libc10(_\w+)?)\.(so|dylib)\b|/torch/_C\b")
"""Files that a process has mapped in which torch is loaded."""
WORKER: Final = re.compile(r"\bmultiprocessing\b.*\b(spawn|forkserver|resource_tracker)\b|_inductor/compile_worker")
"""Commands of processes that Python, or torch, starts to work for another one."""
LAUNCHER: Final = re.compile(r"torchrun|torch[./]distributed[./](run|launch)\b|accelerate|deepspeed|\blaunch\b|horovod")
BACKEND: Final = re.compile(r"pt_gloo_|gloo_tcp|pt_nccl_|NCCL ")
"""How threads of the backends are called: whoever has one is in a group of ranks."""
MOST: Final = 64
"""Pids that a line holds."""
_LONGEST: Final = 60


def strangers(
    pids: Sequence[int], rank_of: Callable[[int], int | None], owners: Collection[int], beside: bool
) -> tuple[list[int], list[str]]:
    """Those of `pids` that may be ranks, and a line for each other one that no pattern finds with them.

    rank_of: as the environment says. owners: that write a record. beside: there is other evidence. Raises UsageError,
    one line, where none is left and there is no other evidence.
    """
    why = {pid: text for pid in pids if (text := _no_rank(pid, rank_of, owners))}
    kept = [pid for pid in pids if pid not in why]
    lines = [f"pid {pid} ({command(pid)}): no rank: {text}" for pid, text in why.items()]
    if not kept and lines and not beside:
        more = f" (and {len(lines) - 1} more that {'is' if len(lines) == 2 else 'are'} none)" if len(lines) > 1 else ""
        raise UsageError(f"--{lines[0]}{more}: {_instead(list(why), rank_of)}")
    apart = [line for pid, line in zip(why, lines, strict=True) if not _found_with(pid, kept)]
    return kept, [f"{line}: not used" for line in apart]


def _found_with(pid: int, ranks: Sequence[int]) -> bool:
    """Whether a pattern finds a process beside one of some ranks, as `pgrep -f train.py` does wrappers, launchers and
    workers: it is above or below it, and names what that runs. That is no news.
    """
    told, above = " ".join(_words(pid)), ancestors(pid)
    return any(
        any(word in told for word in _words(rank)[1:] if len(word) > 2 and not word.startswith("-"))
        for rank in ranks if rank in above or pid in ancestors(rank)
    )  # fmt: skip


def command(pid: int) -> str:
    """What runs in a process, as people typed it; in brackets its name, where it is one of the kernel's."""
    words = _words(pid)
    told = " ".join(words) if words else f"[{_read(pid, 'comm').strip() or 'unknown'}]"
    told = "".join(sign if sign.isprintable() else "?" for sign in told)
    return told if len(told) <= _LONGEST else f"{told[: _LONGEST - 3]}..."


def _no_rank(pid: int, rank_of: Callable[[int], int | None], owners: Collection[int]) -> str:
    """Why a process is no rank; "" where it may be one."""
    if pid in owners or _in_a_group(pid):
        return ""
    python, torch, rank = is_python(pid), _torch(pid), rank_of(pid)
    if python is None and torch is None:
        words = _words(pid)
        # Who may not look at it can still see its command.
        if words and PYTHON.search(words[0]):
            return ""
        return "by its command it is no Python program; if it is one after all, run this as its user, or as root"
    if not python and not torch:
        return "it is not a Python process, and has no torch"
    if (owner := _works_for(pid, rank, rank_of)) is not None:
        whose = rank_of(owner)
        return f"it works for pid {owner}" + (f", which is rank {whose}" if whose is not None else "")
    launches = not torch or LAUNCHER.search(" ".join(_words(pid)))
    if rank is None and launches and (ranks := _started(pid, rank_of)):
        return f"it has started {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, and waits for them"
    return "" if torch or rank is not None else "a Python process without torch, and without RANK in its environment"


def _in_a_group(pid: int) -> bool:
    return any(BACKEND.match(_text(task)) for task in Path(f"/proc/{pid}/task").glob("*/comm"))


def _works_for(pid: int, rank: int | None, rank_of: Callable[[int], int | None]) -> int | None:
    """The rank that has forked or started a process to work for it, as a loader of data; None where it is not that."""
    words, above = _words(pid), [each for each in ancestors(pid) if is_python(each) and _torch(each)]
    told = " ".join(words)
    alike = [each for each in above if rank_of(each) == rank is not None and _words(each) == words]
    if alike and words:
        return alike[-1]
    # A rank may be made by torch.multiprocessing as well: only helpers that have no torch of their own are known.
    if WORKER.search(told) and above and not _torch(pid):
        return above[0]
    return None


def _started(pid: int, rank_of: Callable[[int], int | None]) -> list[int]:
    """The ranks below a process, by rank."""
    below: list[int] = []
    todo = [pid]
    while todo and len(below) < 4096:
        one = todo.pop()
        children = [
            int(each)
            for task in Path(f"/proc/{one}/task").glob("*/children")
            for each in _text(task).split()
        ]  # fmt: skip
        todo += children
        below += children
    found = [each for each in below if rank_of(each) is not None and is_python(each)]
    firsts = [each for each in found if not any(rank_of(up) == rank_of(each) for up in ancestors(each) if up in found)]
    return sorted(firsts, key=lambda each: (rank_of(each) or 0, each))


def _instead(pids: Sequence[int], rank_of: Callable[[int], int | None]) -> str:
    """What to give in their place."""
    for pid in pids:
        owner = None if not is_python(pid) else _works_for(pid, rank_of(pid), rank_of)
        ranks = [owner] if owner is not None else _started(pid, rank_of)
        # Of what has started everything on the host, whose ranks they are is not known.
        if ranks and pid != 1:
            return f"give {' '.join(f'--pid {each}' for each in ranks[:MOST])} in its place"
    return "give the pids of the ranks, as `pgrep -f train.py` finds them"


def _torch(pid: int) -> bool | None:
    """Whether torch is loaded in a process; None if it may not be asked."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            return any(TORCH.search(line) for line in maps)
    except OSError:
        return None


def _words(pid: int) -> list[str]:
    return [word for word in _read(pid, "cmdline").split("\0") if word]


def _read(pid: int, name: str) -> str:
    return _text(Path(f"/proc/{pid}/{name}"))


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[:4096].decode(errors="replace")
    except OSError:
        return ""
