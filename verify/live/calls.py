"""The system call in which a thread stands (/proc/PID/task/TID/syscall), and whether it waits for its own process.

The file holds the number of the call, its six arguments, the stack pointer and the program counter, in hexadecimal but
for the first (proc(5)). Only a thread that waits in a private futex can be let go by threads of its own process alone.
Every other wait may be ended from outside of it, whatever the kernel's function is called in which it waits: a new kind
of wait is none for the process itself unless it is shown to be one.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_NUMBERS: Final = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
        20: "writev", 23: "select", 34: "pause", 35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept",
        44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 65: "semop", 69: "msgsnd",
        70: "msgrcv", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 128: "rt_sigtimedwait",
        130: "rt_sigsuspend", 202: "futex", 208: "io_getevents", 219: "restart_syscall", 220: "semtimedop",
        230: "clock_nanosleep", 232: "epoll_wait", 242: "mq_timedsend", 243: "mq_timedreceive", 247: "waitid",
        257: "openat", 270: "pselect6", 271: "ppoll", 275: "splice", 276: "tee", 278: "vmsplice", 281: "epoll_pwait",
        288: "accept4", 299: "recvmmsg", 307: "sendmmsg", 326: "copy_file_range", 426: "io_uring_enter",
        437: "openat2", 441: "epoll_pwait2", 449: "futex_waitv",
    },
    "aarch64": {
        4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read",
        64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 71: "sendfile", 72: "pselect6",
        73: "ppoll", 75: "vmsplice", 76: "splice", 77: "tee", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 128: "restart_syscall", 133: "rt_sigsuspend",
        137: "rt_sigtimedwait", 182: "mq_timedsend", 183: "mq_timedreceive", 188: "msgrcv", 189: "msgsnd",
        192: "semtimedop", 193: "semop", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
        211: "sendmsg", 212: "recvmsg", 242: "accept4", 243: "recvmmsg", 260: "wait4", 269: "sendmmsg",
        285: "copy_file_range", 426: "io_uring_enter", 437: "openat2", 441: "epoll_pwait2", 449: "futex_waitv",
    },
}  # fmt: skip
"""Numbers of calls that may wait, by machine (asm/unistd.h)."""
PRIVATE: Final = 128
"""A flag of a futex: only threads of the same process wait for it, or let it go."""
_WAITS: Final = frozenset({0, 6, 9, 11, 13})
"""Operations of a futex that wait: WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI and LOCK_PI2 (linux/futex.h)."""
CHILD: Final = ("wait4", "waitid")
ANY: Final = ("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2")
"""Waits for any of several files."""
_FOR: Final = {
    "a lock on a file": ("fcntl", "flock"),
    "a signal": ("rt_sigtimedwait", "rt_sigsuspend", "pause"),
    "a semaphore of the system": ("semop", "semtimedop"),
    "a message queue": ("msgsnd", "msgrcv", "mq_timedsend", "mq_timedreceive"),
    "a child process": CHILD,
    "a file or a socket": (
        "read", "readv", "pread64", "write", "writev", "pwrite64", "open", "openat", "openat2", "connect", "accept",
        "accept4", "sendto", "sendmsg", "sendmmsg", "recvfrom", "recvmsg", "recvmmsg", "sendfile", "splice", "tee",
        "vmsplice", "copy_file_range", "fsync", "fdatasync", *ANY,
    ),
}  # fmt: skip


class Call(NamedTuple):
    """A system call in which a thread stands. name: "" where it is none of those known here. values: its arguments."""

    number: int
    name: str
    values: tuple[int, ...]

    @property
    def inside(self) -> bool:
        """Whether only threads of the same process, or the clock, can let the thread go."""
        return self.name == "futex" and bool(self.values[1] & PRIVATE) and self.values[1] & 0x7F in _WAITS

    @property
    def shared(self) -> bool:
        """Whether it waits in a futex that lies in memory of several processes."""
        return self.name == "futex" and not self.values[1] & PRIVATE

    @property
    def waits_for(self) -> str:
        """What it waits for outside of its process, as far as the call itself tells: `a signal (rt_sigtimedwait)`."""
        for what, names in _FOR.items():
            if self.name in names:
                return f"{what} ({self.name})"
        return f"what is outside of its process ({self.name or f'system call {self.number}'})"


def call_of(task: Path, machine: str | None = None) -> Call | None:
    """The call of a thread (a folder of /proc/PID/task); None where that is not told: the thread runs, its machine is
    not known here, or the system keeps its call to whoever may debug the process.
    """
    names = _NUMBERS.get(machine or platform.machine())
    with suppress(OSError, ValueError):
        number, *arguments = (task / "syscall").read_text().split()
        if names is not None and number.isdigit() and len(arguments) >= 6:
            values = tuple(int(each, 16) for each in arguments[:6])
            return Call(int(number), names.get(int(number), ""), values)
    return None
