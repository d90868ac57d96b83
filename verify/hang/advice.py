"""What to do about a finding where the evidence at hand decides what helps: not to add what has been given already."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from verify import words
from verify.blame import Certainty, Class
from verify.matching import Standing
from verify.readers.found import ENDED

if TYPE_CHECKING:
    from verify.blame import Verdict
    from verify.hang.case import Case

STOPPED: Final = "stop signal"
"""How the standing of a process that is stopped is told, by its record and by its stack."""
_NATIVE: Final = (".so", ".cpp", ".cc", ".c", ".cu", ".h")
"""How files of frames end that are not Python's; of a library it may go on with its version."""


def advised(verdict: Verdict, case: Case) -> Verdict:
    """The verdict with what to do about it."""
    stopped = sorted({host.rank for host in case.hosts(Standing.OUTSIDE) if _stopped(case, host.rank)})
    undecided = verdict.certainty is Certainty.UNDECIDED
    if stopped and (undecided or set(verdict.ranks) & set(stopped)):
        return replace(verdict, fix=_continued(case, stopped))
    if undecided:
        return replace(verdict, fix=_decided(case))
    raised = {rank for rank, text in case.found.remarks if text.startswith(ENDED)}
    if verdict.cls in (Class.MISSING, Class.OUTSIDE) and raised & set(verdict.ranks):
        return replace(verdict, fix=words.THREAD)
    return verdict


def _stopped(case: Case, rank: int) -> bool:
    hosts = [host for host in case.hosts(Standing.OUTSIDE) if host.rank == rank and host.event is not None]
    return any(STOPPED in host.event.operation for host in hosts if host.event is not None)


def _continued(case: Case, ranks: list[int]) -> str:
    pids = sorted({stack.pid for stack in case.found.stacks if stack.rank in ranks and stack.pid is not None})
    which = " ".join(map(str, pids)) or "PID"
    held = "it" if len(ranks) == 1 else "them"
    return f"Let {words.ranks(ranks)} go on: kill -CONT {which}, or end the debugger on {held}; then look again."


def _decided(case: Case) -> str:
    """What is not here and might decide."""
    found, everybody = case.found, set(case.everybody)
    seen = {stack.rank for stack in found.stacks}
    if any(stack.rank is None for stack in found.stacks):
        return (
            "Say which rank each process is: put the text of py-spy dump --pid PID of each into a file with its rank in"
            " the name (rank0.txt), and name these files."
        )
    if not everybody or not seen >= everybody:
        return words.DECIDE if not found.whole or not found.whole >= everybody else words.STACKS
    wants = []
    if not any(_native(frame.file) for stack in found.stacks for frame in stack.frames):
        # What DDP, batched transfers and other code in C++ waits in leaves no frame of Python.
        wants.append("the text of py-spy dump --native --pid PID of each rank, in files rank0.txt, rank1.txt, ...")
    if not found.present >= everybody:
        wants.append("dumps of all ranks")
    if not found.whole >= everybody:
        wants.append("a record (turnstile.record.install) of the next run")
    if not wants:
        return "Look again after a while."
    told = ", ".join(wants[:-1]) + " or " + wants[-1] if len(wants) > 1 else wants[0]
    return f"Look again after a while, and add what is not here: {told}."


def _native(file: str) -> bool:
    return file.endswith(_NATIVE) or ".so." in file
