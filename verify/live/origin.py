"""Whose a thread is: the library in which its work began, as the addresses on its stack tell.

A name proves nothing: a program may call a thread of its own `gloo_tcp_loop`, and one that is started in a callback of
torch inherits the name of torch's. But the outermost frames of a thread are those of whoever started it: below what the
C library does first, torch's are in torch, and those of Python in its interpreter. The stack is read as a file, from
the stack pointer that /proc/PID/task/TID/syscall tells, which whoever may read the one may read as well.
"""

from __future__ import annotations

import re
import struct
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_FIRST: Final = re.compile(r"/(ld-|libc[.-]|libpthread|libstdc\+\+|libgcc_s|libc\+\+|lib[at]san)[^/]*$|^(\[|$)")
"""What starts a thread for others, and what belongs to no library."""
_C: Final = re.compile(r"/(ld-musl|libc[.-]|libpthread)[^/]*$")
MOST: Final = 1 << 20
"""Bytes of a stack that are read, from its outermost end."""
TRIES: Final = 40
AGAIN_S: Final = 0.005
"""A thread that runs, or waits for a processor, tells no stack pointer: those that tick run for next to no time."""


def started_in(task: Path) -> str | None:
    """The file of the library in which a thread (a folder of /proc/PID/task) began its work; "" where none is seen,
    None where the system does not tell.
    """
    try:
        began = (task / "stat").read_bytes().rpartition(b")")[2].split()[19]
        return _started_in(task, began)
    except (OSError, ValueError, IndexError, struct.error):
        return None


@lru_cache(maxsize=65536)
def _started_in(task: Path, began: bytes) -> str:
    """It stays so, whatever the thread does later. Raises ValueError where that is not told: then it is asked again."""
    for _ in range(TRIES):
        words = (task / "syscall").read_text().split()
        if len(words) in (3, 9):  # its number, the arguments of a call if it is in one, two pointers
            return _outermost(task, int(words[-2], 16))
        time.sleep(AGAIN_S)
    raise ValueError("it runs")


def _outermost(task: Path, pointer: int) -> str:
    code: list[tuple[int, int, str]] = []
    end = 0
    process = task.parents[1]
    with open(process / "maps", errors="replace") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            first, last = (int(each, 16) for each in fields[0].split("-"))
            if first <= pointer < last:
                end = last
            if "x" in fields[1]:
                code.append((first, last, fields[5].removesuffix(" (deleted)") if len(fields) > 5 else ""))
    begin = max(pointer & ~7, end - MOST)
    with open(process / "mem", "rb", buffering=0) as memory:
        memory.seek(begin)
        data = memory.read(max(0, end - begin))
    started = False
    low, high = min(each[0] for each in code), max(each[1] for each in code)
    for (word,) in reversed(list(struct.iter_unpack("=Q", data[: len(data) // 8 * 8]))):
        if not low <= word < high:
            continue
        name = next((name for first, last, name in code if first <= word < last), "")
        # What lies beyond the first frame, which is the C library's, are variables of the thread.
        started = started or _C.search(name) is not None
        if started and name and not _FIRST.search(name):
            return name
    return ""
