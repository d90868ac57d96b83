"""Tracebacks in the logs of ranks: which tell that a rank left, and which only that something was caught or ignored.

    Traceback (most recent call last):            Exception in thread Thread-2 (writer):
      File "train.py", line 4, in step            Traceback (most recent call last):
    KeyError: 'loss'                              OSError: disk full

A traceback is how a rank left only if it is the last thing in the rank's log: what a launcher, a watchdog and the
interpreter write of an end may follow. Few other lines may be the rest of a message: then it is not certain. One of a
thread, of a child process or of a finalizer ends nobody. What a rank raises because others are gone or late is no
cause, and neither is what follows in its own cleaning up.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from verify.events import Site
from verify.readers.found import ENDED
from verify.readers.lines import PREFIX, brief, goes_on

FIRST: Final = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt|Exit))(?P<text>:.*)?$")
_OWN = re.compile(r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}[a-z]\w{0,80})(?P<text>:.*)?$")
"""The exception of a traceback whose class is named as the program likes; a level of a log is all in capitals."""
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]{1,4096})", line (?P<line>\d{1,9}), in (?P<function>.{1,200})$')
_LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages|python3\.\d+)/|^<")
_LOST_ONE = re.compile(r"(?:^|\.)Dist(?:Backend|Network)Error$")
_MAY_HAVE_LOST_ONE = re.compile(r"(?:^|\.)(?:RuntimeError|OSError|TimeoutError|Connection\w{0,20}Error)$")
_CONSEQUENCE = re.compile(r"NCCL|ProcessGroup|gloo|Connection closed by peer|c10d")
_UNREACHED = re.compile(r"connectFullMesh failed.{0,400}timed out connecting")
"""A host that cannot be reached, which is nobody's end."""
_LAUNCHER = re.compile(r"(?:^|\.)(?:ChildFailedError|SignalException)$")
_CHAINED = re.compile(
    r"During handling of the above exception|The above exception was the direct cause|Original exception was"
)
_THREAD = re.compile(r"^Exception in thread (?P<name>[^\n]{1,200}?):?$")
_CHILD = re.compile(r"^Process (?P<name>\S{1,100}):$")
_IGNORED = re.compile(
    r"^Exception ignored |^Unraisable exception|^--- Logging error ---|^Error in (?:atexit|sys\.)"
    r"|^Exception in callback |(?:Task|Future) exception was never retrieved|^Unhandled exception in "
)
_BETWEEN = re.compile(r"^(?:future|handle|task|object|source_traceback)\b ?[:<(]")
"""What may stand between such a line and its traceback."""
_TAIL = re.compile(
    # what torch, NCCL, the interpreter and launchers write of an end
    r"\[?[WEIF]\d{3,4} |frame #|Exception raised from|terminate called|\s*what\(\)|Fatal Python error|Extension modules"
    r"|(?:Current t|T)hread 0x|(?:Segmentation fault|Aborted|Killed|Terminated|Bus error)\b|srun: |slurmstepd: |make: "
    r"|[=\-*]{5,}|\[\d{1,7}\]:|(?:Root Cause|Failures:|<NO_OTHER_FAILURES>)|.{1,200} FAILED$|wandb: "
    r"|C\+\+ CapturedTraceback|.{0,300}resource_tracker|.{0,400}Watchdog"
    r"|.{0,400}ProcessGroup(?:NCCL|Gloo)|malloc_consolidate|free\(\)"
    # further lines of what well-known exceptions say
    r"|CUDA kernel errors might|For debugging consider|Compile with|Device-side assertion|Search for `|Last error:"
    r"|nccl\w+: |Original Traceback|from user code|Set TORCH|You can suppress|See documentation|To execute this test"
    r"|\"{3}$"
)
FEW: Final = 3
"""Lines after a traceback that may belong to what the exception says, or to some cleaning up."""
Raised = tuple[str, "Site | None"]
"""What an exception says, and the last line of the program in its traceback."""


