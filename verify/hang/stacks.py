"""What a host's stack says about where it stands: in a collective, at its device, at a store, or outside of all these.

A stack of Python frames alone often ends in the line that called into C. That line is read where its file is at hand;
otherwise nothing is concluded from it, and the rank keeps the standing that the other evidence gives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from verify.events import KERNEL, Communicator, Confidence, Event, Kind, Site, State
from verify.hang.idling import AT_ITS_END, By, idles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.readers.found import Found, Stack


class At(StrEnum):
    """Where a host thread stands."""

    COLLECTIVE = "collective"
    CALL = "call"
    """It waits for a call that it has made before, through its Work or its future."""
    DEVICE = "device"
    """It waits until its device is through."""
    STORE = "store"
    """It waits for a key that somebody sets."""
    OUTSIDE = "outside"
    RUNNING = "running"
    """It ran since, or its rank moved: it is not blocked where it was seen."""
    UNCLEAR = "unclear"
    """Its innermost frame is a line of the program, which may call anything."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands. what: the function, in the words of the stack. site: in the program. thread, tid: of which
    thread that is told, "" for the main one, and its number, where that is known.
    """

    rank: int
    at: At
    what: str
    site: Site
    thread: str = ""
    tid: int | None = None

    @property
    def line(self) -> Site | None:
        """The line; None where no line of Python could be read of the thread."""
        return None if self.site.file == KERNEL else self.site

    @property
    def spot(self) -> str:
        """The same in words, to come after "at"."""
        return f"{UNREAD} ({self.site})" if self.line is None else str(self.line)

    @property
    def who(self) -> str:
        """`rank 1`, `rank 1 (thread trainer)`."""
        return f"rank {self.rank} (thread {self.thread})" if self.thread else f"rank {self.rank}"


UNREAD: Final = "a line that could not be read"
INSIDE: Final = (At.COLLECTIVE, At.CALL)
"""In a call of torch.distributed, or in a wait for one."""
LIBRARY: Final = re.compile(
    r"(^|/)(torch|site-packages|dist-packages|python3\.\d+|kernel/comm/tap)/|^<|\.so[.\d]*$|^[^/]*\.(cpp|cu|c)$|"
    r"(^|/)python3?(\.\d+)?$|^(asyncio|concurrent/futures|multiprocessing|importlib|http|urllib|logging|email)/|"
    r"^(_pyio|_weakrefset|codecs|contextlib|copy|functools|io|os|pickle|queue|runpy|sched|selectors|shutil|signal|"
    r"socket|socketserver|ssl|subprocess|tempfile|threading|traceback|typing|weakref)\.py$"
)
"""Files of the interpreter and of torch, also by the short names that `py-spy dump` prints (`threading.py`)."""
STORE: Final = re.compile(r"(TCP|File|Hash|Prefix|UvTCP)?Store\w*::(wait|doWait|get|doGet)\b|^_store_based_barrier$")
DEVICE: Final = re.compile(
    r"^_engine_run_backward$|^(cuda|hip|cu)(Device|Ctx|Stream|Event)Synchronize|^cudaMemcpy$|_local_scalar_dense|"
    r"::(cuda|hip)::\w*[sS]ynchronize"
)
DEVICE_FILES: Final = re.compile(r"(^|/)torch/(cuda|xpu|accelerator)/|(^|/)deep_ep/")
COLLECTIVE_FILES: Final = re.compile(r"(^|/)torch/distributed/")
INTERNAL_FILES: Final = re.compile(r"(^|/)torch/(distributed/(?!checkpoint/|elastic/|launcher/|run\.py)|nn/parallel/)")
"""Where torch itself makes collectives that no function of its interface stands for, as DDP's constructor does."""
WAITERS: Final = re.compile(
    r"(^|/)torch/(distributed/|_ops\.py|_C/|nn/parallel/|autograd/|utils/_contextlib)|(^|/)kernel/comm/tap/|"
    r"\.so[.\d]*$|\.(cpp|cc|cu|c|h|hpp)$|^(?!<(frozen|string))[^/]*(?<!\.py)$"
)
"""Where a thread that waits in a collective has its innermost frame. Elsewhere (as in an import) it is on its way."""
COLLECTIVE: Final = re.compile(
    r"^(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|reduce|gather\w*|scatter\w*|barrier|"
    r"monitored_barrier|send|recv|batch_isend_irecv|new_group|destroy_process_group|init_process_group)$"
)
WORK: Final = re.compile(r"c10d::(Work|ProcessGroup)\w*(::\w+)*::(wait|synchronize)|ncclGroupEnd|ncclCommInit|gloo::")
TAP: Final = re.compile(r"(^|/)kernel/comm/tap/")
"""Where the record wraps calls and waits for them: what is below is in C, and leaves no frame."""
WAIT_TENSOR: Final = re.compile(r"(^|/)torch/distributed/_functional_collectives\.py wait_tensor$")
"""Where the result of a functional collective is waited for, as tensor parallelism does."""
FUTURE_FILES: Final = re.compile(r"(^|/)torch/futures/")
FUTURE: Final = re.compile(r"^(Future\.)?(wait|value|wait_all)$")
"""Waiting for a future of a call of torch, as for its Work."""
LINE: Final = (
    (At.STORE, re.compile(r"store\w*\.(wait|get|wait_for)\s*\(", re.IGNORECASE)),
    (At.CALL, re.compile(r"\bget_future\(\).*\.(wait|value)\s*\(|\b(fut\w*|work\w*|handle\w*|req\w*)\.wait\s*\(")),
    (At.DEVICE, re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\s*\(")),
    (
        At.OUTSIDE,
        re.compile(
            r"^(?!.*\b(dist|distributed|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|wait)\b).*"
            r"(\b(sleep|input|flock|fsync|select)|\bos\.(read|write|open|waitpid)|\bsubprocess\.\w+|"
            r"\.(read|readline|readlines|readinto|recv|recv_into|accept|connect|acquire|communicate))\s*\("
        ),
    ),
)
"""Calls into C that leave no frame, as a line of the program shows them."""
CALL: Final = re.compile(
    r"(?:[A-Za-z_][\w.]*\.)?(?:sleep|input|flock|fsync|select|read|write|open|waitpid|readline|readlines|readinto|recv|"
    r"recv_into|accept|connect|acquire|communicate|(?<=subprocess\.)\w+)(?=\s*\()"
)
"""The name of the function that such a line of `At.OUTSIDE` calls."""
LOCK: Final = re.compile(r"^(lock_)?PyThread_acquire_lock|^acquire_timed$|^rlock_acquire|^_?PyMutex_Lock")
"""Frames of C in which the interpreter waits for a lock of the program."""
SHUTDOWN: Final = re.compile(r"(^|/)threading\.py _shutdown$")
"""Where Python joins the other threads of a process whose main thread has come to its end."""
WITH: Final = re.compile(r"^with\s+(?P<name>[\w.\[\]'\"]+)\s*:\s*(pass\b|\.\.\.)?\s*(#.*)?$")
"""Entering what a name stands for: where that is in C and leaves no frame, the thread waits in the entering itself."""
LOCKLIKE: Final = re.compile(r"(lock|mutex|semaphore)s?\b|\bsem\b", re.IGNORECASE)
AWAKE: Final = frozenset({"running", "0", ""})
KERNEL_WAITS: Final = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"pipe_read|wait_for_partner|pipe_wait", "a read of a pipe"),
        (r"pipe_write", "a write to a pipe"),
        (r"nanosleep", "a sleep"),
        (r"tty_read|wait_woken_tty|n_tty", "a read of a terminal"),
        (r"flock|posix_lock|locks_lock|lock_file_wait|fcntl_setlk", "a file lock"),
        (r"^(nfs|rpc_|fuse|ceph|cl_|ll_|lustre)", "a network file system"),
        (r"io_schedule|folio_wait|wait_on_page|blk_|jbd2", "the disk"),
        (r"^(do_wait|wait4|kernel_wait)", "a child process"),
        (r"do_signal_stop|ptrace_stop", "a stop signal or a debugger"),
    )
)
"""Waits of the kernel that no collective makes. Futexes and sockets are not among them: gloo and stores use both."""
LARGEST: Final = 4 << 20
KEY: Final = "store: "
"""How a record begins the name of a wait for a key of the store."""


