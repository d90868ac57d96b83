"""How processes ended that could raise nothing: faulthandler's last words, and torchrun's report of its children.

    Fatal Python error: Segmentation fault          Root Cause (first observed failure):
    Current thread 0x00007f8e (most recent call first):   rank      : 1 (local_rank: 1)
      File "train.py", line 20 in main                    exitcode  : -9 (pid: 777)

A process that was aborted is no cause where its watchdog said before that it waits too long, where it stood in a call
of torch.distributed, or where no thread of Python was it: then somebody ended it since it hung. The same goes for a
child that torchrun or a scheduler told to end. A rank that goes on after it was started again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from verify.events import Confidence, Event, Kind, State
from verify.readers.attempts import attempt_in, present_lines
from verify.readers.found import AFTER, Found, Stack
from verify.readers.lines import MOST, brief, goes_on, holds, rank_in
from verify.readers.stacks import FATAL, from_lines
from verify.readers.standing import own_frame, stands_in

if TYPE_CHECKING:
    from pathlib import Path

    from verify.events import Site

WHAT: Final = "log"
NEEDLES: Final = (b"Fatal Python error: ", b"Root Cause (first observed failure)")
FOLLOWING: Final = 4096
"""Lines after faulthandler's first one that may be its stacks."""
REPORT: Final = 12
_LATE: Final = re.compile(r"Watchdog caught|failure detected by watchdog|Dist(?:Backend|Network)Error|ProcessGroupNCCL")
_RANK: Final = re.compile(r"^\W*rank\s*: (\d{1,7}) \(local_rank: ")
_CODE: Final = re.compile(r"^\W*exitcode\s*: -(\d{1,2}) \(pid: ")
SIGNALS: Final = {4: "SIGILL", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
"""Signals that no launcher and no watchdog ends ranks with while another one is the cause; the out-of-memory killer
does by SIGKILL."""


class DeathsReader:
    """See the module."""

    name = "deaths"

    def recognises(self, path: Path, head: bytes) -> bool:
        """A text file with one of the lines anywhere in it."""
        return holds(path, head, NEEDLES)

    def read(self, path: Path) -> Found:
        """The ends that one log tells. Raises UsageError for a file that cannot be read."""
        late: set[int] = set()
        fatal: dict[int, tuple[str, bool, list[str]]] = {}
        killed: dict[int, str] = {}
        report, whose, nameless = 0, -1, 0
        for _, line in present_lines(WHAT, path):
            rank = rank_in(line, path)
            if found := FATAL.search(line):
                nameless += rank is None
                if rank is not None and rank not in fatal and len(fatal) < MOST:
                    fatal[rank] = (brief(found[0]), rank in late, [])
            elif "Root Cause (first observed failure)" in line:
                report = REPORT
            elif report:
                report -= 1
                if found := _RANK.search(line):
                    whose = int(found[1])
                elif (found := _CODE.search(line)) and (name := SIGNALS.get(int(found[1]))) and whose >= 0:
                    killed[whose] = f"{name}, as torchrun reports"
            elif rank is not None and rank not in fatal:
                if _LATE.search(line):
                    late.add(rank)
            elif rank is not None and len(lines := fatal[rank][2]) < FOLLOWING:
                if goes_on(line):
                    del fatal[rank]
                else:
                    lines.append(line)
        events, remarks = [], []
        for rank, (text, after, lines) in sorted(fatal.items()):
            stack = _current(lines, path, rank)
            if after or ("Aborted" in text and (stack is None or _in_call(stack))):
                remarks.append((rank, f"{AFTER}{text}"))
                continue
            site = own_frame(stack) if stack is not None else None
            events.append(_exit(rank, text, site))
        events += [_exit(rank, text) for rank, text in killed.items() if rank not in fatal]
        unknown = (f"{path.name}: which rank ended by a fatal error? Name the file rank<k>.log to say it",)
        ranks = frozenset(fatal) | frozenset(killed)
        # Of what torchrun reports it knows that nothing was started again.
        again = {each for each in events if each.rank in fatal} if attempt_in(WHAT, path).silent else set()
        return Found(
            path.name, tuple(events), ranks, ranks, unknown=unknown if nameless else (), remarks=tuple(remarks),
            traced=frozenset((each.rank, each.operation) for each in again),
            undated=frozenset(each.rank for each in again),
        )  # fmt: skip


READER = DeathsReader()


def _exit(rank: int, text: str, site: Site | None = None) -> Event:
    return Event(
        rank, Kind.EXIT, text, state=State.COMPLETED, confidence=Confidence.OBSERVED, site=site
    )  # fmt: skip


def _current(lines: list[str], path: Path, rank: int) -> Stack | None:
    """The stack of the thread that was running, if one of Python's was."""
    at = next((at for at, line in enumerate(lines) if "Current thread " in line), None)
    if at is None:
        return None
    stacks = from_lines(lines[at:], path, rank)
    return stacks[0] if stacks[0].frames else None


def _in_call(stack: Stack) -> bool:
    """Whether it waited for other ranks."""
    event = stands_in(stack)
    return event is not None and event.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
