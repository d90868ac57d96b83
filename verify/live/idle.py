"""Whether a process will go on by itself, as /proc shows it: nobody is asked, and nothing in it is touched.

A rank that makes no call may be at work, or wait for work: for data from a disk or a network, for a file that another
program writes, for a request. None of that is a fault. It is idle, and stays so, if for `patience_s`

- no thread of the program has run once (the kernel counts how often each was switched to), and the main one waits for
  another thread of the process, in a futex of its own without a timeout that would have woken it; nor does it catch a
  signal that may come;
- every other thread of it waits in such a futex as well: whatever else one waits for, a file, a socket, a signal, the
  clock, may come, and it may be what the main thread waits for. Threads of torch, its backends and this record wait so
  for ever, look at what other ranks do, and are known by their names and where they began (`verify.live.named`);
- it uses next to no processor time, has no child that could work for it, and nothing was recorded.

Where the system does not tell one of these, nothing is concluded.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from verify.live.calls import call_of
from verify.live.children import children_of
from verify.live.named import is_of_torch, only_serves
from verify.live.timed import limited, signalled

if TYPE_CHECKING:
    from collections.abc import Mapping

BUSY: Final = 0.05
"""Share of one processor that a process with a few threads that only tick may use."""


class Sample(NamedTuple):
    """A process at one moment. switches: how often each thread of the program was switched away from, and so to. ticks:
    of processor time that all of its threads have used. still: nothing in it waits for what may come from outside.
    """

    switches: Mapping[int, int]
    ticks: int
    still: bool


def sample(pid: int) -> Sample | None:
    """What `pid` does now; None where that cannot be seen."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        counts = switches(tasks)
        still = _locked(tasks / str(pid)) and not children_of(pid).living and not signalled(tasks.parent, ending=False)
        for task in tasks.iterdir():
            if not still:
                break
            still = task.name == str(pid) or _harmless(task)
    except (OSError, ValueError, IndexError):
        return None
    return Sample(counts, ticks, still)


def switches(tasks: Path) -> dict[int, int]:
    """How often each thread of a process was switched away from, by its number, but for those that tick for ever. What
    is the same before and after one has looked at all of them did not move meanwhile. Raises OSError, ValueError.
    """
    found: dict[int, int] = {}
    for task in tasks.iterdir():
        try:
            if is_of_torch(task, (task / "comm").read_text(errors="replace").strip()):
                continue
            lines = (task / "status").read_text(errors="replace").splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        found[int(task.name)] = sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)
    return found


def _locked(task: Path) -> bool:
    """Whether a thread waits for another one of its process, for however long that takes."""
    call = call_of(task)
    return call is not None and call.inside and not limited(call)


def _harmless(task: Path) -> bool:
    """Whether another thread is not at work, and waits neither for the clock nor for what is outside of the process."""
    try:
        name = (task / "comm").read_text(errors="replace").strip()
        state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        call = call_of(task)
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return True
    if state == "R":  # what runs uses processor time, which is counted
        return True
    return state == "S" and (only_serves(task, name, call) or (call is not None and call.inside and not limited(call)))


class Idle:
    """Follows one process."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._first: tuple[float, int, Sample] | None = None
        self.proven = False

    def forget(self) -> None:
        """It moves, or is known to wait."""
        self._first, self.proven = None, False

    def look(self, pid: int, last: int) -> None:
        """Look once more. last: number of its newest event. `proven` is then whether it was idle for long enough."""
        now, found = time.monotonic(), None
        with suppress(OSError):
            found = sample(pid)
        if found is None or not found.still:
            self.forget()
            return
        if self._first is None or self._first[1] != last or self._first[2].switches != found.switches:
            self._first, self.proven = (now, last, found), False
            return
        began, _, first = self._first
        used = (found.ticks - first.ticks) / os.sysconf("SC_CLK_TCK")
        if used > max(0.05, BUSY * (now - began)):
            self._first, self.proven = (now, last, found), False
            return
        self.proven = now - began >= self._patience_s