def places_of(found: Found) -> dict[int, Place]:
    """Where the ranks of some evidence stand. Where it tells of several threads of a rank, stacks tell of the main one;
    of all other ranks it is not known which thread makes their calls, and stacks of other threads count too.
    """
    told = frozenset(event.rank for event in found.events if event.thread) | found.whole
    return places(found.stacks, found.lively, told)


def places(
    stacks: Iterable[Stack], lively: frozenset[int] = frozenset(), told: frozenset[int] = frozenset()
) -> dict[int, Place]:
    """Where each rank stands, for the ranks that are known: its main thread, or where that waits elsewhere, a thread
    that is in a call; or else the thread that does on this rank what such a thread does on another one.

    lively: ranks that moved a moment ago, so that nothing that a stack shows them in keeps them. told: ranks of which
    the main thread alone counts.
    """
    mine: dict[int, list[Stack]] = {}
    for stack in stacks:
        if stack.rank is not None and stack.frames:
            mine.setdefault(stack.rank, []).append(stack)
    found: dict[int, tuple[Place, Stack]] = {}
    roles: set[tuple[str, str]] = set()
    for rank, each in sorted(mine.items()):
        main = _main(each)
        found[rank] = _place(rank, main), main
        for stack in each if rank not in told and _idles(found[rank][0]) else ():
            if stack is not main and (place := _place(rank, stack)).at in INSIDE:
                found[rank] = replace(place, thread=stack.thread, tid=stack.tid), stack
                roles |= _roles(stack)
                break
    for rank, (place, main) in found.items() if roles else ():
        if rank in told or place.thread or not _idles(place):
            continue
        alike = [stack for stack in mine[rank] if stack is not main and roles & _roles(stack)]
        if len(alike) == 1:
            found[rank] = replace(_place(rank, alike[0]), thread=alike[0].thread, tid=alike[0].tid), alike[0]
    for rank, (place, stack) in found.items():
        same = [each for each in mine[rank] if each.pid == stack.pid is not None and each.thread == stack.thread]
        looks = {each.frames for each in same}
        if rank in lively or (stack.awake and place.at is At.OUTSIDE) or len(looks) > 1:
            found[rank] = replace(place, at=At.RUNNING), stack
    return {rank: place for rank, (place, _) in found.items()}


