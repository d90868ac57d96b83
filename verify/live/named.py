"""Threads that torch, its backends and the record start, and that wait for other ranks only: known by their names and
by the library in which they began (`verify.live.origin`).

All of them tick: gloo's loop every 10 ms, torch's watchdogs and the record's thread several times a second. Others of
torch (`pt_autograd_0`, `pt_data_pin`, those of its RPC) run code of the program. A name is known as a whole, since a
program may call a thread of its own `gloo_prefetch`: threads of Python give the kernel their names from 3.14 on. And
one that has the whole name, as it was started by such a thread perhaps, is still one of the program.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from verify.lineage import PYTHON
from verify.live.origin import started_in

if TYPE_CHECKING:
    from pathlib import Path

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


_RECORD: Final = "turnstile"
"""The thread of a record, which is one of Python: a process has one, and has the ring mapped."""
_LIBRARIES: Final = re.compile(r"/lib(torch|c10|gloo|nccl|rccl|cuda|nvidia|uv|nvshmem|hsa|amd)[^/]*$|/torch/lib/")
_RING: Final = re.compile(r"/rank\d{1,9}\.ring( \(deleted\))?$", re.MULTILINE)
"""Also one whose name another job has taken: its thread ticks on."""


def of_torch(name: str) -> bool:
    """Whether a thread has the name of one of these."""
    return _NAMES.fullmatch(name) is not None


def is_of_torch(task: Path, name: str) -> bool:
    """Whether a thread (a folder of /proc/PID/task) with this name is one of these, as far as that can be seen."""
    if not of_torch(name):
        return False
    began = started_in(task)
    if name == _RECORD:
        return began is not None and PYTHON.search(began) is not None and _has_one_record(task.parents[1])
    return began is not None and _LIBRARIES.search(began) is not None


def _has_one_record(process: Path) -> bool:
    try:
        names = [(each / "comm").read_text(errors="replace").strip() for each in (process / "task").iterdir()]
        return names.count(_RECORD) == 1 and _RING.search((process / "maps").read_text(errors="replace")) is not None
    except OSError:
        return False


def only_serves(task: Path, name: str, call: Call | None) -> bool:
    """Whether a thread is one of these, and stands in no call in which those never do."""
    if call is not None and (call.name in _SLEEPS or (name in _CALLED_BACK and call.name not in _BACK)):
        return False
    return is_of_torch(task, name)
