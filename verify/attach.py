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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.errors import UsageError
from kernel.record import read
from verify.events import Site
from verify.readers import stacks
from verify.readers.found import Found, Stack
from verify.readers.record import of_recordings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.record import Recording

SPY_TIMEOUT_S = 20.0
MOST_OUTPUT = 1 << 24
THREADS = 4096


def attach(pids: Iterable[int], patience_s: float = 5.0, spy: str | None = "py-spy") -> Found:
    """What running processes show. patience_s: see `verify.readers.record`. spy: the py-spy to use, None for none.

    The rank of a process is that of its ring, else its environment's RANK. Raises UsageError, one line, for a pid that
    is no process, or where nothing at all may be read.
    """
    pids = list(dict.fromkeys(pids))
    recordings: dict[int, Recording] = {}
    threads: list[Stack] = []
    unknown: list[str] = []
    worlds: set[int] = set()
    for pid in pids:
        if not Path(f"/proc/{pid}").is_dir():
            raise UsageError(f"pid {pid}: no such process on this host: give the pids of ranks that run")
        rank = rank_of(pid)
        for path in ring_paths(pid):
            try:
                recording = read(path)
            except UsageError as error:
                unknown.append(f"pid {pid}: {error}")
                continue
            if recording.rank in recordings and recordings[recording.rank].pid != recording.pid:
                raise UsageError(f"pid {pid}: another one is rank {recording.rank} too: give the pids of one run")
            recordings[recording.rank] = recording
            rank = recording.rank
        if rank is None:
            unknown.append(f"pid {pid}: which rank is it? It has no RANK in its environment and no record")
        if (size := _number(environment(pid).get("WORLD_SIZE"))) is not None and 0 < size <= 1 << 20:
            worlds.add(size)
        seen, why = _stacks(pid, rank, spy)
        threads += seen
        unknown += why
    own = of_recordings(recordings, "record", patience_s) if recordings else Found("processes")
    ranks = frozenset(stack.rank for stack in threads if stack.rank is not None)
    expected = own.expected | (frozenset(range(worlds.pop())) if len(worlds) == 1 else frozenset())
    return replace(
        own,
        source="pid " + ", ".join(map(str, pids[:8])) + (f" and {len(pids) - 8} more" if len(pids) > 8 else ""),
        # A stack says where a rank stands, not which calls it has made: only a record does.
        present=own.present,
        expected=expected | ranks,
        stacks=tuple(threads),
        unknown=(*own.unknown, *unknown),
    )


def ring_paths(pid: int) -> list[Path]:
    """The rings that a process has mapped, as files that this process can open."""
    found: dict[Path, None] = {}
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            for line in maps:
                path = line.rstrip("\n").split(maxsplit=5)[5:]
                if path and re.search(r"/rank\d{1,9}\.ring$", path[0]):
                    found[_visible(pid, path[0])] = None
    except OSError:
        return []
    return list(found)


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


def _stacks(pid: int, rank: int | None, spy: str | None) -> tuple[list[Stack], list[str]]:
    """Its threads, and what they do not tell."""
    command = program(spy) if spy else None
    if command is None:
        return _proc_stacks(pid, rank), [f"pid {pid}: no lines of Python: install py-spy to see them"]
    try:
        # py-spy stops the process while it reads unless told not to.
        run = subprocess.run(
            [command, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            timeout=SPY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _proc_stacks(pid, rank), [f"pid {pid}: py-spy had not answered after {SPY_TIMEOUT_S:.0f} s"]
    except OSError as error:
        return _proc_stacks(pid, rank), [f"pid {pid}: py-spy does not run ({error.strerror})"]
    if run.returncode or len(run.stdout) > MOST_OUTPUT:
        lines = run.stderr.decode(errors="replace").strip().splitlines()
        said = lines[0].removeprefix("Error: ")[:160] if lines else f"exit code {run.returncode}"
        return _proc_stacks(pid, rank), [f"pid {pid}: py-spy may not read it ({said}): run as its user, or as root"]
    try:
        found = stacks.from_json(run.stdout, Path(f"pid {pid}"), rank)
    except UsageError as error:
        return _proc_stacks(pid, rank), [f"pid {pid}: {error}"]
    return [replace(each, pid=pid) for each in found], []


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
        found.append(Stack(rank, label, (Site("[kernel]", 0, where),), pid))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_bytes()[:4096].decode(errors="replace").strip()
    except OSError:
        return ""