class Tracebacks:
    """See the module. raised: rank -> how it left. after: rank -> what it raised as another one was gone.

    remarks: of a rank. perhaps: rank -> what it logged and may have left by, though more
    follows. more: rank -> lines after the traceback that it left by, of which it is not clear what they are. wrote_on:
    the same of one that is in `after`.
    """

    def __init__(self) -> None:
        self.raised: dict[int, Raised] = {}
        self.after: dict[int, str] = {}
        self.remarks: list[tuple[int, str]] = []
        self.perhaps: dict[int, str] = {}
        self.more: Counter[int] = Counter()
        self.wrote_on: Counter[int] = Counter()
        self.log()

    def log(self) -> None:
        """Another log begins: nothing tells in which order its lines stand to those of others."""
        self._tracing: dict[int, Site | None] = {}
        """Ranks in the middle of a traceback -> its last line of the program so far."""
        self._inside: set[int] = set()
        """Ranks whose last line was of a frame of a traceback, after which its exception may come."""
        self._aside: dict[int, re.Match[str]] = {}
        """Ranks of which the next traceback is of somebody else -> the line that says so."""
        self._chained: set[int] = set()
        self._mine: set[int] = set()
        """Ranks whose own traceback this log has."""

    def settle(self) -> None:
        """All logs were read: who could not connect is no cause where another rank raised something of its own."""
        unreached = {rank for rank, (text, _) in self.raised.items() if _UNREACHED.search(text)}
        for rank in unreached if len(unreached) < len(self.raised) else ():
            self.after[rank] = brief(self.raised.pop(rank)[0])
            self.more.pop(rank, None)

    def take(self, line: str, rank: int) -> bool:
        """The next line of a rank; whether it told anything that is to be kept."""
        text = PREFIX.sub("", line)
        if text.startswith(FIRST):
            self._tracing[rank] = None
            self._inside.discard(rank)
        elif rank in self._tracing and text.startswith("  "):
            if frame := _FRAME.match(text):
                self._inside.add(rank)
                if not _LIBRARY.search(frame["file"]):
                    self._tracing[rank] = Site(frame["file"], int(frame["line"]), frame["function"].strip())
        elif rank in self._tracing and (
            found := _EXCEPTION.match(text) or (_OWN.match(text) if rank in self._inside else None)
        ):
            return self._exception(rank, found["type"], text, self._tracing.pop(rank))
        elif rank in self._tracing:
            self._inside.discard(rank)
        elif aside := _THREAD.match(text) or _CHILD.match(text) or _IGNORED.search(text):
            self._aside[rank] = aside
        elif _CHAINED.search(text):
            self._chained.add(rank)
        elif text.strip() and not _BETWEEN.match(text):
            self._aside.pop(rank, None)
            return rank in self._mine and self._goes_on(rank, text)
        return False

    def _exception(self, rank: int, kind: str, text: str, site: Site | None) -> bool:
        """The end of a traceback."""
        chained = rank in self._chained
        self._chained.discard(rank)
        if (aside := self._aside.pop(rank, None)) is not None:
            self.remarks.append((rank, _remark(aside, text, site)))
            return True
        if _LAUNCHER.search(kind):
            return False
        lost = _LOST_ONE.search(kind) or (_MAY_HAVE_LOST_ONE.search(kind) and _CONSEQUENCE.search(text))
        if lost and not _UNREACHED.search(text):
            self.after.setdefault(rank, brief(text))
            self._mine.add(rank)
            return True
        if rank in self.after:
            return False
        if rank in self._mine and not chained:
            # It was there to raise another one.
            self._drop(rank, "")
        if rank not in self.raised:
            self.raised[rank] = (text[:400], site)
            self._mine.add(rank)
        return False

    def _goes_on(self, rank: int, text: str) -> bool:
        """A line after the traceback of a rank."""
        if goes_on(text):
            self.after.pop(rank, None)
            self.wrote_on.pop(rank, None)
            return self._drop(rank, ", and went on")
        # Of what is raised as others are gone, it does not matter whether it ended the rank.
        if text.startswith((" ", "\t")) or _TAIL.match(text):
            return False
        if rank in self.after:
            self.wrote_on[rank] += 1
        if rank in self.raised:
            self.more[rank] += 1
            if self.more[rank] > FEW:
                self.perhaps[rank] = _told(*self.raised[rank])
                return self._drop(rank, "")
        return False

    def _drop(self, rank: int, went_on: str) -> bool:
        raised = self.raised.pop(rank, None)
        self._mine.discard(rank)
        self.more.pop(rank, None)
        if raised is not None:
            self.remarks.append((rank, f"it logged {_told(*raised)}{went_on}"))
        if went_on:
            self.perhaps.pop(rank, None)
        return True


def _remark(aside: re.Match[str], text: str, site: Site | None) -> str:
    """What to say of an exception that was not the rank's own."""
    if aside.re is _THREAD:
        return f"{ENDED}thread {aside['name']} ended by {text[:200]}{_at(site)}"
    whose = f"of a child process ({aside['name']})" if aside.re is _CHILD else "that ended nobody"
    return f"its log has an exception {whose}: {_told(text, site)}"


def _told(text: str, site: Site | None) -> str:
    return f"{brief(text, 200)}{_at(site)}"


def _at(site: Site | None) -> str:
    return f" at {site}" if site is not None else ""
