"""Stacks of host threads: py-spy's dumps (text and JSON) and faulthandler's text, which torch's dump_traceback prints.

    py-spy dump --pid 71                 Thread 71 (idle): "MainThread"
                                             all_reduce (torch/distributed/distributed_c10d.py:3252)
    py-spy dump --json --pid 71          [{"pid": 71, "thread_name": "MainThread", "frames": [{"name": ..}]}]
    faulthandler, POST dump_traceback    Thread 0x00007f8e [MainThread] (most recent call first):
                                           File "train.py", line 5 in step

A file may hold several dumps, one after the other. The rank of a process comes from a `[rank3]:` before its lines, from
the coordinates in its title where those say it, from its command line (`--rank 3`), or from the file's name.
`verify.readers.standing` tells what a thread stands in.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kernel.errors import UsageError
from verify.events import Site
from verify.readers import plain_json
from verify.readers.attempts import present_lines, restarted
from verify.readers.found import Found, Stack
from verify.readers.lines import MOST, file_lines, goes_on, holds, rank_in, rank_of_file, unusable, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

WHAT: Final = "stacks"
DO: Final = "give the text of `py-spy dump`, its --json, or faulthandler's"
DEEPEST: Final = 512
"""Frames kept of one thread, from the innermost one."""
LONGEST_NAME: Final = 400

_LOG = r"(?:\[(?:rank|default)\s?\d{1,7}\]:\s?)?"
_PROCESS = re.compile(_LOG + r"Process (?P<pid>\d{1,10}): (?P<title>.*)")
_SPY_THREAD = re.compile(
    _LOG + r'Thread (?P<tid>\d{1,20}|0x[0-9A-Fa-f]{1,16})(?: \((?P<state>[^()"]{0,60})\))?(?:: "(?P<name>.*)")?\s*$'
)
_SPY_FRAME = re.compile(_LOG + r"    (?P<function>\S.*) \((?P<file>[^()]*?)(?::(?P<line>\d{1,9}))?\)\s*$")
_FAULT_THREAD = re.compile(
    r"(?P<current>Current t|T)hread (?P<tid>0x[0-9A-Fa-f]{1,16})(?: \[(?P<name>.*)\])? \((?:most recent call first)\):"
)
_FAULT_FRAME = re.compile(r'^.{0,80}?  File "(?P<file>.*)", line (?P<line>\d{1,9}|\?{3}) in (?P<function>.+?)\s*$')
_TITLE_RANK = re.compile(r"(?:--(?:node|global|local)?[-_]?rank[= ]|\brank[ =:_])(\d{1,7})\b")
_LOCAL = re.compile(r"--(?:local|node)[-_]?rank")
FATAL: Final = re.compile(r"Fatal Python error: .{1,200}")
"""The first line that faulthandler writes of a process that is over: see `verify.readers.deaths`."""
_MARKS = (b"most recent call first", b"Process ", b"(active", b"(idle", b'"owns_gil"')


class StacksReader:
    """See the module."""

    name = "stacks"

    def recognises(self, path: Path, head: bytes) -> bool:
        """By a first thread's line, or JSON with `owns_gil`."""
        text = head.lstrip()
        if text[:1] in (b"[", b"{") and b'"frames"' in head and b'"thread_name"' in head:
            return True
        if not holds(path, head, _MARKS[:4]):
            return False
        spied = any(_SPY_THREAD.match(line) for line in head.decode(errors="replace").splitlines())
        return spied or any(
            _FAULT_THREAD.search(line) or _SPY_THREAD.match(line) for _, line in file_lines(WHAT, path, _MARKS)
        )

    def read(self, path: Path) -> Found:
        """All threads of all dumps in a file, in its order.

        Raises UsageError for a file without a stack, or JSON that is damaged or above `BIGGEST` bytes.
        """
        first = next((line for _, line in file_lines(WHAT, path) if line.strip()), "").lstrip()
        if first[:1] == "{" or (first[:1] == "[" and not re.match(r"\[[a-z]+\s?\d+\]:", first)):
            stacks = from_json(whole_file(WHAT, path), path)
        else:
            try:
                stacks = from_lines((line for _, line in present_lines(WHAT, path)), path, over=True)
            except UsageError:
                if not restarted(path):
                    raise
                stacks = []
        return found(path.name, stacks)

    def read_all(self, paths: Sequence[Path]) -> Found:
        """The stacks of one job, which may have been taken several times. Raises UsageError, one line, for those of two
        processes that are both of one rank.
        """
        from verify.readers.gather import merge

        told = [self.read(path) for path in paths]
        first: dict[int, tuple[Path, set[int]]] = {}
        for path, each in zip(paths, told, strict=True):
            pids: dict[int, set[int]] = {}
            for stack in each.stacks:
                if stack.rank is not None and stack.pid is not None:
                    pids.setdefault(stack.rank, set()).add(stack.pid)
            for rank, mine in pids.items():
                other, theirs = first.setdefault(rank, (path, mine))
                # Of its workers, one file may have all and another one none.
                if mine.isdisjoint(theirs):
                    raise UsageError(
                        f"{other} and {path}: stacks of two processes, pid {min(theirs)} and {min(mine)}, both of rank"
                        f" {rank}: name those of one job, taken since it was started last"
                    )
        return merge(told)


