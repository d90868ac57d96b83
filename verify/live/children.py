"""The child processes of a process: those that may work for it, and those that have ended and that it has not asked
about, which will do nothing any more (/proc/PID/task/TID/children; their exit status as in proc(5)).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final, NamedTuple

from verify.live.holders import named

EXITED: Final = "has exited"


class Children(NamedTuple):
    """living: their numbers. ended: number -> how, as `exit code 3` or `SIGKILL`, "" where the system does not tell."""

    living: frozenset[int] = frozenset()
    ended: dict[int, str] = {}  # noqa: RUF012 -- of a NamedTuple, and never changed

    @property
    def lines(self) -> list[str]:
        """What to say of them, each to come after the name of the rank and a colon."""
        found = []
        for pid, how in sorted(self.ended.items())[:2]:
            found.append(f"its child {named([pid])} {EXITED}" + f" ({how})" * bool(how))
        if len(self.ended) > 2:
            found[-1] += f", and {len(self.ended) - 2} more have"
        if self.living:
            what = "child process" if len(self.living) == 1 else "child processes"
            found.append(f"its {what}: {named(self.living)}: py-spy dump --pid {min(self.living)} shows what it does")
        return found


def children_of(pid: int) -> Children:
    """Those of a process of this host. Raises OSError where it is gone, or is not told."""
    living: set[int] = set()
    ended: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            how = _ended(child)
            if how is None:
                living.add(child)
            else:
                ended[child] = how
    return Children(frozenset(living), ended)


def _ended(pid: int) -> str | None:
    """How a process has ended whose parent has not asked about it; None while it has not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] not in ("Z", "X"):
            return None
        status = int(fields[49])
    except (IndexError, ValueError):
        return ""
    except OSError:  # and it has been asked about since
        return ""
    number = status & 0x7F
    if number:
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"exit code {status >> 8}"
