"""Arguments that no right program gives: sizes that do not fit the operation, within one call or over its members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verify import words
from verify.blame import Class, Verdict, minority
from verify.events import Confidence

if TYPE_CHECKING:
    from verify.events import Event
    from verify.matching import Meeting, Situation

Shapes = tuple[tuple[int, ...], ...] | None

HOST_FORMS = frozenset({"gloo"})
"""Media that record an operation under the name of another one, whose sizes it does not keep."""


def misfit(situation: Situation) -> Verdict | None:
    """A call whose input and output sizes contradict its operation, or an all_to_all that loses elements; or None."""
    in_order = sorted(situation.meetings.items(), key=lambda each: (each[0][1], each[0][0]))
    return next((verdict for _, meeting in in_order if (verdict := misfit_of(meeting)) is not None), None)


def misfit_of(meeting: Meeting) -> Verdict | None:
    """The same of one meeting of calls."""
    if meeting.key[0].kind != "collective":
        return None
    calls = {
        seat[0]: call
        for seat, (_, call) in sorted(meeting.arrived.items(), key=lambda each: each[0])
        if call.confidence is not Confidence.INFERRED
    }
    wrong = {rank: text for rank, call in calls.items() if (text := _contradiction(call, len(meeting.seats)))}
    if wrong:
        odd = minority([list(wrong), sorted(set(calls) - set(wrong))]) if len(wrong) < len(calls) else ()
        told = "; ".join(f"on rank {rank} {text}" for rank, text in list(wrong.items())[:2])
        say = f"{words.number(meeting)} cannot be right: {told}."
        chain = tuple(f"rank {rank}: {text}{words.at(calls[rank])}" for rank, text in wrong.items())
        return Verdict(Class.MISMATCH, ranks=odd, chain=chain, say=say, fix=words.FIXES["mismatch"])
    return _lost(meeting, calls) or _unlike(meeting, calls) if len(calls) == len(meeting.seats) else None


def _unlike(meeting: Meeting, calls: dict[int, Event]) -> Verdict | None:
    """An all_to_all in which a member sends another one more or less than that expects, though the sums agree."""
    members = [seat[0] for seat in meeting.seats]
    sent: dict[int, list[int]] = {}
    awaited: dict[int, list[int]] = {}
    for rank, call in calls.items():
        if call.operation != "all_to_all" or call.splits is None or call.sizes is None or call.outputs is None:
            return None
        sent[rank], awaited[rank] = ([sum(shape) for shape in shapes] for shapes in (call.sizes, call.outputs))
        if not len(sent[rank]) == len(awaited[rank]) == len(members):
            return None
    wrong = [
        (one, other, sent[one][there], awaited[other][here])
        for here, one in enumerate(members)
        for there, other in enumerate(members)
        if sent[one][there] != awaited[other][here]
    ]
    if not wrong:
        return None
    lines = tuple(
        f"rank {one} sends {taken} elements to rank {other}, which expects {given}"
        for one, other, taken, given in wrong
    )
    where = words.at(calls[wrong[0][0]])
    say = f"{words.number(meeting)}: the splits of this all_to_all do not fit: {lines[0]}{where}."
    # Whoever is on each of several pairs that do not fit is the odd one; a single pair has two sides.
    often = {rank for rank in members if all(rank in pair[:2] for pair in wrong)}
    odd = tuple(often) if len(often) == 1 and len(wrong) > 1 else ()
    return Verdict(Class.MISMATCH, ranks=odd, chain=lines[:8], say=say, fix=words.FIXES["mismatch"])


def _sums(medium: str, sizes: Shapes, outputs: Shapes) -> tuple[int, int] | None:
    """Elements in and out of a call, where both are known."""
    if medium in HOST_FORMS or not sizes or not outputs:
        return None
    if any(len(shape) != 1 for shape in (*sizes, *outputs)):
        return None
    return sum(shape[0] for shape in sizes), sum(shape[0] for shape in outputs)


def difference(medium: str, sizes: Shapes, outputs: Shapes) -> int | None:
    """By how many elements a call takes more than it gives; None where either is unknown."""
    sums = _sums(medium, sizes, outputs)
    return None if sums is None else sums[0] - sums[1]


def fits(operation: str, medium: str, sizes: Shapes, outputs: Shapes, members: int) -> bool:
    """Whether the sizes of one call are possible for its operation, as far as they are known."""
    if (sums := _sums(medium, sizes, outputs)) is None:
        return True
    taken, given = sums
    match operation:
        case "all_reduce":
            return taken == given
        case "all_gather":
            return taken * members == given
        case "reduce_scatter":
            return taken == given * members
    return True


def _contradiction(call: Event, members: int) -> str:
    sums = _sums(call.medium, call.sizes, call.outputs)
    if sums is None or fits(call.operation, call.medium, call.sizes, call.outputs, members):
        return ""
    return f"{call.name} takes {sums[0]} elements and gives {sums[1]}, of {members} members"


def _lost(meeting: Meeting, calls: dict[int, Event]) -> Verdict | None:
    if {call.operation for call in calls.values()} != {"all_to_all"}:
        return None
    sums = [_sums(call.medium, call.sizes, call.outputs) for call in calls.values()]
    known = [each for each in sums if each is not None]
    taken, given = sum(each[0] for each in known), sum(each[1] for each in known)
    if len(known) < len(sums) or taken == given:
        return None
    say = f"{words.number(meeting)}: the members of this all_to_all send {taken} elements and expect {given}."
    lines = tuple(
        f"rank {rank} sends {one[0]} and expects {one[1]}{words.at(calls[rank])}"
        for rank, one in zip(calls, known, strict=True)
    )
    return Verdict(
        Class.MISMATCH, chain=lines, say=f"{say} No majority tells which side is wrong.", fix=words.FIXES["mismatch"]
    )
