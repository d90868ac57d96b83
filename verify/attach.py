"""Evidence of processes that run: their own records, the stacks of their threads, and where Linux says they wait.

Nothing is stopped, written to or asked: a record is read from its file, stacks come from `py-spy dump --nonblocking`
where it is installed and allowed, and everything else from /proc.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.record import read
from verify import words
from verify.events import KERNEL, Confidence, Event, Kind, Site, State
from verify.jobs import launcher_of, refuse_records, refuse_several
from verify.lineage import is_python, only_ranks
from verify.no_rank import strangers
from verify.readers import stacks
from verify.readers.found import Found, Stack
from verify.readers.jobs import of_one_job, refuse_two
from verify.readers.killed import alive
from verify.readers.record import of_recordings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel.record import Recording

PATIENCE_S = 3.0
"""How long a rank may be silent that is not stuck."""
SPY_TIMEOUT_S = 20.0
TRIES = 4
"""Dumps that py-spy is asked for until one succeeds."""
AGAIN_S = 0.2
DENIED = b"permission"
"""What py-spy says, in small letters, where trying again does not help."""
APART_S = 0.5
"""Between two looks at a thread: one that stands at the same place in both, and did not run, is taken for blocked."""
MOST_OUTPUT = 1 << 24
THREADS = 4096
MOST_RINGS = 1 << 16


def attach(
    pids: Iterable[int],
    patience_s: float = PATIENCE_S,
    spy: str | None = "py-spy",
    beside: bool = False,
    rest: bool = True,
) -> Found:
    """What running processes show. patience_s: see `verify.readers.record`. spy: the py-spy to use, None for none.
    beside: there is other evidence. rest: wait for a rank that moved a moment ago to be silent for as long as that.

    The rank of a process is that of its ring, else its environment's RANK. The rings of other ranks beside its own are
    read too. Wrappers, launchers and workers of ranks that are given as well are left out (`verify.lineage`). A pid
    that is gone counts as a rank that has left, if its rank can be told. Threads are looked at twice. Records are read
    after that, so that a rank that has moved since is seen to have; and, with `rest`, where one moved less than
    patience_s ago, again when it should have been silent for so long.
    Raises UsageError, one line, for pids that are no processes, or no ranks (`verify.no_rank`), where nothing at all
    may be read, or for processes of several jobs: the ranks of one would be taken for those of the other.
    """
    pids = list(dict.fromkeys(pids))
    here = [pid for pid in pids if runs(pid)]
    gone = [pid for pid in pids if pid not in here]
    if gone and not here:
        which = f"pid {gone[0]}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else "")
        what = f"{which}: no such process on this host, or gone since"
        raise UsageError(f"{what}: give the pids of ranks that run, or the directory of their record")
    owners = [pid for pid in here if _keeps_a_record(pid)]
    here, unknown = strangers(here, rank_of, owners, beside)
    if not here:
        return Found("", unknown=tuple(unknown))
    here = only_ranks(here, {pid: rank_of(pid) for pid in here}, owners)
    refuse_several({pid: rank_of(pid) for pid in here}, {pid: environment(pid) for pid in here}, launcher_of)
    pids = [*here, *gone]
    worlds: set[int] = set()
    ranks: dict[int, int | None] = {}
    paths: dict[int, list[Path]] = {pid: ring_paths(pid) for pid in here}
    recordings = _recordings(paths, unknown)
    unknown += [line for pid in here if (line := _lost_record(pid)) is not None]
    for pid in here:
        mine = [rank for rank, recording in recordings.items() if recording.path in paths[pid]]
        ranks[pid] = mine[-1] if mine else rank_of(pid)
        if ranks[pid] is None:
            unknown.append(f"pid {pid}: which rank is it? It has no RANK in its environment and no record")
        if (size := _number(environment(pid).get("WORLD_SIZE"))) is not None and 0 < size <= 1 << 20:
            worlds.add(size)
    with ThreadPoolExecutor(min(8, len(here))) as pool:
        told = list(pool.map(lambda pid: _looks(pid, ranks[pid], spy), here))
    threads = [stack for seen, _ in told for stack in seen]
    unknown += [line for _, why in told for line in why]
    if recordings:
        recordings = _recordings(paths, []) or recordings
        if rest and (left_s := _youngest(recordings, patience_s)) > 0:
            time.sleep(left_s)
            recordings = _recordings(paths, []) or recordings
    own = of_recordings(recordings, "record", patience_s) if recordings else Found("processes")
    seen_ranks = frozenset(stack.rank for stack in threads if stack.rank is not None)
    expected = own.expected | seen_ranks | (frozenset(range(worlds.pop())) if len(worlds) == 1 else frozenset())
    told_of = frozenset[int]()
    left = sorted(expected - own.present - seen_ranks)
    events = own.events
    if gone and len(left) == len(gone):
        # Who is not here is who is gone.
        events += tuple(Event(rank, Kind.EXIT, state=State.COMPLETED, confidence=Confidence.INFERRED) for rank in left)
        taken = f"pid {', '.join(map(str, gone))}: gone, taken for {words.ranks(left)}"
        unknown.append(f"{taken}, of which nothing is here")
        told_of = frozenset(left)
    elif gone:
        unknown.append(f"pid {', '.join(map(str, gone))}: gone" + ("" if not left else ", and its rank is not known"))
    return replace(
        own,
        events=events,
        source="pid " + ", ".join(map(str, pids[:8])) + (f" and {len(pids) - 8} more" if len(pids) > 8 else ""),
        # A stack says where a rank stands, not which calls it has made: only a record does.
        present=own.present | told_of,
        expected=expected,
        stacks=tuple(threads),
        unknown=(*own.unknown, *unknown),
    )


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; one that its parent has not buried yet has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return Path(f"/proc/{pid}").is_dir()
    return text.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])


def _recordings(paths: Mapping[int, Sequence[Path]], unknown: list[str]) -> dict[int, Recording]:
    """The rings of some processes and, from the same folders, those of the other ranks of their run."""
    recordings: dict[int, Recording] = {}
    for pid, mine in paths.items():
        for path in mine:
            try:
                recording = read(path)
            except UsageError as error:
                unknown.append(f"pid {pid}: {error}")
                continue
            if recording.rank in recordings and recordings[recording.rank].pid != recording.pid:
                refuse_records(paths, {})
                raise UsageError(f"pid {pid}: another one is rank {recording.rank} too: give the pids of one run")
            recordings[recording.rank] = recording
    refuse_two((each.path, each) for each in recordings.values())
    sizes = [size for each in recordings.values() if isinstance(size := each.meta.get("size"), int)]
    for folder in {each.path.parent for each in recordings.values()}:
        for path in sorted(folder.glob("rank*.ring"))[:MOST_RINGS]:
            number = _number(path.stem.removeprefix("rank"))
            if number is None or number in recordings or (sizes and number >= max(sizes)):
                continue
            try:
                recordings[number] = read(path)
            except UsageError as error:
                unknown.append(str(error))
    kept, stale = of_one_job(recordings, alive)
    unknown += stale
    return kept


def _youngest(recordings: Mapping[int, Recording], patience_s: float) -> float:
    """Seconds until all of them have been silent for patience_s, should they stay so."""
    open_ = [each for each in recordings.values() if each.events and each.closed_ns is None]
    ages = [((each.read_ns or time.monotonic_ns()) - each.events[-1].time_ns) / 1e9 for each in open_]
    age = min(ages, default=-1.0)
    return patience_s - age + 0.05 if 0 <= age < patience_s else 0.0


def ring_paths(pid: int) -> list[Path]:
    """The rings that a process has mapped, as files that this process can open."""
    return list(dict.fromkeys(_visible(pid, name) for name in _mapped(pid) if not name.endswith(GONE)))


def _lost_record(pid: int) -> str | None:
    """What to say of a process whose ring has no name any more: a second job took its folder, or somebody deleted it.
    What it records goes nowhere.
    """
    names = _mapped(pid)
    if not names or not all(name.endswith(GONE) for name in names):
        return None
    name = names[0].removesuffix(GONE)
    what = "was replaced by that of a later job" if os.path.exists(name) else "was deleted"
    return f"pid {pid}: its record {name} {what} while it runs: not used; give each job a directory of its own"


GONE = " (deleted)"
"""How the name of a file ends that is mapped and was deleted (proc(5))."""


def _mapped(pid: int) -> list[str]:
    """The names of the rings that a process has mapped, as it sees them."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            names = [path[0] for line in maps if (path := line.rstrip("\n").split(maxsplit=5)[5:])]
    except OSError:
        return []
    return [name for name in dict.fromkeys(names) if re.search(r"/rank\d{1,9}\.ring( \(deleted\))?$", name)]


