"""What a thread waits for that lies outside of its process, and who could give it: the other end of a pipe or a socket,
whoever connects or opens a file, the owner of a lock, a child. From the system call in which it stands
(/proc/PID/task/TID/syscall, see `verify.live.timed`), its descriptors, and those of all processes.

Almost every such wait may end, and only whoever gives what is waited for knows whether it will. That nobody can give it
is shown where each holder of the other end is known, and is stuck itself.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from verify.live.children import children_of
from verify.live.holders import READS, WRITES, Holders, holders, lockers, named
from verify.live.sockets import CONNECTS, LISTENS, inet_sockets, other_end, unix_peers

WHO: Final = "\0"
"""Stands for the one who waits, in `Outside.unless`."""
MOST: Final = 256
"""Descriptors of one wait for any of several that are looked at."""
_LONGEST: Final = 200

# Call -> the kind of wait, whose first argument is the descriptor but for `open`.
_KINDS: Final = {
    "x86_64": {
        0: "read", 17: "read", 19: "read", 45: "read", 47: "read", 299: "read", 1: "write", 18: "write", 20: "write",
        44: "write", 46: "write", 42: "connect", 43: "accept", 288: "accept", 72: "lock", 73: "lock", 2: "open",
        257: "openat", 437: "openat", 7: "poll", 271: "poll", 23: "select", 270: "select", 232: "epoll", 281: "epoll",
        441: "epoll", 61: "child", 247: "child",
    },
    "aarch64": {
        63: "read", 65: "read", 67: "read", 207: "read", 212: "read", 64: "write", 66: "write", 68: "write",
        206: "write", 211: "write", 203: "connect", 202: "accept", 242: "accept", 25: "lock", 32: "lock", 56: "openat",
        437: "openat", 73: "poll", 72: "select", 22: "epoll", 441: "epoll", 260: "child", 95: "child",
    },
}  # fmt: skip
"""Numbers of the calls that may wait for what is outside, by machine (asm/unistd.h)."""


class Verb(NamedTuple):
    """What the other end is to do, with and without an s."""

    base: str
    third: str


SENDS, TAKES = Verb("send through", "sends through"), Verb("take what comes through", "takes what comes through")
WRITE, READ = Verb("write to", "writes to"), Verb("read from", "reads from")


class Outside(NamedTuple):
    """unless: what must not happen for the wait to last, a clause in which WHO stands for the one who waits.

    holders: the processes that can end it, None where anybody may come, or not all of them are known.
    """

    unless: str
    holders: frozenset[int] | None = None


def beyond(pid: int, tid: int | None = None, machine: str | None = None) -> Outside | None:
    """What a thread waits for outside of its process; None where it does not, or that is not told. tid: None for the
    main thread.
    """
    task = Path(f"/proc/{pid}/task/{pid if tid is None else tid}")
    with suppress(OSError, ValueError, IndexError, struct.error):
        number, *words = (task / "syscall").read_text().split()
        kind = _KINDS.get(machine or platform.machine(), {}).get(int(number), "")
        values = [int(each, 16) for each in words[:6]]
        descriptor = values[0] & 0x7FFFFFFF
        match kind:
            case "read" | "write":
                return _end(pid, descriptor, WRITES if kind == "read" else READS)
            case "connect":
                return _connects(pid, descriptor)
            case "accept":
                return _end(pid, descriptor, WRITES)
            case "lock":
                return _lock(pid, descriptor)
            case "open" | "openat":
                return _opens(pid, _path(pid, values[kind == "openat"]), values[1 + (kind == "openat")])
            case "poll" | "select" | "epoll":
                return _any(pid, _polled(pid, kind, values))
            case "child":
                return _child(pid)
            case _:
                pass
    return None


def _link(pid: int, descriptor: int) -> str:
    return os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _told(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:_LONGEST]


def _end(pid: int, descriptor: int, needs: int) -> Outside:
    """What a transfer through a descriptor waits for. needs: what its other end is open for, WRITES to be read from."""
    link = _link(pid, descriptor)
    if link.startswith("socket:["):
        return _socket(pid, int(link[8:-1]), SENDS if needs == WRITES else TAKES)
    about = os.stat(f"/proc/{pid}/fd/{descriptor}")
    if link.startswith("pipe:[") or stat.S_ISFIFO(about.st_mode):
        what = "a pipe" if link.startswith("pipe:[") else _told(link)
        does = f"which {WHO} reads" if needs == WRITES else f"to which {WHO} writes"
        return _held(pid, holders([link], needs), WRITE if needs == WRITES else READ, f"{what}, {does}")
    if stat.S_ISCHR(about.st_mode) and needs == WRITES and link.startswith(("/dev/pts/", "/dev/tty")):
        return Outside(f"nobody types into {_told(link)}, which {WHO} reads")
    if link.startswith("anon_inode:"):
        return Outside(f"nothing comes from the {_told(link[11:]).strip('[]')} that {WHO} waits for")
    return Outside(f"{_told(link)}, with which {WHO} is busy, does not answer")


def _held(pid: int, found: Holders, verb: Verb, rest: str) -> Outside:
    """A wait for one of some processes; the one that waits is named only where there is no other."""
    pids = found.pids - {pid} or found.pids
    if not pids:
        return Outside(f"whoever holds the other end does not {verb.base} {rest}")
    who = f"{named(pids)} does not {verb.base}" if len(pids) == 1 else f"none of {named(pids)} {verb.third}"
    return Outside(f"{who} {rest}", found.pids if found.whole else None)


def _socket(pid: int, inode: int, verb: Verb) -> Outside:
    known = inet_sockets(pid)
    if (mine := known.get(inode)) is not None:
        if mine.state == LISTENS:
            return Outside(f"nobody connects to {mine.local}, where {WHO} listens")
        there = other_end(mine, known)
        if there is None:
            return Outside(f"{mine.remote} does not {verb.base} its connection with {WHO}")
        return _held(pid, holders([f"socket:[{there}]"]), verb, f"{mine.remote}, its connection with {WHO}")
    if (peer := unix_peers(pid).get(inode)) is not None:
        return _held(pid, holders([f"socket:[{peer}]"]), verb, f"a socket, its connection with {WHO}")
    return Outside(f"nothing comes through the socket for which {WHO} waits")


def _connects(pid: int, descriptor: int) -> Outside:
    inode = int(_link(pid, descriptor)[8:-1])
    mine = inet_sockets(pid).get(inode)
    if mine is not None and mine.state == CONNECTS:
        return Outside(f"{mine.remote} does not answer, to which {WHO} connects")
    return Outside(f"nobody answers the socket that {WHO} connects")


def _lock(pid: int, descriptor: int) -> Outside:
    found, file = lockers(pid, descriptor), _told(_link(pid, descriptor))
    who = named(found.pids) if found.whole else "whoever holds it"
    unless = f"{who} does not release the lock on {file}, for which {WHO} waits"
    return Outside(unless, found.pids if found.whole else None)


def _path(pid: int, address: int) -> str:
    """The name of a file, in the memory of the process; cut at the first page's end, which may be the last one."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(4096 - address % 4096).partition(b"\0")[0])


