"""Which processes of this host hold the other end of what a thread waits for: of a pipe, a socket, a lock on a file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_ACCESS: Final = 0o3
LOCKS: Final = Path("/proc/locks")
READS, WRITES, BOTH = 0, 1, 2
"""What a descriptor is open for (fcntl(2): O_RDONLY, O_WRONLY, O_RDWR)."""


class Holders(NamedTuple):
    """pids: whose descriptors they are. whole: whether every process could be looked at, so that there is no other."""

    pids: frozenset[int]
    whole: bool


def holders(links: Collection[str], wanted: int | None = None) -> Holders:
    """The processes that have one of `links` open, as /proc/PID/fd names what is open (`pipe:[71]`, `/tmp/fifo`).

    wanted: READS or WRITES, to leave out descriptors that are open for the other one alone.
    """
    pids, whole = set(), True
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with os.scandir(f"/proc/{name}/fd") as descriptors:
                for each in descriptors:
                    with suppress(OSError):
                        if os.readlink(each.path) in links and _open_for(name, each.name, wanted):
                            pids.add(int(name))
                            break
        except PermissionError:
            whole = False
        except OSError:
            continue
    return Holders(frozenset(pids), whole)


def _open_for(pid: str, descriptor: str, wanted: int | None) -> bool:
    return wanted is None or mode(int(pid), int(descriptor)) in (wanted, BOTH)


def mode(pid: int, descriptor: int) -> int:
    """What a descriptor of a process is open for; BOTH where that is not told."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(errors="replace").splitlines():
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & _ACCESS
    return BOTH


def lockers(pid: int, descriptor: int) -> Holders:
    """The processes that hold the lock for which one waits on the file that a descriptor is of (/proc/locks).

    The system lists who waits below the lock that is in the way, under one number. A file may have others as well, of
    other parts of it; and a lock that is held on another host is in no list here: then it is not known who holds it.
    """
    mine: dict[str, set[int]] = {}
    waits: set[str] = set()
    file, others = "", set()
    with suppress(OSError, ValueError, IndexError):
        about = os.stat(f"/proc/{pid}/fd/{descriptor}")
        file = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    with suppress(OSError, ValueError, IndexError):
        for line in LOCKS.read_text(errors="replace").splitlines():
            number, *fields = line.split()
            if fields[0] == "->":
                waits |= {number} if int(fields[4]) == pid else set()
                continue
            mine.setdefault(number, set()).add(int(fields[3]))
            others |= {int(fields[3])} if fields[4] == file else set()
    pids = {each for number in waits for each in mine.get(number, ())}
    # A process of another PID namespace has no number here.
    return Holders(frozenset(pids or others), bool(pids) and min(pids) > 0)


def named(pids: Collection[int], most: int = 2) -> str:
    """`pid 71 (python)`, `pids 71 (python), 72 (pt_data_worker) and 3 more`."""
    told = [f"{pid} ({_comm(pid)})" for pid in sorted(pids)[:most]]
    more = len(pids) - len(told)
    listed = ", ".join(told) + (f" and {more} more" if more else "")
    return f"pid{'s' * (len(pids) > 1)} {listed}"


def _comm(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "gone"
    return "".join(sign if sign.isprintable() else "?" for sign in text)
