"""Where the threads of another process stand, waited for: a process under load comes there when it comes there.

A test that looks at a process from outside asserts about a state, so it waits for that state, and never for a time in
which it is usually reached.
"""

from __future__ import annotations

import time
from pathlib import Path

LOOK_S = 0.1
"""Between two looks: many times the 5 ms after which a wait for the interpreter lock is taken up anew."""


def at_rest(task: Path) -> tuple[str, int] | None:
    """The system call in which a thread (a folder of /proc/PID/task) sleeps, and how often it was switched away from;
    None where it runs, waits for a processor, or that is not told.
    """
    try:
        state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        lines = (task / "status").read_text(errors="replace").splitlines()
        where = (task / "syscall").read_text()
    except (OSError, IndexError):
        return None
    if state != "S" or where.startswith(("running", "-1")):
        return None
    return where, sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)


def stands(task: Path) -> bool:
    """Whether a thread sleeps in one call for a while, and did not run meanwhile: a wait for the interpreter lock wakes
    every few milliseconds, and what is to run waits for a processor and does not sleep.
    """
    before = at_rest(task)
    if before is None:
        return False
    time.sleep(LOOK_S)
    return at_rest(task) == before


def main_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/task/{pid}")
