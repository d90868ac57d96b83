"""Whether a thread's wait may end by the clock, from the system call in which it stands (/proc/PID/task/TID/syscall).

The file holds the number of the call, its six arguments, the stack pointer and the program counter, in hexadecimal but
for the first (proc(5)). A wait has a time limit where the argument that says so is a pointer to a time that is not
null, or a number of milliseconds that is not negative.
"""

from __future__ import annotations

import platform
import signal
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

ALWAYS: Final = -1
"""In place of an argument: the call itself is a wait for the clock."""

# Name of the call -> the argument that holds the limit; a name with `_ms` takes milliseconds, all others a pointer.
_LIMIT: Final = {
    "futex": 3, "futex_waitv": 3, "nanosleep": ALWAYS, "clock_nanosleep": ALWAYS, "restart_syscall": ALWAYS,
    "poll_ms": 2, "ppoll": 2, "select": 4, "pselect6": 4, "epoll_wait_ms": 3, "epoll_pwait_ms": 3, "epoll_pwait2": 3,
    "rt_sigtimedwait": 2, "semtimedop": 3, "mq_timedreceive": 4, "mq_timedsend": 4, "io_getevents": 4,
}  # fmt: skip
_NUMBERS: Final = {
    "x86_64": {
        202: "futex", 449: "futex_waitv", 35: "nanosleep", 230: "clock_nanosleep", 219: "restart_syscall", 7: "poll_ms",
        271: "ppoll", 23: "select", 270: "pselect6", 232: "epoll_wait_ms", 281: "epoll_pwait_ms", 441: "epoll_pwait2",
        128: "rt_sigtimedwait", 220: "semtimedop", 243: "mq_timedreceive", 242: "mq_timedsend", 208: "io_getevents",
    },
    "aarch64": {
        98: "futex", 449: "futex_waitv", 101: "nanosleep", 115: "clock_nanosleep", 128: "restart_syscall", 73: "ppoll",
        72: "pselect6", 22: "epoll_pwait_ms", 441: "epoll_pwait2", 137: "rt_sigtimedwait", 192: "semtimedop",
        183: "mq_timedreceive", 182: "mq_timedsend", 4: "io_getevents",
    },
}  # fmt: skip
"""Numbers of the calls that may wait for the clock, by machine (asm/unistd.h)."""


def timed(task: Path, machine: str | None = None) -> bool | None:
    """Whether the wait of a thread (a folder of /proc/PID/task) may end by the clock; None where that is not told:
    the thread runs, its machine is not known here, or the system keeps its call to whoever may debug the process.
    """
    numbers = _NUMBERS.get(machine or platform.machine())
    try:
        number, *arguments = (task / "syscall").read_text().split()
    except (OSError, ValueError):
        return None
    if numbers is None or not number.isdigit() or len(arguments) < 6:
        return None
    name = numbers.get(int(number))
    if name is None:
        return False
    which = _LIMIT[name]
    if which == ALWAYS:
        return True
    limit = int(arguments[which], 16)
    # Milliseconds are a signed 32-bit number, of which the kernel shows the whole register.
    return not limit & 0x80000000 if name.endswith("_ms") else limit != 0


PRIVATE: Final = 128
"""A flag of a futex: only threads of the same process wait for it, or let it go."""
_COME: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
                signal.SIGIO)  # fmt: skip
"""Signals that clocks and other programs send to a process that goes on: not those that end one (SIGINT, SIGTERM), that
follow from its own mistakes or children, nor those that the C library keeps for itself."""
_REALTIME_FIRST: Final = 34


def shared(task: Path, machine: str | None = None) -> bool:
    """Whether a thread waits in a futex that lies in memory of several processes, so that another one may let it go:
    the locks, events and queues of `multiprocessing`. False where that is not told.
    """
    numbers = _NUMBERS.get(machine or platform.machine(), {})
    with suppress(OSError, ValueError, IndexError):
        number, *arguments = (task / "syscall").read_text().split()
        return numbers.get(int(number)) == "futex" and not int(arguments[1], 16) & PRIVATE
    return False


def signalled(process: Path) -> str:
    """The signals that a process (a folder of /proc) has handlers for and that may come at any time, as `SIGUSR1 and
    SIGALRM`: such a handler may do anything, let a thread go on too. "" where there is none, or that is not told.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in (process / "status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                caught = int(line.split()[1], 16)
                names = [each.name for each in _COME if caught >> (each - 1) & 1]
                names += ["a real-time signal"] * bool(caught >> (_REALTIME_FIRST - 1))
                return " and ".join(names)
    return ""


_REALTIME: Final = 256
"""A flag of a futex: its limit is on the clock of the day."""


def remaining(task: Path, machine: str | None = None) -> float | None:
    """Seconds until the wait of a thread ends by the clock, at the latest; None where that is not told.

    The moment at which it ends lies in the memory of the process, which is read as a file, if that is allowed. Of a
    limit that counts from the beginning of the call, the whole is given: when it began is not known.
    """
    numbers = _NUMBERS.get(machine or platform.machine(), {})
    with suppress(OSError, ValueError, IndexError, struct.error):
        number, *arguments = (task / "syscall").read_text().split()
        name = numbers.get(int(number), "")
        values = [int(each, 16) for each in arguments[:6]]
        if name.endswith("_ms"):
            return (values[_LIMIT[name]] & 0xFFFFFFFF) / 1000
        if name == "clock_nanosleep":
            return _left(task, values[2], absolute=bool(values[1] & 1), realtime=values[0] == 0)
        if name == "futex":
            return _left(task, values[3], absolute=values[1] & 0x7F != 0, realtime=bool(values[1] & _REALTIME))
        if name in ("nanosleep", "ppoll", "pselect6"):
            return _left(task, values[max(_LIMIT[name], 0)], absolute=False, realtime=False)
    return None


def _left(task: Path, address: int, *, absolute: bool, realtime: bool) -> float:
    """Seconds left of a time in the memory of a process."""
    with open(task / "mem", "rb", buffering=0) as memory:
        memory.seek(address)
        seconds, nanoseconds = struct.unpack("=qq", memory.read(16))
    value = float(seconds) + float(nanoseconds) / 1e9
    return value - (time.time() if realtime else time.monotonic()) if absolute else value
