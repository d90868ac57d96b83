"""Whether a thread's wait may end by the clock, from the system call in which it stands (`verify.live.calls`).

A wait has a time limit where the argument that says so is a pointer to a time that is not null, or a number of
milliseconds that is not negative.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from verify.live.calls import call_of

if TYPE_CHECKING:
    from pathlib import Path

    from verify.live.calls import Call

ALWAYS: Final = -1
"""In place of an argument: the call itself is a wait for the clock."""

# Name of the call -> the argument that holds the limit, a pointer to a time but for the calls in `_MILLISECONDS`.
_LIMIT: Final = {
    "futex": 3, "futex_waitv": 3, "nanosleep": ALWAYS, "clock_nanosleep": ALWAYS, "restart_syscall": ALWAYS,
    "poll": 2, "ppoll": 2, "select": 4, "pselect6": 4, "epoll_wait": 3, "epoll_pwait": 3, "epoll_pwait2": 3,
    "rt_sigtimedwait": 2, "semtimedop": 3, "mq_timedreceive": 4, "mq_timedsend": 4, "io_getevents": 4,
}  # fmt: skip
_MILLISECONDS: Final = ("poll", "epoll_wait", "epoll_pwait")


def timed(task: Path, machine: str | None = None) -> bool | None:
    """Whether the wait of a thread (a folder of /proc/PID/task) may end by the clock; None where that is not told
    (`verify.live.calls`).
    """
    call = call_of(task, machine)
    return None if call is None else limited(call)


def limited(call: Call) -> bool:
    """Whether a call may end by the clock."""
    which = _LIMIT.get(call.name)
    if which is None or which == ALWAYS:
        return which is not None
    limit = call.values[which]
    # Milliseconds are a signed 32-bit number, of which the kernel shows the whole register.
    return not limit & 0x80000000 if call.name in _MILLISECONDS else limit != 0


_OWN: Final = (
    signal.SIGINT, signal.SIGCHLD, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE,
    signal.SIGSEGV, signal.SIGPIPE, signal.SIGSYS,
)  # fmt: skip
"""Signals whose handlers say nothing: Python always has one for SIGINT, torch's DataLoader one for SIGCHLD, which does
not come without a child, and faulthandler those of a program's own mistakes. Handlers of all others, as SIGTERM, which
schedulers send ahead of time, are the program's."""
_C_LIBRARY, _REALTIME_FIRST = 32, 34
"""The two between are the C library's."""


def signalled(process: Path, *, ending: bool = True) -> str:
    """The signals that a process (a folder of /proc) has handlers for and that may come at any time, as `SIGUSR1 and
    SIGALRM`: such a handler may do anything, let a thread go on too. "" where there is none, or that is not told.

    ending: with SIGTERM, which may do so as well, but comes when the job is to end.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in (process / "status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                caught = int(line.split()[1], 16)
                left_out = _OWN if ending else (*_OWN, signal.SIGTERM)
                own = [each for each in signal.Signals if each < _C_LIBRARY and each not in left_out]
                names = [each.name for each in own if caught >> (each - 1) & 1]
                names += ["a real-time signal"] * bool(caught >> (_REALTIME_FIRST - 1))
                return " and ".join(names)
    return ""


_REALTIME: Final = 256
"""A flag of a futex: its limit is on the clock of the day."""


_LOCK_PI: Final = 6
"""The command of a futex whose limit is always on that clock (futex(2))."""


def remaining(task: Path, machine: str | None = None) -> float | None:
    """Seconds until the wait of a thread ends by the clock, at the latest; None where that is not told.

    The moment at which it ends lies in the memory of the process, which is read as a file, if that is allowed. Of a
    limit that counts from the beginning of the call, the whole is given: when it began is not known.
    """
    call = call_of(task, machine)
    if call is None:
        return None
    name, values = call.name, call.values
    with suppress(OSError, struct.error):
        if name in _MILLISECONDS:
            return (values[_LIMIT[name]] & 0xFFFFFFFF) / 1000
        if name == "clock_nanosleep":
            return _left(task, values[2], absolute=bool(values[1] & 1), realtime=values[0] == 0)
        if name == "futex":
            command = values[1] & 0x7F
            realtime = command == _LOCK_PI or bool(values[1] & _REALTIME)
            return _left(task, values[3], absolute=command != 0, realtime=realtime)
        if name in ("nanosleep", "ppoll", "pselect6"):
            return _left(task, values[max(_LIMIT[name], 0)], absolute=False, realtime=False)
    return None


def _left(task: Path, address: int, *, absolute: bool, realtime: bool) -> float | None:
    """Seconds left of a time in the memory of a process; None where that is on a clock of its own (time_namespaces(7)),
    as a container may have one.
    """
    if absolute and not realtime and os.readlink(task.parents[1] / "ns" / "time") != os.readlink("/proc/self/ns/time"):
        return None
    with open(task / "mem", "rb", buffering=0) as memory:
        memory.seek(address)
        seconds, nanoseconds = struct.unpack("=qq", memory.read(16))
    value = float(seconds) + float(nanoseconds) / 1e9
    return value - (time.time() if realtime else time.monotonic()) if absolute else value