READER = StacksReader()


def found(source: str, stacks: list[Stack]) -> Found:
    """What stacks tell, and what they do not."""
    ranks = frozenset(stack.rank for stack in stacks if stack.rank is not None)
    unknown = []
    if nameless := sorted({stack.pid for stack in stacks if stack.rank is None and stack.pid is not None}):
        told = ", ".join(map(str, nameless[:8])) + (f" and {len(nameless) - 8} more" if len(nameless) > 8 else "")
        unknown.append(f"{source}: which rank is pid {told}? Name the file rank<k>.txt to say it")
    elif any(stack.rank is None for stack in stacks):
        unknown.append(f"{source}: which rank are these stacks of? Name the file rank<k>.txt to say it")
    return Found(source, expected=ranks, stacks=tuple(stacks), unknown=tuple(unknown))


def from_json(data: bytes | str, path: Path, rank: int | None = None) -> list[Stack]:
    """The threads of `py-spy dump --json`. rank: of its process, where known. Raises UsageError."""
    try:
        threads = plain_json.load(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise unusable(WHAT, path, f"damaged JSON ({error})", DO) from None
    if isinstance(threads, dict):
        threads = [threads]
    if not isinstance(threads, list) or not all(isinstance(each, dict) for each in threads):
        raise unusable(WHAT, path, "JSON, but no list of threads", DO)
    stacks = []
    for each in threads[:MOST]:
        frames, info = each.get("frames"), each.get("process_info")
        if not isinstance(frames, list):
            raise unusable(WHAT, path, "a thread without frames", DO)
        title = info.get("command_line") if isinstance(info, dict) else None
        whose = rank if rank is not None else rank_of_title(title) if isinstance(title, str) else None
        sites = [_site(frame) for frame in frames[:DEEPEST] if isinstance(frame, dict)]
        stacks.append(
            Stack(
                rank_of_file(path) if whose is None else whose,
                _text(each.get("thread_name")) or _text(each.get("os_thread_id")) or _text(each.get("thread_id")),
                tuple(sites),
                _number(each.get("pid")),
                gil if isinstance(gil := each.get("owns_gil"), bool) else None,
                tid=_number(each.get("os_thread_id")),
            )
        )
    if not stacks:
        raise unusable(WHAT, path, "no thread in it", DO)
    return stacks


def from_lines(lines: Iterable[str], path: Path, rank: int | None = None, over: bool = False) -> list[Stack]:
    """The threads in the text of py-spy or faulthandler, in its order. Raises UsageError where there is none.

    over: those that a fatal error printed are left out, as nobody stands there any more, and may be all there is.
    """
    stacks: list[Stack] = []
    dead: set[int | None] = set()
    frames: list[Site] = []
    pid, titled, kind, kept = None, None, "", 0

    def end() -> None:
        if frames:
            stacks[-1] = replace(stacks[-1], frames=tuple(frames))
            frames.clear()

    for line in lines:
        if kept > MOST:
            break
        if process := _PROCESS.match(line):
            end()
            pid, titled, kind = int(process["pid"]), rank_of_title(process["title"]), ""
        elif thread := _SPY_THREAD.match(line):
            end()
            state = thread["state"]
            whose = rank if rank is not None else titled if titled is not None else rank_in(line, path)
            gil = None if state is None else "gil" in state
            stacks.append(Stack(whose, (thread["name"] or thread["tid"])[:LONGEST_NAME], (), pid, gil))
            kind, kept = "spy", kept + 1
        elif thread := _FAULT_THREAD.search(line):
            end()
            whose = rank if rank is not None else rank_in(line, path)
            if whose in dead:
                kind = ""
                continue
            # faulthandler marks the thread that runs, which is the holder only while it itself has the lock.
            stacks.append(Stack(whose, (thread["name"] or thread["tid"])[:LONGEST_NAME], (), None, None))
            kind, kept = "fault", kept + 1
        elif over and FATAL.search(line):
            end()
            dead.add(rank_in(line, path))
            kind = ""
        elif dead and goes_on(line):
            dead.discard(rank_in(line, path))
        elif kind and len(frames) < DEEPEST:
            frame = (_SPY_FRAME if kind == "spy" else _FAULT_FRAME).match(line)
            if frame is not None:
                number = int(frame["line"]) if frame["line"] and frame["line"].isdigit() else 0
                frames.append(Site(frame["file"], number, frame["function"][:LONGEST_NAME]))
                kept += 1
    end()
    if not stacks and not dead:
        raise unusable(WHAT, path, "no stack in it", DO)
    return stacks


def rank_of_title(title: str) -> int | None:
    """The global rank that a command line or process title says, None where it says none, or a local one."""
    if _LOCAL.search(title):
        return None
    found = _TITLE_RANK.search(title)
    return int(found[1]) if found else None


def _site(frame: dict[str, Any]) -> Site:
    return Site(_text(frame.get("filename")), _number(frame.get("line")) or 0, _text(frame.get("name")))


def _text(value: object) -> str:
    return str(value)[:4096] if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
