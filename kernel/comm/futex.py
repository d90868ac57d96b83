"""Sleeping and waking on a 32-bit word of shared memory, and the memory fence that goes with it. Linux only.

`futex(2)`: the kernel puts the caller to sleep only if the word still holds the value that the caller saw. The word
lies in a shared mapping, so the operations are the shared ones (no FUTEX_PRIVATE_FLAG) and work across processes.
ctypes releases the GIL around a foreign call, so a sleeping stream thread does not stop its process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import threading
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_WAIT: Final = 0
_WAKE: Final = 1
_EVERYBODY: Final = 0x7FFFFFFF
_SYSCALL_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The word at `address`: 4-byte aligned, in a mapping that outlives this object.

    One thread waits through one object; any thread wakes. Raises UsageError where the machine has no futex that we know
    the number of.
    """

    def __init__(self, address: int) -> None:
        number = _SYSCALL_NUMBERS.get(platform.machine())
        if number is None or sys.platform != "linux":
            raise UsageError(
                f"shared memory needs Linux on {' or '.join(_SYSCALL_NUMBERS)}, this is {sys.platform} on"
                f" {platform.machine()}: use the gloo collectives instead"
            )
        if address % 4:
            raise ValueError(f"address {address:#x} of a futex is not a multiple of 4")
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(number)
        self._address = ctypes.c_void_p(address)
        # Ready-made C values: converting Python integers in every call takes longer than the system call itself.
        self._wait, self._wake, self._all = ctypes.c_int(_WAIT), ctypes.c_int(_WAKE), ctypes.c_int(_EVERYBODY)
        self._seen, self._limit, self._limit_s = ctypes.c_uint32(), _Timespec(), 0.0

    def wait(self, seen: int, timeout_s: float | None = None) -> bool:
        """Sleep while the word holds `seen`; False when `timeout_s` passed, True on everything else.

        True says nothing about the word (it may have differed from the start, or a signal came): look again.
        """
        self._seen.value = seen
        limit = None
        if timeout_s is not None:
            if timeout_s != self._limit_s:
                self._limit_s = timeout_s
                self._limit.seconds = int(timeout_s)
                self._limit.nanoseconds = int(timeout_s % 1 * 1e9)
            limit = ctypes.byref(self._limit)
        if self._syscall(self._number, self._address, self._wait, self._seen, limit, None, 0) == 0:
            return True
        code = ctypes.get_errno()
        if code == errno.ETIMEDOUT:
            return False
        if code in (errno.EAGAIN, errno.EINTR):
            return True
        raise OSError(code, f"futex wait: {errno.errorcode.get(code, code)}")

    def wake(self) -> int:
        """Wake everybody who sleeps on the word; how many did."""
        return int(self._syscall(self._number, self._address, self._wake, self._all, None, None, 0))


give_way: Final[Callable[[], object]] = ctypes.CDLL(None).sched_yield
"""Let any other thread run that is ready, of this process (ctypes gives up the GIL) and of this core.

`time.sleep(0)` does not do that: in Python 3.11 to 3.13 it is a clock_nanosleep, which sleeps for the thread's timer
slack, 50 microseconds and more.
"""


LOOKS: Final = 20
"""How often whoever waits looks again, giving way in between, before it goes to sleep.

Peers mostly come within microseconds, and looking for about as long as a sleep and a wake-up take costs at most twice
the better choice. With fewer cores than ranks too: giving way lets those run that are waited for, and a hundred looks
of eight ranks on two cores gain nothing over twenty.
"""


class Fence:
    """A full memory fence: what this thread read and wrote before it stays before what it reads and writes after.

    Python has no fence, but its locks contain one. x86 keeps stores in order and needs it only between our store and
    our later load of a peer's word (both of two peers could otherwise miss each other); any locked instruction does.
    aarch64 may move every access. There one acquire-release cycle is not enough: acquire lets earlier accesses sink
    into the critical section, release lets later ones rise into it, and inside they may pass each other. Of two cycles
    on one lock, the first release keeps the earlier accesses before it, the second acquire keeps the later ones behind
    it, and a release is not passed by a later acquire of the same word. Not shared between threads.
    """

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def __call__(self) -> None:
        self._acquire()
        self._release()
        self._acquire()
        self._release()
