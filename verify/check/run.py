"""A run that was recorded, judged by the order certificate: what its ranks enqueued, as far as their rings tell it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.record import read_run
from verify.blame import Class
from verify.check.answer import Answer, conclusion, told, worst, wrapped
from verify.explore.result import Conclusion
from verify.order import certify, from_record
from verify.readers.jobs import of_one_job
from verify.readers.killed import alive
from verify.words import ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.record import Recording
    from verify.check.args import Options


def check_run(options: Options) -> Answer:
    """The answer about a run directory, or one that holds several. Raises UsageError where there is no usable ring."""
    folder = Path(options.target)
    several = [] if _has_rings(folder) else sorted(each for each in folder.iterdir() if _has_rings(each))
    answers = [_judged(options, each) for each in several or [folder]]
    first = answers[worst([(answer.verdict, answer.certainty) for answer in answers])]
    if not several:
        return first
    body = [line for answer in answers for line in (*answer.body, "")]
    return replace(
        first, scope=f"{len(answers)} runs in {folder}", body=tuple(body),
        more={"runs": [answer.to_dict() for answer in answers]},
    )  # fmt: skip


def _has_rings(folder: Path) -> bool:
    place = folder / "record" if (folder / "record").is_dir() else folder
    return place.is_dir() and any(re.fullmatch(r"rank\d+\.ring", each.name) for each in place.iterdir())


def _judged(options: Options, folder: Path) -> Answer:
    recordings, stale = of_one_job(read_run(folder), alive)
    orders = from_record(recordings)
    if not orders.kernels:
        raise UsageError(f"{folder}: its rings hold no collective: record more of it, with a larger ring")
    result = certify(orders, options.capacity)
    verdict = result.verdict
    says, whole = _rings(recordings)
    says += [f"record    {line}" for line in stale]
    concluded = conclusion(verdict)
    reason = ""
    if concluded is Conclusion.PROVED and not whole:
        concluded, reason = Conclusion.INCONCLUSIVE, "nothing was found in what can be read, and there is more"
    room = result.residency.say if result.residency is not None else ""
    capacity = "" if options.capacity is None else f", capacity {options.capacity}"
    scope = f"{folder}: {result.scope}{capacity}"
    lines = [*(line for each in says for line in wrapped(each, 10))]
    if verdict.cls is Class.NONE:
        lines += wrapped(f"order     a common order of all {len(orders.comm):,} collectives and rendezvous. {room}", 10)
    else:
        lines += wrapped(f"found     {verdict.say}", 10, 8)
        for line in [each for each in verdict.chain if each not in verdict.say][:12]:
            lines += wrapped(f"          {line}", 12, 3)
        lines += wrapped(f"fix       {verdict.fix}", 10) if verdict.fix else []
    return Answer(
        concluded, verdict.cls, verdict.certainty, scope, None,
        counterexample=None if verdict.cls is Class.NONE else told(verdict),
        more={"ranks": sorted(recordings), "collectives": len(orders.comm), "kernels": orders.kernels, "room": room,
              "rings": says},
        body=tuple(lines), reason=reason,
    )  # fmt: skip


def _rings(recordings: Mapping[int, Recording]) -> tuple[list[str], bool]:
    """What the rings lack, and whether everything that they still hold could be read, of every rank."""
    says = []
    everybody = {rank for each in recordings.values() for group in each.groups.values() for rank in group}
    absent = sorted(everybody - set(recordings))
    cut = [rank for rank, each in recordings.items() if each.truncated]
    torn = [rank for rank, each in recordings.items() if each.torn and not each.truncated]
    old = [rank for rank, each in recordings.items() if each.dropped]
    alive = [rank for rank, each in recordings.items() if each.closed_ns is None]
    for who, what in (
        (absent, "left no ring"),
        (cut, "left a ring that is cut off: its file is shorter than it was made"),
        (torn, "left a ring with events that are damaged, or were being written while it was read"),
        (old, "wrote more than its ring holds: the oldest events are overwritten"),
        (alive, "did not close its ring: it runs, or was ended"),
    ):
        if who:
            says.append(f"record    {ranks(who)}: {'each ' if len(who) > 1 else ''}{what}")
    return says, not (absent or cut or torn)
