"""Threads that torch, its backends and the record start, and that wait for other ranks only: known by their names.

All of them tick: gloo's loop every 10 ms, torch's watchdogs and the record's thread several times a second. Others of
torch (`pt_autograd_0`, `pt_data_pin`, those of its RPC) run code of the program. A name is known as a whole, since a
program may call a thread of its own `gloo_prefetch`: threads of Python give the kernel their names from 3.14 on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from verify.live.calls import Call

_CALLED_BACK: Final = ("pt_gloo_runloop", "pt_nccl_watchdg")
"""They may also run what a program chained to a future of a call."""
_BACK: Final = ("futex", "restart_syscall")
"""The calls in which these wait where they run nothing of the program (the second is a first that was stopped)."""
_SLEEPS: Final = ("nanosleep", "clock_nanosleep")
_NAMES: Final = re.compile(
    r"pt_gloo_runloop|gloo_tcp_loop"
    r"|pt_nccl_(?:watchdg|heartbt|gil_chk)"
    r"|pt_tcpstore(?:_uv)?"
    # The kernel keeps 15 characters of a name. The number is that of the device.
    r"|NCCL (?:Service|Progress|IbAsync) {0,2}[0-9]{1,3}|NCCL Sock[SR][0-9]{1,2}[ 0-9]{2,4}"
    r"|NCCL UDS Servic|NCCL GIN Progre|NCCL RAS"
    r"|cuda-EvtHandlr|cuda[0-9]{11}"
    r"|turnstile"
)


def of_torch(name: str) -> bool:
    """Whether a thread has the name of one of these."""
    return _NAMES.fullmatch(name) is not None


def only_serves(name: str, call: Call | None) -> bool:
    """Whether a thread has the name of one of these, and stands in no call in which those never do."""
    if not of_torch(name):
        return False
    return call is None or not (call.name in _SLEEPS or (name in _CALLED_BACK and call.name not in _BACK))