def _idles(place: Place) -> bool:
    """Whether a thread may stand there for another one to do something."""
    return place.at is At.UNCLEAR or (place.at is At.OUTSIDE and idles(place.what) in (By.OWN, By.LOOP))


def _roles(stack: Stack) -> set[tuple[str, str]]:
    """What a thread is there for: the outermost function of the program in it."""
    own = [frame for frame in stack.frames if frame.file != KERNEL and not LIBRARY.search(frame.file)]
    return {(own[-1].file, own[-1].function)} if own else set()


def _main(stacks: Sequence[Stack]) -> Stack:
    named = [stack for stack in stacks if "MainThread" in stack.thread]
    modules = [stack for stack in stacks if stack.frames[-1].function == "<module>"]
    return [*named, *modules, *stacks][0]


def _place(rank: int, stack: Stack) -> Place:
    frames = tuple(frame for frame in stack.frames if frame.file != KERNEL) or stack.frames
    own = [frame for frame in frames if not LIBRARY.search(frame.file)]
    site = own[0] if own else frames[0]
    inner = frames[: frames.index(site)] if own else frames
    waits_in_it = bool(inner) and bool(WAITERS.search(inner[0].file))
    for frame in inner:
        name = frame.function
        if STORE.search(name):
            return Place(rank, At.STORE, name, site)
        if DEVICE.search(name) or (DEVICE_FILES.search(frame.file) and re.search(r"synchronize|wait", name)):
            return Place(rank, At.DEVICE, name, site)
        if WAIT_TENSOR.search(f"{frame.file} {name}"):
            return Place(rank, At.CALL, "a wait for a call", site)
        if FUTURE_FILES.search(frame.file) and FUTURE.search(name):
            return Place(rank, At.CALL, "a wait for a future", site)
        if WORK.search(name) or (waits_in_it and COLLECTIVE_FILES.search(frame.file) and COLLECTIVE.search(name)):
            return Place(rank, At.COLLECTIVE, name, site)
    waits = _kernel(stack)
    if inner and INTERNAL_FILES.search(inner[0].file):
        return Place(rank, At.COLLECTIVE, inner[0].function or str(inner[0]), site)
    if inner and TAP.search(inner[0].file):
        return Place(rank, At.CALL, "a wait for a call", site)
    if inner and inner[0].file != KERNEL:
        return Place(rank, At.OUTSIDE, waits or _function(inner), site)
    line = source_line(site)
    if (entered := WITH.search(line)) and (LOCKLIKE.search(entered["name"]) or _futex(stack)):
        return Place(rank, At.OUTSIDE, f"a lock, {entered['name']}", site)
    at = next((at for at, pattern in LINE if pattern.search(line)), At.UNCLEAR)
    if at is At.UNCLEAR and waits:
        return Place(rank, At.OUTSIDE, waits, site)
    if at is At.OUTSIDE:
        called = CALL.search(line)
        return Place(rank, at, waits or (called[0] if called else site.function), site)
    if at is At.CALL:
        return Place(rank, at, "a wait for a call", site)
    return Place(rank, at, line if at is not At.UNCLEAR else site.function, site)