def _keeps_a_record(pid: int) -> bool:
    """Whether a ring that it has mapped is its own: those that it forks have it mapped as well."""
    for path in ring_paths(pid):
        with suppress(UsageError):
            if read(path).pid in (pid, _inside(pid)):
                return True
    return False


def _inside(pid: int) -> int:
    """The number of a process in the container in which it runs, where that has numbers of its own."""
    line = re.search(r"^NSpid:.*?(\d+)$", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return int(line[1]) if line else pid


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it may not be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition("=") for part in data.decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def rank_of(pid: int) -> int | None:
    """The global rank in a process's environment, as torchrun sets it."""
    return _number(environment(pid).get("RANK"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,7}", text) else None


def _visible(pid: int, name: str) -> Path:
    """A path of the process's own file system, where that is not ours."""
    inside = Path(f"/proc/{pid}/root{name}")
    try:
        if os.stat(f"/proc/{pid}/root").st_ino != os.stat("/").st_ino or not os.path.exists(name):
            return inside
    except OSError:
        pass
    return Path(name)


def program(name: str) -> str | None:
    """Where a program is: on the path, or beside this interpreter, whose environment need not be on it."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _looks(pid: int, rank: int | None, spy: str | None) -> tuple[list[Stack], list[str]]:
    """Its threads as the last of two looks shows them; those that ran since the first one are awake.

    Where the last look got no lines of Python and the first one did, those of the first one count, but that nothing is
    known to have stayed there.
    """
    counts, (before, unread) = _switches(pid), _stacks(pid, rank, spy)
    time.sleep(APART_S)
    after, unknown = _stacks(pid, rank, spy)
    again = _switches(pid)
    if unknown and not unread and after:
        return [replace(stack, awake=stack.thread != "MainThread" or counts != again) for stack in before], []
    known = {stack.thread: stack.frames for stack in before}
    ran = {"MainThread"} if counts != again else set()
    return [
        replace(stack, awake=stack.thread in ran or known.get(stack.thread) != stack.frames) for stack in after
    ], unknown


def _switches(pid: int) -> tuple[str, ...]:
    """What Linux counts of the main thread whenever it gets to run: its switches, and the time it has used."""
    place = Path(f"/proc/{pid}/task/{pid}")
    counts = [line for line in _read(place / "status").splitlines() if "ctxt_switches" in line]
    return (*counts, *_read(place / "stat").rpartition(")")[2].split()[11:13])


def _stacks(pid: int, rank: int | None, spy: str | None) -> tuple[list[Stack], list[str]]:
    """Its threads, and what they do not tell."""
    command = program(spy) if spy else None
    if command is None:
        return _proc_stacks(pid, rank), [f"pid {pid}: no lines of Python: install py-spy to see them"]
    try:
        run = _spy(command, pid)
        for _ in range(TRIES - 1):
            if not run.returncode or not runs(pid) or DENIED in run.stderr.lower():
                break
            # It reads what changes under it, and misses: a thread that ended, a frame that was left.
            time.sleep(AGAIN_S)
            run = _spy(command, pid)
    except subprocess.TimeoutExpired:
        return _proc_stacks(pid, rank), [f"pid {pid}: py-spy had not answered after {SPY_TIMEOUT_S:.0f} s"]
    except OSError as error:
        return _proc_stacks(pid, rank), [f"pid {pid}: py-spy does not run ({error.strerror})"]
    if run.returncode and not runs(pid):
        return [], [f"pid {pid}: gone: it ended while it was looked at"]
    if run.returncode and is_python(pid) is False:
        return _proc_stacks(pid, rank), [f"pid {pid}: not a Python process: give the pid of the rank that it runs"]
    if run.returncode or len(run.stdout) > MOST_OUTPUT:
        lines = run.stderr.decode(errors="replace").strip().splitlines()
        said = lines[0].removeprefix("Error: ")[:160] if lines else f"exit code {run.returncode}"
        if DENIED in run.stderr.lower():
            return _proc_stacks(pid, rank), [f"pid {pid}: py-spy may not read it ({said}): run as its user, or as root"]
        do = f"look again, or add the text of `py-spy dump --native --pid {pid}`"
        return _proc_stacks(pid, rank), [f"pid {pid}: no lines of Python: py-spy failed {TRIES} times ({said}): {do}"]
    try:
        found = stacks.from_json(run.stdout, Path(f"pid {pid}"), rank)
    except UsageError as error:
        return _proc_stacks(pid, rank), [f"pid {pid}: {error}"]
    return [replace(each, pid=pid, frames=_kernel_frame(pid, each) + each.frames) for each in found], []


def _spy(command: str, pid: int) -> subprocess.CompletedProcess[bytes]:
    """One dump of a process, which goes on meanwhile: py-spy stops it while it reads unless told not to."""
    return subprocess.run(
        [command, "dump", "--nonblocking", "--json", "--pid", str(pid)],
        capture_output=True,
        timeout=SPY_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _kernel_frame(pid: int, stack: Stack) -> tuple[Site, ...]:
    """Where Linux keeps a thread, if it says so: a frame below those of Python, which end at a call into C."""
    task = pid if stack.thread == "MainThread" else stack.tid
    wait = _read(Path(f"/proc/{pid}/task/{task}/wchan")) if task is not None else ""
    return (Site(KERNEL, 0, wait),) if wait and wait != "0" else ()


def _proc_stacks(pid: int, rank: int | None) -> list[Stack]:
    """One frame a thread: what Linux says it waits in (`futex_do_wait`), the main thread first."""
    found: list[Stack] = []
    try:
        threads = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task") if name.isdigit())
    except OSError:
        return []
    threads.sort(key=lambda thread: thread != pid)
    for thread in threads[:THREADS]:
        place = Path(f"/proc/{pid}/task/{thread}")
        wait, name, state = (_read(place / each) for each in ("wchan", "comm", "stat"))
        state = state.rpartition(")")[2].split()[0] if ")" in state else ""
        where = wait if wait and wait != "0" else {"R": "running", "D": "uninterruptible sleep"}.get(state, "asleep")
        label = "MainThread" if thread == pid else name or str(thread)
        found.append(Stack(rank, label, (Site(KERNEL, 0, where),), pid))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_bytes()[:4096].decode(errors="replace").strip()
    except OSError:
        return ""
