"""Ranks whose log ends with a traceback, and which other evidence shows later: what they logged did not end them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify.events import Kind
from verify.readers.found import STILL
from verify.readers.lines import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.readers.found import Found

PROGRAM: Final = frozenset({"<module>", "_run_module_as_main"})
"""Frames below which a program runs. When its main thread has ended they are gone, though the process waits for its
other threads, or runs what was left to be done at exit.
"""


def outlived(found: Sequence[Found]) -> list[Found]:
    """The evidence, without the ends of ranks whose processes were looked at since, or move in their records.

    A dump may be older than the traceback or younger: which, nothing tells.
    """
    traced = {rank for each in found for rank, _ in each.traced}
    if not traced:
        return list(found)
    there = {
        stack.rank for each in found for stack in each.stacks
        if stack.pid is not None and any(frame.function in PROGRAM for frame in stack.frames)
    }  # fmt: skip
    there |= {rank for each in found for rank in (*each.lively, *each.idle)}
    dumped = {rank for each in found if each.named for rank in each.present & {call.rank for call in each.events}}
    return [_without(each, traced & there, dumped) for each in found]


def _without(each: Found, there: set[int], dumped: set[int]) -> Found:
    if not each.traced:
        return each
    gone = {told for told in each.traced if told[0] in there}
    kept = each.traced - gone
    events = tuple(
        event for event in each.events if event.kind is not Kind.EXIT or (event.rank, event.operation) not in gone
    )
    remarks = tuple((rank, f"{STILL}{brief(text, 200)}") for rank, text in sorted(gone))
    undated = (each.undated | frozenset(rank for rank, _ in kept if rank in dumped)) - there
    return replace(each, events=events, traced=kept, undated=undated, remarks=(*each.remarks, *remarks))