def _function(inner: Sequence[Site]) -> str:
    """What a thread is in, of the frames below the program's: the first with a name, or a lock."""
    named = [frame for frame in inner if frame.function and not frame.function.startswith("0x")]
    if any(SHUTDOWN.search(f"{frame.file} {frame.function}") for frame in named):
        return AT_ITS_END
    if any(LOCK.search(frame.function) for frame in named):
        # What Python itself builds on locks, as a queue, says more.
        return next((frame.function for frame in named if frame.file.endswith(".py")), "a lock")
    return named[0].function if named else str(inner[0])


def _futex(stack: Stack) -> bool:
    """Whether Linux says that a thread waits for another one of its process."""
    return any(frame.file == KERNEL and frame.function.startswith("futex") for frame in stack.frames)


def _kernel(stack: Stack) -> str:
    """What a thread waits for by the kernel's word, where that is no business of a collective's; empty otherwise."""
    function = next((frame.function for frame in stack.frames if frame.file == KERNEL), "")
    what = next((what for pattern, what in KERNEL_WAITS if pattern.search(function)), "")
    if stack.holds_gil and function and function not in AWAKE:
        return f"{what or function}, with the interpreter lock held"
    return what


def source_line(site: Site) -> str:
    """The line of the program, if its file is here; only Python files of a usual size are opened."""
    path = Path(site.file)
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > LARGEST:
            return ""
        lines = path.read_text(errors="replace").splitlines()
    except (OSError, ValueError):
        return ""
    text = lines[site.line - 1].strip()[:100] if 0 < site.line <= len(lines) else ""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def standings(events: Iterable[Event], where: dict[int, Place]) -> list[Event]:
    """One event for each rank whose stack says where it stands, to come after its other events.

    A host at its device or in a collective waits for what it has open; at a store it is outside collectives.
    """
    found = []
    open_ = {event.rank for event in events if event.calls and event.state is not State.COMPLETED}
    for place in where.values():
        if place.at in (At.DEVICE, At.COLLECTIVE) or (place.at is At.CALL and place.rank in open_):
            found.append(Event(place.rank, Kind.WAIT, streams=("*",), site=place.line))
        elif place.at is At.STORE:
            found.append(Event(place.rank, Kind.EXTERNAL, "a wait for a key of the store", site=place.line))
        elif place.at is At.OUTSIDE:
            found.append(Event(place.rank, Kind.EXTERNAL, place.what, site=place.line))
    return found


def recorded(found: Found, where: dict[int, Place]) -> tuple[frozenset[int], dict[int, Place]]:
    """Ranks whose own record says what they wait in, which is more than a stack does; and all places, with theirs.

    A place that only the record knows is added where it is a store: whose key it is does not matter then.
    """
    last = {event.rank: event for event in found.events if not event.thread}
    known, places_ = set(), dict(where)
    for rank, event in last.items():
        if event.kind is Kind.EXIT and event.operation and event.confidence is not Confidence.INFERRED:
            known.add(rank)  # its stack is that of a process that waits for its other threads
        if rank not in found.whole or event.state is State.COMPLETED or event.confidence is Confidence.INFERRED:
            continue
        if event.kind is Kind.EXTERNAL and event.operation.startswith(KEY):
            site = event.site or Site("", 0)
            places_[rank] = Place(rank, At.STORE, event.operation.removeprefix(KEY), site)
            known.add(rank)
        elif event.kind in (Kind.WAIT, Kind.EXTERNAL) or event.blocking:
            known.add(rank)
    return frozenset(known), places_


def for_anybody(place: Place, peers: Iterable[int]) -> list[Event]:
    """The same host as one that waits for any of `peers`: a key that one of them sets, or a call that one must make."""
    name = f"? {place.at}"
    events = []
    for peer in sorted(set(peers) - {place.rank}):
        pair = Communicator((peer, place.rank), name)
        call = Event(place.rank, Kind.RECV, "recv", stream=f"{name} {peer}", communicator=pair, peer=peer)
        events.append(replace(call, site=place.line))
    streams = tuple(event.stream for event in events)
    return [*events, Event(place.rank, Kind.WAIT, streams=streams, any_of=True, site=place.line)] if events else []
