"""Which threads of a process may go on by themselves, as /proc shows them at one moment.

A thread that waits in a private futex without a time limit goes on only if another thread of its process lets it. If
all of them do so, but for those that wait in calls of other ranks (and the threads of torch, its backends and the
record, which do nothing else), then nothing happens in the process before one of these calls ends: it is closed. A
thread that runs, waits for the clock, or in any other call of the system, as for a file, a socket, a signal or a child
process, may do anything next: the call, too, for which other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from verify import words
from verify.live.calls import ANY, CHILD, call_of
from verify.live.children import children_of
from verify.live.holders import named
from verify.live.idle import switches
from verify.live.named import only_serves
from verify.live.timed import limited, remaining, signalled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.live.calls import Call
    from verify.live.outside import Outside

DAY_S: Final = 86400.0
NEVER_S: Final = 100 * DAY_S


class Moves(NamedTuple):
    """What may move in a process. main: by what the wait of its main thread ends by itself, "" if it does not, or is
    in a call. locked: whether that waits for another thread of the process. polls: whether it waits for any of several
    files, which another thread may write to, as an event loop does. others: what other threads do that may go on by
    themselves, a text each. pid: its number, 0 where it is none of this host's. outside: what its main thread waits for
    outside of it, where that was looked at (`verify.live.outside`). children: what to say of its child processes.
    """

    main: str = ""
    locked: bool = True
    others: tuple[str, ...] = ()
    polls: bool = False
    pid: int = 0
    outside: Outside | None = None
    children: tuple[str, ...] = ()

    @property
    def closed(self) -> bool:
        """Whether nothing happens in it before a call of other ranks ends."""
        return self.locked and not self.main and not self.others


See = Callable[[Collection[int]], "Mapping[int, Moves]"]
"""Asked for the processes of some ranks, it gives what it can see of them."""


def nothing_seen(_: Collection[int]) -> Mapping[int, Moves]:
    """The processes are not here."""
    return {}


def nothing_hidden(ranks: Collection[int]) -> Mapping[int, Moves]:
    """Their records show all threads that make calls, and what each waits in."""
    return dict.fromkeys(ranks, Moves(locked=False))


def of_processes(pids: Mapping[int, int], ranks: Collection[int]) -> Mapping[int, Moves]:
    """Of those of `ranks` whose processes run here. pids: by rank."""
    seen = {rank: moves(pids[rank]) for rank in ranks if rank in pids}
    return {rank: now for rank, now in seen.items() if now is not None}


def moves(pid: int, of_python: Collection[int] = ()) -> Moves | None:
    """What may move in a process of this host; None where the system does not tell, or it is gone.

    of_python: threads of it that run code of Python, as far as that is known, so that they are none of torch's own.
    """
    tasks = Path(f"/proc/{pid}/task")
    try:
        before = switches(tasks)
        each = {int(task.name): _moves(task, int(task.name) in of_python) for task in tasks.iterdir()}
        children = children_of(pid)
        call = call_of(tasks / str(pid))
        # Threads that hand on to one another may each be seen to wait, though at no moment all of them did.
        ran = switches(tasks) != before
    except (OSError, ValueError):
        return None
    if any(what is None for what in each.values()):
        return None
    others = tuple(dict.fromkeys(what for tid, what in sorted(each.items()) if what and tid != pid))
    worker = f"a child process that works for it ({named(children.living)})"
    others = (*others, *[worker] * bool(children.living), *["threads that run in turn"] * ran)
    locked, polls = call is not None and call.inside, call is not None and call.name in ANY
    ends = _ends(tasks / str(pid), call)
    return Moves(ends, locked, others, polls, pid, children=tuple(children.lines))


def _ends(task: Path, call: Call | None) -> str:
    """By what a wait of the main thread ends, if it may end without another rank or a file."""
    if call is not None and call.shared:
        return "another process"
    if call is not None and limited(call):
        return _clock(task)
    if caught := signalled(task):
        return f"a signal that it catches ({caught})"
    # What a file or a socket gives is not up to the job, and neither is it sure to come.
    return "a child process" if call is not None and call.name in CHILD else ""


def _clock(task: Path) -> str:
    left = remaining(task)
    if left is None:
        return "the clock"
    if left > NEVER_S:
        # Libraries give such a limit for none at all.
        return f"the clock, in over {NEVER_S / DAY_S:.0f} days"
    return f"the clock, in {words.seconds(left)}" if left < 2 * DAY_S else f"the clock, in {left / DAY_S:.0f} days"


def _moves(task: Path, of_python: bool) -> str | None:
    """What a thread does that may go on by itself, "" where it cannot; None where that is not told."""
    try:
        name = (task / "comm").read_text(errors="replace").strip()
        state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        call = call_of(task)
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return ""
    if not of_python and only_serves(task, name, call):
        return ""
    if state != "S":
        return "a thread that runs" if state == "R" else "a thread that waits for a disk" if state == "D" else ""
    if call is None:
        return None
    if call.shared:
        return "a thread that waits for another process"
    if limited(call):
        return f"a thread that waits for {_clock(task)}"
    return "" if call.inside else f"a thread that waits for {call.waits_for}"