def _opens(pid: int, path: str, flags: int) -> Outside:
    """Opening a pipe that has a name waits for whoever opens it for the other direction: that may be anybody."""
    # A name that is not whole is taken from where the process stands.
    place = Path(f"/proc/{pid}/root" if path.startswith("/") else f"/proc/{pid}/cwd") / path.lstrip("/")
    if stat.S_ISFIFO(place.stat().st_mode):
        other = "reading" if flags & 3 == WRITES else "writing"
        return Outside(f"nobody opens {_told(path)} for {other}, for which {WHO} waits")
    return Outside(f"{_told(path)}, which {WHO} opens, does not answer")


def _child(pid: int) -> Outside:
    children = children_of(pid).living
    who = f"child {named(children)}" if children else "the child process"
    return Outside(f"{who}, for which {WHO} waits, does not end", children or None)


# -- waits for any of several ----------------------------------------------------------------------------------------


def _any(pid: int, polled: list[tuple[int, int]]) -> Outside | None:
    """What any of some descriptors waits for. What both ends of are held by the process itself, as an event loop's
    own socket that wakes it, comes last.
    """
    each = list(dict.fromkeys(_end(pid, descriptor, needs) for descriptor, needs in polled))
    if not each:
        return None
    foreign = [one for one in each if one.holders != frozenset({pid})]
    if not foreign:
        return each[0]
    pids: frozenset[int] | None = frozenset()
    for one in each:
        pids = None if pids is None or one.holders is None else pids | one.holders
    more = f", and {len(foreign) - 2} more are as silent" if len(foreign) > 2 else ""
    return Outside(" and ".join(one.unless for one in foreign[:2]) + more, pids)


def _polled(pid: int, kind: str, values: list[int]) -> list[tuple[int, int]]:
    """The descriptors that are waited for, and what their other end is needed for."""
    if kind == "epoll":
        return _epoll(pid, values[0])
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        if kind == "poll":
            memory.seek(values[0])
            found = struct.iter_unpack("=ihh", memory.read(8 * min(values[1], MOST)))
            # POLLIN is 1, POLLOUT 4; a negative descriptor is left out.
            return [(fd, WRITES if events & ~4 else READS) for fd, events, _ in found if fd >= 0]
        wanted: list[tuple[int, int]] = []
        for address, needs in zip(values[1:4], (WRITES, READS, WRITES), strict=True):
            if address:
                memory.seek(address)
                bits = int.from_bytes(memory.read(-(-min(values[0], 1024) // 64) * 8), "little")
                wanted += [(fd, needs) for fd in range(min(values[0], 1024)) if bits >> fd & 1]
        return wanted[:MOST]


def _epoll(pid: int, descriptor: int) -> list[tuple[int, int]]:
    found = []
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(errors="replace").splitlines():
        if line.startswith("tfd:"):
            fields = line.split()
            found.append((int(fields[1]), WRITES if int(fields[3], 16) & ~4 & 0xFFF else READS))
    return found[:MOST]
