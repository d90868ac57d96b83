"""Ranks whose log ends with a traceback, and which other evidence shows later: what they logged did not end them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify.events import Kind
from verify.readers.found import AFTER, PERHAPS_BY_IT, STILL
from verify.readers.lines import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.readers.found import Found

PROGRAM: Final = frozenset({"<module>", "_run_module_as_main"})
"""Frames below which a program runs. When its main thread has ended they are gone, though the process waits for its
other threads, or runs what was left to be done at exit.
"""
_WHOSE: Final = re.compile(r"\brank (\d{1,7}) logged ")


def outlived(found: Sequence[Found]) -> list[Found]:
    """The evidence, without the ends of ranks whose processes were looked at since, or move in their records; nor is a
    call that they caught as it timed out one in which they wait.

    A dump may be older than the traceback or younger: which, nothing tells.
    """
    doubtful = any(_perhaps(line) is not None for each in found for line in each.unknown)
    if not doubtful and not any(each.traced or _logged(each) for each in found):
        return list(found)
    there = {
        stack.rank for each in found for stack in each.stacks
        if stack.rank is not None and stack.pid is not None and any(frame.function in PROGRAM for frame in stack.frames)
    }  # fmt: skip
    there |= {rank for each in found for rank in (*each.lively, *each.idle)}
    dumped = {rank for each in found if each.named for rank in each.present & {call.rank for call in each.events}}
    return [_without(each, there, dumped) for each in found]


def _logged(each: Found) -> dict[int, str]:
    """Rank -> what it raised as others were gone or late."""
    return {rank: text.removeprefix(AFTER) for rank, text in each.remarks if text.startswith(AFTER)}


def _perhaps(line: str) -> int | None:
    """The rank of which a line says that it may have left."""
    whose = _WHOSE.search(line) if line.endswith(PERHAPS_BY_IT) else None
    return int(whose[1]) if whose is not None else None


def _without(each: Found, there: set[int], dumped: set[int]) -> Found:
    gone = {told for told in each.traced if told[0] in there}
    kept = each.traced - gone
    caught = {rank: text for rank, text in _logged(each).items() if rank in there}
    events = tuple(
        event for event in each.events if event.kind is not Kind.EXIT or (event.rank, event.operation) not in gone
    )
    remarks = [(rank, text) for rank, text in each.remarks if rank not in caught or not text.startswith(AFTER)]
    remarks += [(rank, f"{STILL}{brief(text, 200)}") for rank, text in sorted({*gone, *caught.items()})]
    undated = (each.undated | frozenset(rank for rank, _ in kept if rank in dumped)) - there
    unknown = tuple(line for line in each.unknown if _perhaps(line) not in there)
    return replace(
        each, events=events, traced=kept, undated=undated, remarks=tuple(remarks), unknown=unknown,
        overdue=each.overdue - caught.keys(),
    )  # fmt: skip
