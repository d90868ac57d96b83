"""Processes that a policy has started in a rank: where from, and that none of them outlives its rank.

A child of a rank may leave its session and its parent, and then nothing but its ancestry tells whose it is. So the
process that forks the ranks adopts what they orphan (a child subreaper, prctl(2)), ends it once its rank has ended, and
a rank that ends in order says first what it leaves, with the line that started it. Linux only; elsewhere nothing of
this happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import FrameType

_SET_CHILD_SUBREAPER: Final = 36
END_S: Final = 5.0
"""For what was killed to be gone; a process in the middle of a device's call may take longer, and is left to the
system."""
SPLITS: Final = ("fork", "forkpty")
"""Functions of `os` that make a copy of the rank: its loop, its sockets and its place in shared memory with it."""
STARTS: Final = (("posix_spawn", os), ("posix_spawnp", os), ("_fork_exec", subprocess), ("fork_exec", None))
"""Functions that start a program and return its process, and where they are; None: `_posixsubprocess`."""
TOLD: Final = 80
"""Characters of a command line."""


class Seen(NamedTuple):
    """A process, as /proc has it. state: R, S, T, Z, ..."""

    parent: int
    session: int
    state: str


def adopt() -> bool:
    """Be the parent of whatever this process's descendants orphan; whether the system does that."""
    with suppress(OSError, AttributeError):
        done: int = ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        return done == 0
    return False


def processes() -> dict[int, Seen]:
    """All processes of this host that can be seen, by number; none where there is no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                    found[int(name)] = Seen(int(fields[1]), int(fields[3]), fields[0])
    return found


def below(roots: Collection[int], seen: Mapping[int, Seen]) -> set[int]:
    """The descendants of some processes."""
    found: set[int] = set()
    edge = set(roots)
    while edge:
        edge = {pid for pid, each in seen.items() if each.parent in edge} - found
        found |= edge
    return found


def adopted(keep: Collection[int], ended: Collection[int], seen: Mapping[int, Seen]) -> set[int]:
    """What this process has adopted and is to be ended, with all that came of it.

    keep: children that it has forked and that live. ended: ranks that have ended: while others live, what left its
    rank's session may be of one of those, and stays until they have ended too.
    """
    me = os.getpid()
    orphans = {pid for pid, each in seen.items() if each.parent == me and pid not in keep}
    if keep:
        orphans = {pid for pid in orphans if seen[pid].session in ended}
    return orphans | below(orphans, seen)


def of_sessions(leaders: Collection[int], seen: Mapping[int, Seen]) -> set[int]:
    """Members of the sessions that ranks led, with all that came of them; the leaders themselves are not among them."""
    members = {pid for pid, each in seen.items() if each.session in leaders and pid not in leaders}
    return members | below(members, seen)


def end(find: Callable[[Mapping[int, Seen]], set[int]]) -> None:
    """Kill what `find` tells of, until it tells of nothing; one that is killed may have started others meanwhile."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        seen = processes()
        found = find(seen)
        for pid in found:
            with suppress(OSError):
                if seen[pid].state == "Z":
                    os.waitpid(pid, os.WNOHANG)
                else:
                    os.kill(pid, signal.SIGKILL)
        if not any(seen[pid].state != "Z" for pid in found):
            return
        time.sleep(0.005)


class Offspring:
    """What a policy starts in this rank's process, from now on.

    Splitting the rank in two is refused there: the copy would go on as the same rank.
    """

    def __init__(self) -> None:
        self._sites: dict[int, str] = {}
        adopt()  # a daemon too is then below this process, while it lives
        if sys.platform == "linux":
            for name in SPLITS:
                setattr(os, name, _refusing(name, getattr(os, name)))
            for name, home in STARTS:
                self._watch(name, home or sys.modules.get("_posixsubprocess"))

    def _watch(self, name: str, home: Any) -> None:
        start = getattr(home, name, None)
        if start is None:
            return

        def started(*args: Any, **settings: Any) -> int:
            pid: int = start(*args, **settings)
            self._sites[pid] = site(sys._getframe(1))
            return pid

        setattr(home, name, started)

    def end(self) -> list[str]:
        """End all that is left; a clause about each that a policy has started, such as `process 7 (sleep 60), started
        at /home/me/calm.py:14 in turn`."""
        seen, me = processes(), os.getpid()
        found = {pid for pid in below([me], seen) if seen[pid].state != "Z"}
        said = []
        for pid in sorted(found):
            # A child of what was started, as a shell starts some, is of that line; a library's own has none.
            known = next((each for each in (pid, *_above(pid, seen)) if each == me or each in self._sites), None)
            where = self._sites.get(known, "") if known is not None else ""
            if known == pid and not where:
                continue
            said.append(f"process {pid} ({command(pid)})" + (f", started at {where}" if where else ""))
        if found:
            end(partial(below, [me]))
        return said


def _above(pid: int, seen: Mapping[int, Seen]) -> list[int]:
    found: list[int] = []
    while (pid in seen) and (pid := seen[pid].parent) > 1 and pid not in found:
        found.append(pid)
    return found


def command(pid: int) -> str:
    """What a process runs, in one line that is not too long."""
    with suppress(OSError):
        text = " ".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").split())
        return (text if len(text) <= TOLD else f"{text[: TOLD - 2]}..") or "its command is not known"
    return "its command is not known"


def site(frame: FrameType | None) -> str:
    """`/home/me/calm.py:14 in turn`: the innermost frame that is neither ours nor a library's; "" for none."""
    from verify.sources import foreign

    while frame is not None:
        code = frame.f_code
        if foreign(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def _refusing(name: str, original: Callable[[], Any]) -> Callable[[], Any]:
    def split() -> Any:
        if site(sys._getframe(1)):
            raise RuntimeError(
                f"a policy must not call os.{name}() in a rank, whose copy would go on as the same rank: start a"
                " program with subprocess"
            )
        return original()

    return split
